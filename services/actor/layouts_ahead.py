"""Builds the layouts that a policy may ask for next, while the actor waits, so that its first switch is a warm one.

One layout at a time is built by all workers of the world, standbys included, in one call. It is begun only where no
minibatch is: before the first version, and while the actor waits for the first groups of a minibatch or is suspended.
A minibatch or a change of layout that comes meanwhile waits for the end of that call, not for further ones.

What was built belongs to the world's epoch, and so to its very processes: a death, or a new member, ends it. A worker
that is lost during a build costs the epoch, which the next resize would have to replace in any case; the ranks train
on.

A GPU of another component has no room for the actor's tensors. So on GPUs only layouts within the actor's own are
built, without their memory.

Invariants:
- No layout is built while a minibatch is begun. [test_layouts_ahead: nothing_is_built_within_a_minibatch]
- What was built is not used across a change of members. [test_layouts_ahead: after_a_death]
- A failed build leaves the ranks able to train. [test_layouts_ahead: a_standby_that_is_lost]
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from services.actor.all_ranks import LAST_WORDS_S, AllRanks
from services.actor.arena_folder import rank_bytes
from services.actor.foreseen_layouts import Foreseen, Place, foreseen, within
from services.actor.membership import ActorWorld
from tidegate.codec import encode_layout
from tidegate.config.checks.actor_layouts import policy_layouts
from tidegate.config.job_config import JobConfig
from tidegate.elastic.settings import CopyTo
from tidegate.job import Job
from tidegate.megatron.family import model_parameters
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import Crew, WorkerGone, WorkerRefused
from tidegate.types import Layout, Role
from tidegate.v1 import workers_pb2 as wire

LEAST_BEFORE_FIRST_VERSION, BEFORE_FIRST_VERSION_S = 2, 2.0
"""The two most likely layouts are built before the first version in any case. After this time no further one is begun,
so that a start takes hardly longer: the engines start meanwhile, for some seconds. The others are built in the first
iteration, beside the engines' steps."""


