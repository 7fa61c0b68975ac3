"""The workers of one component that stand by: on which slots, within which memory, and in what order they start.

A worker that stands by has no token: it holds no gate and owns no slot's time. The component says how a worker is put
to rest: built, without the memory that it needs at work.

Invariants:
- A standby that exceeds its memory budget is ended, and its slot starts cold. [test_fleet: takes_too_much_memory]
- One standby starts at a time. [test_standbys: one_standby_starts_at_a_time]
- No standby starts on a slot whose worker is about to start. [test_standbys: start_waits_for_the_standby]
- Workers stand down all together or not at all. [test_standbys: one_of_which_does_not_rest]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import Crew
from tidegate.types import NO_TOKEN, GpuId, Grant, Role
from tidegate.v1 import workers_pb2 as wire

PutToRest = Callable[[Grant], Awaitable[wire.Started]]
"""Builds what the worker needs, or releases the memory that it has at work. Returns what it uses now."""


@dataclass(frozen=True, slots=True)
class StandbyRules:
    """`slots`: where workers may stand by. `budget_bytes`: the memory of one, which the role's config sets."""

    role: Role
    slots: Sequence[GpuId]
    budget_bytes: int


class Standbys:
    """See the module head. One event loop uses it."""

    def __init__(self, crew: Crew, rules: StandbyRules, put_to_rest: PutToRest) -> None:
        self._crew = crew
        self._rules = rules
        self._put_to_rest = put_to_rest
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._being_built = ""
        """The GPU of the start that is under way."""
        self._built: set[str] = set()
        self._too_large: set[str] = set()
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("standbys").bind(role=rules.role)

    async def aclose(self) -> None:
        for task in list(self._starting.values()):
            await end_task(task)

    def fill(self, *, taken: Collection[str]) -> None:
        """Have a worker stand by on each slot that is not `taken`: by a worker that is at work, comes or leaves."""
        standing_by = {grant.gpu for grant in self._crew.standbys} & self._built
        for gpu in self._rules.slots:
            if gpu not in taken and gpu not in standing_by | self._too_large | self._starting.keys():
                task = asyncio.create_task(self._start(gpu), name=f"stand by on {gpu}")
                self._starting[gpu] = task
                task.add_done_callback(partial(self._forget_start, gpu))

    async def until_none_starts(self, grants: Sequence[Grant]) -> None:
        """Two starts on one slot would race. A standby that is being built is waited for: it is soon warm."""
        for grant in grants:
            task = self._starting.get(grant.gpu)
            if task is None:
                continue
            if self._being_built == grant.gpu:
                await asyncio.wait([task])
            else:
                await end_task(task)

    def note_taken(self, grants: Sequence[Grant]) -> None:
        """These workers stand by no more."""
        self._built.difference_update(grant.gpu for grant in grants)

    async def stand_down(self, grants: Sequence[Grant]) -> int | None:
        """Whether these members stand by now: the bytes of device memory that they still use. None: stop them."""
        gpus = {grant.gpu for grant in grants}
        if not gpus <= set(self._rules.slots) - self._too_large:
            return None
        try:
            rested = await asyncio.gather(*(self._put_to_rest(grant) for grant in grants))
            for grant, each in zip(grants, rested, strict=True):
                self._check_budget(grant.gpu, each)
            if gpus & self._too_large:
                return None
            await self._crew.stand_down(grants)
        except Exception as error:  # noqa: BLE001 - the edge: workers that do not stand down are ended
            self._log.warning("did not stand down", gpus=sorted(gpus), error=str(error))
            return None
        self._built |= gpus
        return sum(each.held_bytes for each in rested)

    async def _start(self, gpu: GpuId) -> None:
        grant = Grant(gpu, NO_TOKEN)
        async with self._turn:
            self._being_built = gpu
            try:
                if grant not in self._crew.standbys:
                    await self._crew.start([grant], transition="")
                rested = await self._put_to_rest(grant)
                self._check_budget(gpu, rested)
                if gpu in self._too_large:
                    await self._crew.stop([grant], transition="")
                    return
            except Exception as error:  # noqa: BLE001 - the edge: a slot without a standby starts cold
                self._log.warning("standby did not start", gpu=gpu, error=str(error))
                return
            finally:
                self._being_built = ""
        self._built.add(gpu)
        self._log.info("stands by", gpu=gpu, memory_bytes=rested.memory_bytes, held_bytes=rested.held_bytes)

    def _check_budget(self, gpu: str, rested: wire.Started) -> None:
        size_bytes = rested.memory_bytes
        if size_bytes <= self._rules.budget_bytes:
            return
        remedy = f"raise {self._rules.role}.standby_memory_mib above {size_bytes >> 20}"
        self._log.warning("standby ended", gpu=gpu, memory_bytes=size_bytes, remedy=remedy)
        self._too_large.add(gpu)

    def _forget_start(self, gpu: str, _: asyncio.Task[None]) -> None:
        del self._starting[gpu]
