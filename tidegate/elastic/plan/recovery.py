"""From which update a job goes on, and who gives each rank's tensors. Pure: the same offers, the same choice.

Members offer what they can read: their own tensors and copies, and those that dead ranks left on their host or with
them. The newest update that is offered for every rank of the layout is chosen; a rank's own tensors serve first, then
what a member keeps of it, the tensors themselves before a copy.
Invariant: a state is made of one update only, and of none when some rank's tensors of it are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StateLost(RuntimeError):
    """Not enough of the state survives its dead members: go back to the checkpoint."""


class Version(NamedTuple):
    """A rank's tensors, whole, of one update."""

    rank: int
    num_updates: int
    slot: int | None
    """Of its copies; None: the tensors themselves."""


class Origin(NamedTuple):
    """Who gives a rank's tensors."""

    member: int
    slot: int | None
    """As in Version."""


@dataclass(frozen=True, slots=True)
class Chosen:
    num_updates: int
    origins: Mapping[int, Origin]
    """By rank of the layout."""


def choose(ranks: Sequence[int], offers: Mapping[int, Sequence[Version]]) -> Chosen:
    """By member, what it offers. Raises StateLost."""
    found: dict[int, dict[int, list[Origin]]] = {rank: {} for rank in ranks}
    for member in sorted(offers):
        for rank, num_updates, slot in offers[member]:
            found[rank].setdefault(num_updates, []).append(Origin(member, slot))
    common = set.intersection(*(set(updates) for updates in found.values()))
    if not common:
        known = {rank: sorted(updates) for rank, updates in found.items()}
        raise StateLost(
            f"no update is left whole: by rank, the updates of which tensors or copies survive: {known} (none where "
            "they are gone, or an update was being applied): go back to the checkpoint"
        )
    num_updates = max(common)
    return Chosen(num_updates, {rank: _best(rank, updates[num_updates]) for rank, updates in found.items()})


def _best(rank: int, origins: Sequence[Origin]) -> Origin:
    return min(origins, key=lambda origin: (origin.member != rank, origin.slot is not None, origin.member))


def guardians(hosts: Mapping[int, str]) -> dict[int, int]:
    """By rank, which rank keeps its copy: each one another's, on another host wherever half of the ranks or more are
    not on one host; none where there is one rank only."""
    ranks = sorted(hosts, key=lambda rank: (hosts[rank], rank))
    if len(ranks) == 1:
        return {}
    largest = max(list(hosts.values()).count(host) for host in set(hosts.values()))
    shift = largest if largest < len(ranks) else 1
    return {rank: ranks[(index + shift) % len(ranks)] for index, rank in enumerate(ranks)}