class LayoutsAhead:
    """`is_resting`: whether the workers keep the state of a suspended actor, in the present epoch."""

    def __init__(
        self, job: Job, crew: Crew, world: ActorWorld, ranks: AllRanks, *, is_resting: Callable[[], bool]
    ) -> None:
        config = job.config
        self._crew = crew
        self._world = world
        self._ranks = ranks
        self._is_resting = is_resting
        self._home = Place(config.layout(Role.ACTOR), config.placement(Role.ACTOR))
        self._slots = config.slots(Role.ACTOR)
        self._has_room_elsewhere = config.cluster.device == "cpu"
        self._cap_bytes = config.actor.layouts_ahead_mib << 20
        self._layouts = possible_layouts(job) if config.scheduler.moves_gpus and self._cap_bytes else ()
        self._num_parameters = sum(
            math.prod(parameter.shape) for parameter in model_parameters(job.model, padded_vocab=job.padded_vocab)
        )
        self._config = config
        self._epoch: int | None = None
        self._place: Place | None = None
        self._wanted: tuple[Foreseen, ...] = ()
        self._built: set[Place] = set()
        self._with_memory: set[Place] = set()
        self._log = structlog.get_logger("ahead")

    async def meanwhile(self, wait: Coroutine[Any, Any, None], *, may_build: bool) -> None:
        """Wait, and build meanwhile if it may. It returns at the end of the wait or of the build that it comes into."""
        waiting = asyncio.create_task(wait)
        try:
            # Let a wait for what is there already end first.
            await asyncio.sleep(0)
            while may_build and not waiting.done() and await self._build_next():
                pass
            await waiting
        finally:
            await end_task(waiting)

    async def before_first_version(self) -> None:
        clock = asyncio.get_running_loop().time
        until, num_built = clock() + BEFORE_FIRST_VERSION_S, 0
        while (num_built < LEAST_BEFORE_FIRST_VERSION or clock() < until) and await self._build_next():
            num_built += 1

    async def _build_next(self) -> bool:
        """Build one layout. False where there is none to build."""
        found = self._next()
        if found is None:
            return False
        async with self._ranks.alone(changes_ranks=False):
            # A build with a dead worker would take the others out of the epoch, so look again.
            await self._crew.forget_dead()
            if found == self._next():
                await self._build(found)
        return True

    def _next(self) -> Foreseen | None:
        """The next layout to build. None where all are built, or none can be."""
        is_resting = self._is_resting()
        if not self._layouts or not self._world.is_whole or not (is_resting or self._ranks.are_present):
            return None
        self._look(None if is_resting else Place(self._ranks.layout, tuple(it.gpu for it in self._crew.members)))
        for each in self._wanted:
            if each.place not in self._built or (each.keeps_memory and each.place not in self._with_memory):
                return each
        return None

    def _look(self, present: Place | None) -> None:
        """Note where the actor is. Another epoch has nothing yet, and a switch has given memory back."""
        if (self._epoch, self._place) == (self._world.epoch, present):
            return
        if self._epoch != self._world.epoch:
            self._built.clear()
        self._with_memory.clear()
        self._epoch, self._place = self._world.epoch, present
        if present is not None:
            self._built.add(present)
        slots = self._slots if self._has_room_elsewhere else tuple(present.gpus if present else ())
        places = foreseen(present, self._home, slots=slots, layouts=self._layouts)
        wanted = within(places, cap_bytes=self._cap_bytes, rank_bytes=self._rank_bytes)
        self._wanted = tuple(
            replace(each, keeps_memory=each.keeps_memory and self._has_room_elsewhere) for each in wanted
        )

    async def _build(self, each: Foreseen) -> None:
        place, everyone = each.place, self._world.everyone
        ids = {grant.gpu: number for grant, number in zip(everyone, self._world.ids(everyone), strict=True)}
        # A slot without a worker takes part in no layout of this epoch.
        if missing := [gpu for gpu in place.gpus if gpu not in ids]:
            self._log.info("not built ahead", layout=str(place.layout), missing=missing)
            self._done(each)
            return
        call = wire.BuildAhead(
            layout=encode_layout(place.layout),
            ranks=[ids[gpu] for gpu in place.gpus],
            keeps_memory=each.keeps_memory,
        )
        calls = dict.fromkeys(everyone, wire.WorkerCall(build_ahead=call))
        began = asyncio.get_running_loop().time()
        try:
            replies = await self._crew.ask_interdependent(calls, last_words_s=LAST_WORDS_S)
        except (WorkerGone, WorkerRefused) as error:
            # The ranks of the layout in force can train on; the members no longer agree on what exists besides.
            self._world.spend()
            await self._crew.forget_dead()
            self._log.warning("not built ahead", layout=str(place.layout), error=str(error))
            return
        self._done(each)
        built = [reply.built_ahead for reply in replies]
        self._log.info(
            "built ahead" if all(it.is_built for it in built) else "not built ahead",
            layout=str(place.layout),
            gpus=list(place.gpus),
            kept_bytes=max(it.kept_bytes for it in built),
            seconds=asyncio.get_running_loop().time() - began,
            reason=next((it.reason for it in built if it.reason), ""),
        )

    def _done(self, each: Foreseen) -> None:
        self._built.add(each.place)
        if each.keeps_memory:
            self._with_memory.add(each.place)

    def _rank_bytes(self, layout: Layout) -> int:
        actor = self._config.actor
        return rank_bytes(self._num_parameters, layout, copies=CopyTo(actor.copies), precision=actor.precision)


def possible_layouts(job: Job) -> tuple[Layout, ...]:
    """The layouts that a policy may ask for: those that differ from the configured one in dp alone, and those of
    `actor.layouts`."""
    config: JobConfig = job.config
    home, num_slots = config.layout(Role.ACTOR), len(config.slots(Role.ACTOR))
    of_copies = [
        Layout(tp=home.tp, pp=home.pp, dp=dp, cp=home.cp, ep=home.ep, vpp=home.vpp)
        for dp in range(1, num_slots * home.dp // home.num_ranks + 1)
        if dp * home.cp % home.ep == 0
    ]
    of_home = [layout for layout in of_copies if job.layout_fault(Role.ACTOR, layout) is None]
    return tuple(dict.fromkeys([*of_home, *policy_layouts(config)]))
