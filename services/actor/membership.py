"""The actor's torch world: its workers, those that stand by too, under ids that each keeps for life, epoch by epoch.

An epoch is joined by all of them together; one who dies stays in its epoch, and the next is made without it. The first
member's node serves the store. Invariants: an id is never given twice in an incarnation; a standby that takes more
memory than it may is ended, and counts as one who died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from tidegate.runtime.crew import Crew
from tidegate.types import NO_TOKEN, GpuId, Grant
from tidegate.v1 import workers_pb2 as wire

_EPOCHS_PER_INCARNATION = 1 << 16
"""An epoch's number is above all of the incarnations before, whose store may be the same."""


class ActorWorld:
    """See the module. `slots` are those of the GPUs that the actor has or may get."""

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
        self._log = structlog.get_logger("membership")

    @property
    def everyone(self) -> tuple[Grant, ...]:
        """Members of the actor and standbys that are alive, as far as known."""
        return (*self._crew.members, *self._crew.standbys)

    @property
    def is_whole(self) -> bool:
        """The epoch is of exactly those that are alive."""
        return self._members == {self._ids.get(grant.gpu) for grant in self.everyone}

    def ids(self, grants: Sequence[Grant]) -> list[int]:
        return [self._ids[grant.gpu] for grant in grants]

    async def begin(self, incarnation: int) -> None:
        """A new incarnation: whoever stood by was in a world that is over."""
        await self._crew.stop(self._crew.standbys, transition="")
        self._ids.clear()
        self._num_ids = 0
        self._members = frozenset()
        self.epoch = incarnation * _EPOCHS_PER_INCARNATION

    async def start(self, grants: Sequence[Grant], *, transition: str) -> None:
        """Bring these up; where nobody stands by it is a new process, which the epoch does not have."""
        new = {grant.gpu for grant in grants} - {grant.gpu for grant in self._crew.standbys}
        for gpu in new:
            self._ids.pop(gpu, None)
        await self._crew.start(grants, transition=transition)

    async def stand_by(self) -> None:
        """A process on every slot that has none, to be in the next epoch. One that does not start is left out: its
        slot starts cold."""
        taken = {grant.gpu for grant in self.everyone}
        free = [Grant(gpu, NO_TOKEN) for gpu in self._slots if gpu not in taken]
        started = await asyncio.gather(*(self.start([grant], transition="") for grant in free), return_exceptions=True)
        for grant, outcome in zip(free, started, strict=True):
            if isinstance(outcome, BaseException):
                self._log.warning("nobody stands by", gpu=grant.gpu, error=str(outcome))

    async def join(self) -> int:
        """All enter the next epoch; the largest memory of one that stands by, in bytes."""
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
        measured = {grant: reply.started.memory_bytes for grant, reply in zip(order, replies, strict=True)}
        standing_by = {grant: size for grant, size in measured.items() if grant.stands_by}
        if await self._over_budget_ended(standing_by):
            # The epoch has members that are gone.
            return await self.join()
        return max(standing_by.values(), default=0)

    async def _over_budget_ended(self, measured: dict[Grant, int]) -> bool:
        over = {grant: size_bytes for grant, size_bytes in measured.items() if size_bytes > self._standby_bytes}
        for grant, size_bytes in over.items():
            self._log.warning(
                "standby ended",
                gpu=grant.gpu,
                memory_bytes=size_bytes,
                remedy=f"raise actor.standby_memory_mib above {size_bytes >> 20}",
            )
            await self._crew.stop([grant], transition="")
        return bool(over)
