"""Chooses the update from which a job continues, and the member that provides each rank's tensors.

It is pure: the same offers give the same choice.

1. Members offer what they can read: their own tensors and copies, and those that dead ranks left on their host or with
   them.
2. The newest update that is offered for every rank of the layout is chosen.
3. For each rank, its own tensors come first, then what other members have of it. In both, tensors come before copies.

Invariant: a recovered state consists of one update only. Where some rank's tensors are lost for every update, there is
no state. [test_recovery: without_one_update_of_all]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NUM_SLOTS = 2
"""The newest copies of its tensors that a rank keeps."""


class StateLost(RuntimeError):
    """Not enough of the state survives its dead members: return to the checkpoint."""


class Version(NamedTuple):
    """A rank's whole tensors of one update."""

    rank: int
    num_updates: int
    slot: int | None
    """The slot of its copies; None: the tensors themselves."""


class Origin(NamedTuple):
    """The member that provides a rank's tensors."""

    member: int
    slot: int | None
    """As in Version."""


@dataclass(frozen=True, slots=True)
class Recovery:
    num_updates: int
    origins: Mapping[int, Origin]
    """By rank of the layout."""


def choose_recovery(ranks: Sequence[int], offers: Mapping[int, Sequence[Version]]) -> Recovery:
    """Choose from the offers of each member. Raises StateLost."""
    found: dict[int, dict[int, list[Origin]]] = {rank: {} for rank in ranks}
    for member in sorted(offers):
        for rank, num_updates, slot in offers[member]:
            found[rank].setdefault(num_updates, []).append(Origin(member, slot))
    common = set.intersection(*(set(updates) for updates in found.values()))
    if not common:
        known = {rank: sorted(updates) for rank, updates in found.items()}
        raise StateLost(
            f"no update survives whole on every rank: by rank, the updates whose tensors or copies survive: {known} "
            "(none where they are lost, or an update was being applied): return to the checkpoint"
        )
    num_updates = max(common)
    return Recovery(num_updates, {rank: _best(rank, updates[num_updates]) for rank, updates in found.items()})


def _best(rank: int, origins: Sequence[Origin]) -> Origin:
    return min(origins, key=lambda origin: (origin.member != rank, origin.slot is not None, origin.member))


def guardians(hosts: Mapping[int, str]) -> dict[int, int]:
    """By rank: the rank that keeps its copies. Each rank keeps the copies of one other rank.

    The guardian is on another host unless one host has more than half of the ranks. Empty for a single rank.
    """
    ranks = sorted(hosts, key=lambda rank: (hosts[rank], rank))
    if len(ranks) == 1:
        return {}
    largest = max(list(hosts.values()).count(host) for host in set(hosts.values()))
    shift = largest if largest < len(ranks) else 1
    return {rank: ranks[(index + shift) % len(ranks)] for index, rank in enumerate(ranks)}
