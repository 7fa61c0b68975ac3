"""The kinds of faults."""

from __future__ import annotations

from tests.chaos.faults.cells import InCell
from tests.chaos.faults.disk import DiskFull, FolderFull
from tests.chaos.faults.fault import Fault
from tests.chaos.faults.files import Damage
from tests.chaos.faults.garbage import OnPorts, OnSubject
from tests.chaos.faults.hands import ByHand
from tests.chaos.faults.processes import Kill, Pause
from tests.chaos.faults.stores import ClockStep, Network, StoresAway

KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind
    for kind in (
        Kill,
        Pause,
        StoresAway,
        Network,
        ByHand,
        Damage,
        OnSubject,
        OnPorts,
        DiskFull,
        InCell,
        ClockStep,
        FolderFull,
    )
}
"""By name. A new kind goes to the end, so that a seed's draws change as little as can be."""
