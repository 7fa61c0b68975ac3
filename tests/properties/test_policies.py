"""Policies that look at a situation, through whole iterations in which anything may happen in any order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.rlinf import RLinfMemory, RLinfPolicy, RLinfRules, valid_dp
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.layouts import engine_size, placed_gpus, replica_size, with_dp
from services.scheduler.state.observed import ENDED, QUEUED, TrainerRate
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import JobSpec
from tests.effort import examples
from tests.unit.scheduler.situations import after, generation, job, seen
from tidegate.types import Role

QUICK = settings(max_examples=examples(80), deadline=None)
MAX_RUNNING = 8


@dataclass
class World:
    """An iteration that does at once what a policy chooses, and in which the drawn steps happen."""

    spec: JobSpec
    policy: RLinfPolicy | DynaRLPolicy
    at: Assignment
    lengths: list[int]
    unfinished: list[int]
    """Sequences, in the order of the prompts."""
    ready: list[int] = field(default_factory=list)
    num_taken: int = 0
    remembered: Remembered = field(default_factory=Remembered)
    trains: bool = False
    num_moves: int = 0
    num_done: int = 0
    is_in_minibatch: bool = False
    now_ms: int = 0

    def seen(self) -> Situation:
        """Sequences are spread over the engines' slots anew."""
        num_engines = len(self.at.engines)
        places = [ENDED] * len(self.lengths)
        for number, sequence in enumerate(self.unfinished):
            places[sequence] = number % num_engines if number < num_engines * MAX_RUNNING else QUEUED
        return seen(
            self.spec,
            self.at,
            picture=generation(
                self.spec,
                self.at.engines,
                lengths=tuple(self.lengths),
                places=tuple(places),
                max_running=MAX_RUNNING,
            ),
            ready=tuple(self.ready),
            num_done=self.num_done,
            num_taken=self.num_taken,
            is_at_boundary=not self.is_in_minibatch,
            measured=(TrainerRate(self.spec.placement[Role.ACTOR].layout, 10.0),),
            remembered=self.remembered,
            now_ms=self.now_ms,
        )

    def choose(self) -> Choice:
        situation = self.seen()
        choice = self.policy.choose(situation)
        assert self.policy.choose(situation) == choice, "the same situation, the same choice"
        held, is_over = self.remembered.assignment, self.num_done == self.spec.num_minibatches
        # The way home after the last minibatch is no move of the iteration.
        self.num_moves += held is not None and choice.assignment != held and not is_over
        self.remembered, self.at, self.trains = after(choice), choice.assignment, choice.trains
        return choice

    def work(self, step: str, number: int) -> None:
        self.now_ms += 1000 * number
        if step == "finish":
            self._finish(number)
        elif step == "infer" and self.at.inference:
            self._infer(number)
        elif step == "train" and self.at.trainer is not None:
            self._train()

    def _finish(self, number: int) -> None:
        del self.unfinished[: number if self.at.engines else 0]
        for sequence in self.unfinished:
            self.lengths[sequence] += 10

    def _infer(self, number: int) -> None:
        generating = {sequence // self.spec.group_size for sequence in self.unfinished}
        backlog = [each for each in range(self.spec.num_prompts) if each not in generating and each not in self.ready]
        self.ready.extend(backlog[:number])

    def _train(self) -> None:
        if self.is_in_minibatch:
            self.is_in_minibatch, self.num_done = False, self.num_done + 1
            return
        size = self.spec.num_prompts // self.spec.num_minibatches
        if self.trains and len(self.ready) >= self.num_taken + size and self.num_done < self.spec.num_minibatches:
            self.is_in_minibatch = True
            self.num_taken += size


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    rollout_tp, actor_tp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    actor_dp = draw(st.integers(1, 3))
    spec = job(
        actor=actor_tp * actor_dp,
        rollout=rollout_tp * draw(st.integers(1, 5)),
        inference=draw(st.integers(1, 3)),
        actor_tp=actor_tp,
        rollout_tp=rollout_tp,
        prompts=12,
        group_size=4,
        minibatches=draw(st.sampled_from([1, 2, 3])),
    )
    return replace(spec, num_logical_shards=draw(st.sampled_from([None, 4])) if actor_dp != 3 else None)


STEPS = st.lists(
    st.tuples(st.sampled_from(["finish", "finish", "infer", "train", "train", "wait"]), st.integers(1, 24)),
    min_size=20,
    max_size=60,
)
"""Enough that most iterations get past their first minibatch, and many to their end."""


def opened(spec: JobSpec, policy: RLinfPolicy | DynaRLPolicy) -> World:
    count = spec.num_prompts * spec.group_size
    return World(spec, policy, as_configured(spec), [10] * count, list(range(count)))


def check_assignment(world: World, assignment: Assignment) -> None:
    """It is one of GPUs that there are, in whole engines and whole copies; that each GPU is in it once, and that the
    trainer has one for each rank, was checked when it was made."""
    spec = world.spec
    assert set(assignment.gpus) <= set(placed_gpus(spec))
    assert all(len(engine) == engine_size(spec) for engine in assignment.engines)
    if assignment.trainer is not None:
        actor = spec.placement[Role.ACTOR].layout
        assert replace(assignment.trainer.layout, dp=actor.dp) == actor
        assert (spec.num_logical_shards or 0) % assignment.trainer.layout.dp == 0
        assert assignment.trainer.layout.dp <= spec.num_prompts // spec.num_minibatches * spec.group_size


@QUICK
@given(spec=specs(), steps=STEPS, priority=st.booleans())
def test_dynarl_keeps_its_bounds_and_strands_no_gpu_that_work_could_use(
    spec: JobSpec, steps: list[tuple[str, int]], priority: bool
) -> None:
    world = opened(spec, DynaRLPolicy(DynaRLRules(request_priority=priority, low_for_s=1.0)))
    for step, number in [("wait", 1), *steps]:
        held = len(world.at.gpus)
        choice = world.choose()
        check_assignment(world, choice.assignment)
        assert world.num_moves <= spec.num_minibatches
        if held != len(choice.assignment.gpus) or choice.assignment.trainer is None:
            check_nothing_stranded(world)
        assert world.choose().assignment == choice.assignment, "nothing happened, nothing changes"
        world.work(step, number)


def check_nothing_stranded(world: World) -> None:
    spec, situation = world.spec, world.seen()
    units = [growth] if (growth := least_growth(world)) else []
    if situation.num_unfinished:
        units.append(engine_size(spec))
    if not situation.is_inferred and world.at.trainer is not None:
        units.append(replica_size(spec.placement[Role.INFERENCE].layout))
    assert not units or len(situation.free) < min(units), world.at


def least_growth(world: World) -> int | None:
    """GPUs with which the trainer could have more copies; None where it has none, or no layout has more."""
    trainer, most = world.at.trainer, len(placed_gpus(world.spec))
    if trainer is None:
        return None
    own = trainer.layout
    more = (dp for dp in range(own.dp + 1, most + 1) if with_dp(own, dp, num_shards=world.spec.num_logical_shards))
    dp = next(more, None)
    return None if dp is None else (dp - own.dp) * replica_size(own)


@QUICK
@given(spec=specs(), steps=STEPS, pre=st.booleans(), wait=st.booleans(), max_running=st.integers(1, 16))
def test_rlinf_moves_after_minibatches_alone_and_only_to_legal_layouts(
    spec: JobSpec, steps: list[tuple[str, int]], pre: bool, wait: bool, max_running: int
) -> None:
    rules = RLinfRules(
        max_running_requests=max_running,
        auto_scheduler=True,
        use_pre_process_policy=pre,
        use_wait_before_last_iter_policy=wait,
    )
    world = opened(spec, RLinfPolicy(rules))
    at_home = spec.placement[Role.ACTOR].layout.dp
    for step, number in [("wait", 1), *steps]:
        before, memory, num_engines = world.at, world.remembered.own, len(world.at.engines)
        was_begun = isinstance(memory, RLinfMemory) and memory.is_begun
        answered = memory.num_answered if isinstance(memory, RLinfMemory) else 0
        choice = world.choose()
        check_assignment(world, choice.assignment)
        # One more than to the actor: while it waits for inference the engines of an ended rollout are given up.
        assert world.num_moves <= spec.num_minibatches + 1
        if was_begun and world.num_done == answered:
            assert choice.assignment == before
        if was_begun and world.num_done < spec.num_minibatches:
            assert len(choice.assignment.engines) <= num_engines
        if choice.assignment.trainer is not None:
            assert choice.assignment.trainer.layout.dp in {at_home, *valid_dp(spec)}
        world.work(step, number)


@QUICK
@given(spec=specs(), steps=STEPS)
def test_the_same_history_gives_the_same_choices(spec: JobSpec, steps: list[tuple[str, int]]) -> None:
    for policy in (DynaRLPolicy(DynaRLRules()), RLinfPolicy(RLinfRules(8, True, True))):
        histories = []
        for _ in range(2):
            world = opened(spec, policy)
            choices = []
            for step, number in steps:
                choices.append(world.choose())
                world.work(step, number)
            histories.append(choices)
        assert histories[0] == histories[1]


def test_a_rollout_on_every_gpu_leaves_at_most_part_of_an_engine() -> None:
    spec = job(actor=2, rollout=4, inference=3, rollout_tp=2, prompts=12, minibatches=3)
    world = opened(spec, DynaRLPolicy(DynaRLRules()))
    assert len(world.choose().assignment.gpus) == 8
