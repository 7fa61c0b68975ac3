"""The data-parallel copies of the inference. Each copy is a torch world of its own, so it comes and goes by itself.

A copy has the layout's tp * pp * cp ranks: consecutive members in the component's rank order, as the scheduler counts
replicas. A copy does one call at a time, on all its ranks. What it has begun it ends, also where nobody waits for the
result any more: ranks of which only some got a call would wait for each other.

A copy whose ranks stand by together is still in its world, with its model built: it needs only weights to work again.

Invariants:
- A copy that leaves finishes its batch and gets no other. [test_copies: leaves_in_the_middle_of_its_batch]
- The death of a rank costs its copy and no other. [test_copies: copy_that_dies_in_the_middle]
- A copy takes part once it holds the newest weights that the lead knows. [test_copies: comes_in_the_middle]
- A copy that comes back as it left forms no world and builds no model. [test_standby_copies: only_loads_weights]
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from services.inference.worlds import Worlds
from tidegate.codec import encode_layout
from tidegate.config.job_config import JobConfig
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import Crew, WorkerGone, WorkerRefused, together
from tidegate.types import Grant, Layout, Role
from tidegate.v1 import samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire


@dataclass(frozen=True, slots=True)
class Weights:
    """What a copy is to hold: a version of the policy, and the reference where the job has one."""

    policy: types_pb2.Snapshot
    reference: types_pb2.Snapshot | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Grows with each published version."""
        return self.policy.incarnation, self.policy.version


@dataclass(eq=False, slots=True)
class ScoringCopy:
    """One copy. `grants` are in rank order. `held`: None before the first weights and while others are loaded."""

    grants: tuple[Grant, ...]
    held: Weights | None = None
    is_leaving: bool = False
    num_calls: int = 0
    scoring: asyncio.Task[list[wire.WorkerReply]] | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def version(self) -> int | None:
        return self.held.policy.version if self.held else None

    @property
    def is_busy(self) -> bool:
        return self.scoring is not None and not self.scoring.done()

    def __str__(self) -> str:
        return ", ".join(grant.gpu for grant in self.grants)


@dataclass(frozen=True, slots=True)
class ScorerBuild:
    """What the ranks of each copy build. `layout` is one copy's. `timeout_s` is that of the copy's torch world.

    `builds_at_rest`: a worker that was in no copy yet builds the model while it stands by. It cannot where its copy has
    more ranks, which are not known yet. On CUDA it must not: the model's memory, though freed at once, is that of the
    component that has the GPU.
    """

    layout: Layout
    config_json: str
    timeout_s: float
    builds_at_rest: bool

    @classmethod
    def of(cls, config: JobConfig) -> ScorerBuild:
        layout = replace(config.layout(Role.INFERENCE), dp=1)
        builds_at_rest = layout.num_ranks == 1 and config.cluster.device == "cpu"
        return cls(layout, config.to_json(), config.runtime.collective_timeout_s, builds_at_rest)


def cut_into_copies(members: Sequence[Grant], layout: Layout) -> list[tuple[Grant, ...]]:
    """The grants of each copy. Members that do not fill the last one are left out."""
    size = layout.num_ranks // layout.dp
    return [tuple(members[start : start + size]) for start in range(0, len(members) - size + 1, size)]


