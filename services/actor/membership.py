"""The actor's torch world, epoch by epoch: its workers, standbys included, each under an id that it keeps for life.

All workers join an epoch together. A worker that dies stays a member of its epoch; the next epoch excludes it. The node
of the first member serves the store.

Invariants:
- An id is given to one process only in an incarnation. [test_two_phase_resize: dead_standby_is_replaced]
- A standby that exceeds its memory budget is stopped, and counts as dead.
  [test_two_phase_resize: takes_too_much_memory]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from tidegate.runtime.crew import Crew
from tidegate.types import NO_TOKEN, GpuId, Grant
from tidegate.v1 import workers_pb2 as wire

_EPOCHS_PER_INCARNATION = 1 << 16
"""Epoch numbers of an incarnation start above those of earlier incarnations, which may have used the same store."""


class ActorWorld:
    """`slots` are the GPUs that the actor has or may get; see the module."""

    def __init__(
        self, crew: Crew, slots: Sequence[GpuId], *, config_json: str, timeout_s: float, standby_bytes: int
    ) -> None:
        self._crew = crew
        self._slots = tuple(slots)
        self._config_json = config_json
        self._timeout_s = timeout_s
        self._standby_bytes = standby_bytes
        self._ids: dict[GpuId, int] = {}
        self._num_ids = 0
        self.epoch = 0
        self._members: frozenset[int] = frozenset()
        self._met: set[int] = set()
        """Those who have been in a world of the incarnation."""
        self._keepers: frozenset[int] = frozenset()
        self._log = structlog.get_logger("membership")

    @property
    def everyone(self) -> tuple[Grant, ...]:
        """The living members of the actor and its living standbys, as far as this instance knows."""
        return (*self._crew.members, *self._crew.standbys)

    @property
    def joined(self) -> tuple[Grant, ...]:
        """Those of everyone that have been in a world of the incarnation. The others know nothing of the state."""
        return tuple(grant for grant in self.everyone if self._ids.get(grant.gpu) in self._met)

    @property
    def is_whole(self) -> bool:
        """Whether the epoch's members are exactly the living workers."""
        return self._members == {self._ids.get(grant.gpu) for grant in self.everyone}

    def spend(self) -> None:
        """Note that the members do not agree any more on what this epoch has: the next resize makes another."""
        self._members = frozenset()

    def ids(self, grants: Sequence[Grant]) -> list[int]:
        return [self._ids[grant.gpu] for grant in grants]

    def keep(self, grants: Sequence[Grant]) -> None:
        """These workers, and no others, keep the state of a suspended actor: as standbys they have no memory budget."""
        self._keepers = frozenset(self.ids(grants))

    def keeps(self, grant: Grant) -> bool:
        """Whether this very process keeps a part of a suspended actor's state."""
        return self._ids.get(grant.gpu) in self._keepers

    async def begin(self, incarnation: int) -> None:
        """Begin an incarnation. Stop the standbys: they are in the world of the one before."""
        await self._crew.stop(self._crew.standbys, transition="")
        self._ids.clear()
        self._met.clear()
        self._num_ids = 0
        self._members = self._keepers = frozenset()
        self.epoch = incarnation * _EPOCHS_PER_INCARNATION

    async def start(self, grants: Sequence[Grant], *, transition: str) -> None:
        """Start these workers. Where a slot has no standby, a new process starts that is not in the epoch yet."""
        new = {grant.gpu for grant in grants} - {grant.gpu for grant in self._crew.standbys}
        for gpu in new:
            self._ids.pop(gpu, None)
        await self._crew.start(grants, transition=transition)

    async def stand_by(self) -> None:
        """Start a standby on every free slot, for the next epoch.

        A slot whose standby does not start is skipped: a later move to it starts a process then."""
        taken = {grant.gpu for grant in self.everyone}
        free = [Grant(gpu, NO_TOKEN) for gpu in self._slots if gpu not in taken]
        started = await asyncio.gather(*(self.start([grant], transition="") for grant in free), return_exceptions=True)
        for grant, outcome in zip(free, started, strict=True):
            if isinstance(outcome, BaseException):
                self._log.warning("standby did not start", gpu=grant.gpu, error=str(outcome))

    async def join(self) -> int:
        """Have all workers enter the next epoch. Returns the largest memory of a standby, in bytes."""
        self.epoch += 1
        for grant in self.everyone:
            if grant.gpu not in self._ids:
                self._ids[grant.gpu] = self._num_ids
                self._num_ids += 1
        order = sorted(self.everyone, key=lambda grant: self._ids[grant.gpu])
        seats = await self._crew.rendezvous(order, timeout_s=self._timeout_s)
        members = self.ids(order)
        calls = {}
        for grant, seat in zip(order, seats, strict=True):
            joined = wire.JoinWorld(epoch=self.epoch, members=members, config_json=self._config_json)
            joined.rendezvous.CopyFrom(seat)
            calls[grant] = wire.WorkerCall(join_world=joined)
        replies = await self._crew.ask_all(calls)
        self._members = frozenset(members)
        self._met.update(members)
        measured = {grant: reply.started.memory_bytes for grant, reply in zip(order, replies, strict=True)}
        standing_by = {grant: size for grant, size in measured.items() if grant.stands_by}
        if await self._stop_over_budget(standing_by):
            # The epoch has members that were stopped: make another without them.
            return await self.join()
        return max(standing_by.values(), default=0)

    async def _stop_over_budget(self, measured: dict[Grant, int]) -> bool:
        """Whether any standby was over budget."""
        budgeted = {grant: size_bytes for grant, size_bytes in measured.items() if not self.keeps(grant)}
        over = {grant: size_bytes for grant, size_bytes in budgeted.items() if size_bytes > self._standby_bytes}
        for grant, size_bytes in over.items():
            self._log.warning(
                "standby ended",
                gpu=grant.gpu,
                memory_bytes=size_bytes,
                remedy=f"raise actor.standby_memory_mib above {size_bytes >> 20}",
            )
            await self._crew.stop([grant], transition="")
        return bool(over)
