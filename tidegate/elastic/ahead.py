"""Builds a layout ahead, between two updates, so that the first switch to it costs what a later one does.

Order:
1. All members make the groups and the tensors of the layout and announce them, aside (`epoch.world`).
2. Each member plans its part of the switch from the present layout.
3. It takes the memory of its tensors, where the caller wants that.
4. It maps the pages of other members' files that it would read in this switch.

Taking and mapping pages is more than half of a switch's time. The next reshard gives back the memory of all layouts but
the two at its ends.

Invariants:
- The state, its layout and its memory stay as they are, whatever happens. [test_ahead: a_standby_that_dies_while]
- A layout that was built ahead gives the bits of one that was not. [test_ahead: the_same_bits]
- It belongs to the epoch, and so to its very processes. [test_ahead: the_epoch_what_was_built]
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.model.memory import Arena, ArenaFull, ArenaReader, SharedArena
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.plan import Part
from tidegate.elastic.report import Stopwatch
from tidegate.elastic.state.location import StateLocation

LEAST_FREE = 0.25
"""The share of the tmpfs that stays free where memory is kept ahead. Snapshots of weights are in the same one, and a
version of the weights takes at most a third of what a layout with its optimizer does."""


def build_ahead(
    cache: EpochCache, reader: ArenaReader, source: StateLocation, mesh: Mesh, *, keeps_memory: bool
) -> int:
    """Returns the bytes that this member's tensors keep: 0 without `keeps_memory`, or where there is no room for them.

    All members of the epoch call it with the same arguments. `source` is where the state is. Raises the errors of
    building, alike on all members, and PeerLost: then the next reshard needs another epoch.
    """
    is_of_epoch = source.epoch == cache.world.membership.epoch
    with cache.world.aside():
        target = cache.introduce(mesh, beside=source.mesh if is_of_epoch else None, watch=Stopwatch())
    if is_of_epoch:
        _map_sources(reader, source, cache.part(source, target, cache.hosts), cache.hosts)
    if not keeps_memory or target.state is None or target.state is source.state:
        return 0
    try:
        target.state.materialise()
    except ArenaFull:
        return 0
    if not _leaves_room(target.state.arena):
        target.state.release()
        return 0
    return target.state.arena.num_bytes


def _leaves_room(arena: Arena) -> bool:
    """Whether enough of the tmpfs is free: what is kept ahead must not stand in the way of a snapshot."""
    if not isinstance(arena, SharedArena):
        return True
    space = os.statvfs(arena.path.parent)
    return space.f_bavail >= LEAST_FREE * space.f_blocks


def _map_sources(reader: ArenaReader, source: StateLocation, part: Part | None, hosts: Mapping[int, str]) -> None:
    """Map what this member would read of other members on its host."""
    keys = {} if part is None else dict.fromkeys((copy.source_rank, copy.name, copy.kind) for copy in part.receives)
    for rank, name, kind in keys:
        of_rank = source.announcements[rank]
        if of_rank.places and part is not None and of_rank.host == hosts[part.rank]:
            reader.map_pages(of_rank.places[name, kind])