class Copies:
    """The copies that work. `changed` is set after each change that may free a copy for a batch."""

    def __init__(self, crew: Crew, build: ScorerBuild) -> None:
        self._crew = crew
        self._build = build
        self._worlds = Worlds()
        self._copies: list[ScoringCopy] = []
        self.changed = asyncio.Event()

    @property
    def all(self) -> tuple[ScoringCopy, ...]:
        return tuple(self._copies)

    @property
    def is_busy(self) -> bool:
        return any(copy.is_busy for copy in self._copies)

    def idle(self, version: int) -> list[ScoringCopy]:
        """The copies that hold the version and have no batch."""
        return [copy for copy in self._copies if copy.version == version and not (copy.is_leaving or copy.is_busy)]

    def having(self, grants: Iterable[Grant]) -> list[ScoringCopy]:
        """The copies that have one of these grants."""
        wanted = set(grants)
        return [copy for copy in self._copies if wanted.intersection(copy.grants)]

    def add(self, copies: Iterable[ScoringCopy]) -> None:
        self._copies.extend(copies)
        self.changed.set()

    def remove(self, copy: ScoringCopy) -> None:
        """The copy is no more. Its ranks that still live are no members: the scheduler has them stopped."""
        if copy in self._copies:
            self._copies.remove(copy)
        for grant in copy.grants:
            self._crew.forget(grant)
        self.changed.set()

    async def form(self, copy: ScoringCopy) -> None:
        """The copy's workers, which run, are at work in its world: they join it, unless they are in it still."""
        if await self._wakes(copy):
            return
        starts = await self._joining(copy.grants)
        await self._crew.ask_all({grant: wire.WorkerCall(start_scorer=start) for grant, start in starts.items()})

    async def put_to_rest(self, grant: Grant) -> wire.Started:
        """The worker releases its weights and stays in its world.

        A worker in no world builds the model in one of its own, where it may. Else it has its process, its imports and
        its device.
        """
        if (world := self._worlds.of(grant.gpu)) is not None:
            try:
                return await self._rest(grant, wire.StartScorer(world=world.name))
            except WorkerRefused:
                # The worker of the lead's records has died, and this is another.
                self._worlds.forget([grant.gpu])
        if self._build.builds_at_rest:
            return await self._rest(grant, (await self._joining([grant]))[grant])
        return await self._rest(grant, wire.StartScorer(config_json=self._build.config_json))

    def note_stopped(self, grants: Iterable[Grant]) -> None:
        """These workers ended."""
        self._worlds.forget(grant.gpu for grant in grants)

    async def _wakes(self, copy: ScoringCopy) -> bool:
        world = self._worlds.shared_by([grant.gpu for grant in copy.grants])
        if world is None:
            return False
        call = wire.WorkerCall(start_scorer=wire.StartScorer(world=world.name))
        try:
            await self._crew.ask_all(dict.fromkeys(copy.grants, call))
        except WorkerRefused:
            # As in `put_to_rest`. The ranks that did not refuse leave the world when they form the next one.
            self._worlds.forget(world.gpus)
            return False
        return True

    async def _joining(self, grants: Sequence[Grant]) -> dict[Grant, wire.StartScorer]:
        """What brings each of these workers, in rank order, into a new world of theirs."""
        seats = await self._crew.rendezvous(grants, timeout_s=self._build.timeout_s)
        world = self._worlds.form(grants)
        layout = encode_layout(self._build.layout)
        return {
            grant: wire.StartScorer(
                rendezvous=seat, layout=layout, config_json=self._build.config_json, world=world.name
            )
            for grant, seat in zip(grants, seats, strict=True)
        }

    async def _rest(self, grant: Grant, start: wire.StartScorer) -> wire.Started:
        start.stands_by = True
        return (await self._crew.ask(grant, wire.WorkerCall(start_scorer=start))).started

    async def load(self, copy: ScoringCopy, weights: Weights) -> None:
        """Loads the weights, after the copy's batch. WorkerGone, SnapshotMismatch and others."""
        async with copy.turn:
            copy.held = None
            if weights.reference is not None:
                await self._crew.load(weights.reference, copy.grants, reference=True)
            await self._crew.load(weights.policy, copy.grants)
            copy.held = weights
        self.changed.set()

    async def load_on_all(self, weights: Weights) -> list[WorkerGone]:
        """Loads the weights on every copy. Returns the losses: those copies are no more. Any other error is raised."""
        copies = [copy for copy in self._copies if not copy.is_leaving]
        lost: list[WorkerGone] = []

        async def load(copy: ScoringCopy) -> None:
            try:
                await self.load(copy, weights)
            except WorkerGone as error:
                self.remove(copy)
                lost.append(error)

        await together(load(copy) for copy in copies)
        return lost

    def begin(
        self, copy: ScoringCopy, groups: Sequence[samples_pb2.SampleGroup]
    ) -> asyncio.Task[list[wire.WorkerReply]]:
        """The copy is busy from now on, until the task has ended. Its replies are those of all ranks."""
        copy.scoring = asyncio.create_task(self._score(copy, groups), name=f"score on {copy}")
        copy.scoring.add_done_callback(self._ended)
        return copy.scoring

    async def until_done(self, copies: Sequence[ScoringCopy], *, timeout_s: float) -> None:
        """Returns when the copies have ended their batches, or after `timeout_s`."""
        # Avoid a wait without a limit: another copy gets the batch of one that hangs.
        if begun := [copy.scoring for copy in copies if copy.scoring is not None]:
            await asyncio.wait(begun, timeout=timeout_s)

    async def aclose(self) -> None:
        for copy in self._copies:
            if copy.scoring is not None:
                await end_task(copy.scoring)

    async def _score(self, copy: ScoringCopy, groups: Sequence[samples_pb2.SampleGroup]) -> list[wire.WorkerReply]:
        async with copy.turn:
            call = wire.WorkerCall(score=wire.Score(groups=groups))
            return await self._crew.ask_all(dict.fromkeys(copy.grants, call))

    def _ended(self, scoring: asyncio.Task[list[wire.WorkerReply]]) -> None:
        self.changed.set()
        if not scoring.cancelled():
            # Where the iteration is over nobody else asks for the outcome.
            scoring.exception()
