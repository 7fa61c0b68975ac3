"""`rlinf`: the rules of RLinf's open scheduler as they are, a baseline to compare with. Pure.

Order:
1. When an iteration starts the rollout may have the actor's GPUs too, until half of the sequences are done.
2. After each minibatch the actor is blocked. Rollout, inference and actor, in this order, give and take GPUs.
3. After the last minibatch every component goes home, so that weights can be taken from the actor.

Invariants:
- GPUs move when half of the sequences are done and after a minibatch, at no other time, and only to the actor.
  [test_policies: moves_after_minibatches_alone]
- Each minibatch is answered once; the memory says which ones were. [test_rlinf_policy: answered_once]
- The actor is told to stop while the minibatch is open. A command that came after it would find the next one begun.
  [test_rlinf_policy: blocked_while_the_minibatch_is_open]
- Inference gives all of its GPUs or none. [test_rlinf_policy: inference_gives_all]
- GPUs that make no whole legal data-parallel copy stay without an owner, as in RLinf.
  [test_rlinf_policy: the_rest_is_stranded]

Where RLinf's rules are silent, these are ours:
- Sequences are counted, and not groups. All that are not queued count as running, also those between two engines or
  with their environment.
- GPUs are given and taken in the order of placement (actor, rollout, inference), contiguous where the placement is.
- A dead engine counts as none. But a component that has work, and whose GPUs all died, gets back the GPUs that it was
  assigned; RLinf would hang.
- With experts only numbers of copies that divide over them are legal.
- RLinf gives prompts in no order. The rule `order` gives them one (`opening_order`), for a stronger baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.scheduler.policy.opening_order import opening_order
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.layouts import Replica, engine_size, placed_gpus, replica_size, replicas, with_dp
from services.scheduler.state.observed import Engine
from services.scheduler.state.remembered import Assignment, PolicyMemory, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tidegate.short_lists import counted
from tidegate.types import GpuId, PromptOrder, Role

PRE_PROCESS_SHARE = 2
"""The rollout gives the actor's GPUs back once at most `1 / PRE_PROCESS_SHARE` of the sequences run. It is what RLinf
takes without a threshold."""


@dataclass(frozen=True, slots=True)
class RLinfRules:
    """RLinf's keys, with the defaults of its workers, and `order`, which is ours."""

    max_running_requests: int
    auto_scheduler: bool = False
    use_pre_process_policy: bool = False
    use_wait_before_last_iter_policy: bool = True
    preprocess_threshold: int | None = None
    """The rollout gives the actor's GPUs back once at most so many sequences run. None: the half of them."""
    order: PromptOrder = PromptOrder.AS_GIVEN

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "preprocess_threshold"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True, slots=True)
class RLinfMemory(PolicyMemory):
    """`is_begun`: the actor has got its GPUs in this iteration. `num_answered`: the number of minibatches that were
    answered."""

    is_begun: bool
    num_answered: int = 0


@dataclass(frozen=True, slots=True)
class _Left:
    """The engines that the rollout keeps. `waits_for`: why the actor stays blocked; empty where it does not."""

    engines: tuple[Replica, ...]
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class RLinfPolicy:
    rules: RLinfRules

    def check(self, spec: JobSpec) -> None:
        """ValueError when RLinf could not start: the actor's dp is not legal, or no whole engines fit on its GPUs."""
        if not self.rules.auto_scheduler:
            return
        actor, legal = spec.placement[Role.ACTOR], valid_dp(spec)
        if actor.layout.dp not in legal:
            raise ValueError(
                f"rlinf: the actor's dp={actor.layout.dp} does not divide {_prompts_per_minibatch(spec)} prompts a "
                f"minibatch; legal dp: {', '.join(map(str, legal))}"
            )
        if self.rules.use_pre_process_policy and len(actor.gpus) % engine_size(spec):
            raise ValueError(
                f"rlinf: use_pre_process_policy lends the actor's {counted(len(actor.gpus), 'GPU')} to engines of "
                f"{engine_size(spec)}, which must divide them; change the placement or turn the policy off"
            )

    def choose(self, situation: Situation) -> Choice:
        order = opening_order(situation, self.rules.order)
        return replace(self._placed(situation), group_order=order)

    def _placed(self, situation: Situation) -> Choice:
        if not self.rules.auto_scheduler:
            home = as_configured(situation.spec)
            return Choice(home, trains=True, reason="rlinf: auto_scheduler is off")
        assigned, memory = situation.recalled(RLinfMemory) or self._opened(situation)
        if not memory.is_begun:
            return self._pre_processed(situation, assigned, memory)
        training = situation.trainer.training
        num_done = training.num_minibatches_done
        if not training.is_at_boundary:
            reason = f"rlinf: the actor is blocked after minibatch {num_done + 1}, which is open"
            return Choice(assigned, False, reason, memory)
        if num_done <= memory.num_answered:
            return Choice(assigned, True, f"rlinf: as after minibatch {memory.num_answered}", memory)
        if situation.moving:
            reason = f"rlinf: minibatch {num_done} is done, {counted(len(situation.moving), 'GPU')} on the way"
            return Choice(assigned, False, reason, memory)
        if num_done == situation.spec.num_minibatches:
            home = as_configured(situation.spec)
            return _answered(home, memory, num_done, "all are done: every component is where it is placed")
        return self._after_minibatch(situation, assigned, memory, num_done)

    def _opened(self, situation: Situation) -> tuple[Assignment, RLinfMemory]:
        spec, pre = situation.spec, self.rules.use_pre_process_policy
        home = as_configured(spec)
        lent = replicas(spec.placement[Role.ACTOR].gpus, engine_size(spec)) if pre else ()
        opened = Assignment((*lent, *home.engines), None if pre else home.trainer, home.inference)
        return opened, RLinfMemory(is_begun=not pre)

    def _pre_processed(self, situation: Situation, lent: Assignment, memory: RLinfMemory) -> Choice:
        num_queued = len(situation.generation.queue)
        num_running = situation.num_unfinished - num_queued
        most = self.rules.preprocess_threshold or situation.num_sequences // PRE_PROCESS_SHARE
        counts = f"{num_running} of {situation.num_sequences} sequences run, {num_queued} are not submitted"
        if num_queued or num_running > most:
            reason = f"rlinf: {counts}; the actor's GPUs generate until at most {most} run"
            return Choice(lent, False, reason, memory)
        reason = f"rlinf: {counts}; the actor gets its GPUs back"
        return Choice(as_configured(situation.spec), True, reason, replace(memory, is_begun=True))

    def _after_minibatch(
        self, situation: Situation, assigned: Assignment, memory: RLinfMemory, num_done: int
    ) -> Choice:
        """The answer after minibatch number `num_done`, which is not the last. RLinf's pseudo-code counts minibatches
        from 0: its `it` is `num_done - 1`."""
        is_before_last = num_done == situation.spec.num_minibatches - 1
        waits_before_last = self.rules.use_wait_before_last_iter_policy and is_before_last
        left = self._rollout_left(situation, assigned.engines, waits_before_last)
        keeps_inference, waits_for = self._inference_left(situation, left, waits_before_last)
        inference = (situation.inference.gpus or assigned.inference) if keeps_inference else ()
        trainer = situation.trainer.placed
        if left.waits_for or waits_for:
            held = Assignment(left.engines, trainer, inference)
            reason = f"rlinf: after minibatch {num_done} the actor waits for {left.waits_for or waits_for}"
            return Choice(held, False, reason, memory)
        available = _available(situation, left.engines, inference)
        grown = _grown(situation, available)
        assignment = Assignment(left.engines, grown, inference)
        reason = (
            f"{situation.num_unfinished} sequences are unfinished, {len(left.engines)} of {len(situation.engines)} "
            f"engines are left, {len(available)} GPUs were to be had; {assignment}"
        )
        return _answered(assignment, memory, num_done, reason)

    def _rollout_left(self, situation: Situation, assigned: tuple[Replica, ...], waits_before_last: bool) -> _Left:
        engines = _in_placement_order(situation.spec, situation.engines)
        if situation.num_unfinished == 0:
            return _Left(())
        if not engines:
            return _Left(assigned)
        if waits_before_last:
            return _Left(engines, f"{situation.num_unfinished} sequences before the last minibatch")
        if len(engines) <= 1:
            return _Left(engines)
        num_needed = -(-situation.num_unfinished // self.rules.max_running_requests)
        num_releasable = max(0, len(engines) - num_needed)
        size = engine_size(situation.spec)
        num_gpus = _largest_growth(situation, num_releasable * size)
        return _Left(engines[-(-num_gpus // size) :])

    def _inference_left(self, situation: Situation, rollout: _Left, waits_before_last: bool) -> tuple[bool, str]:
        """Whether inference keeps its GPUs, and why the actor waits; empty where it does not."""
        if rollout.waits_for:
            return True, ""
        if not situation.inference.gpus:
            return not situation.is_inferred, ""
        waits = self.rules.use_wait_before_last_iter_policy
        if waits and rollout.engines and not waits_before_last:
            return True, ""
        if situation.is_inferred:
            return False, ""
        return True, "inference to finish" if waits else ""


def _answered(assignment: Assignment, memory: RLinfMemory, num_done: int, reason: str) -> Choice:
    memory = replace(memory, num_answered=num_done)
    return Choice(assignment, True, f"rlinf: after minibatch {num_done}: {reason}", memory)


def valid_dp(spec: JobSpec) -> tuple[int, ...]:
    """RLinf's legal numbers of data-parallel copies: those that divide the prompts of a minibatch and have room for the
    model, up to all GPUs."""
    layout = spec.placement[Role.ACTOR].layout
    most = len(placed_gpus(spec)) // replica_size(layout)
    num_prompts, num_shards = _prompts_per_minibatch(spec), spec.num_logical_shards
    return tuple(
        dp
        for dp in range(spec.fewest_actor_copies, most + 1)
        if num_prompts % dp == 0 and with_dp(layout, dp, num_shards=num_shards)
    )


def _prompts_per_minibatch(spec: JobSpec) -> int:
    return spec.num_prompts // spec.num_minibatches


def _largest_growth(situation: Situation, num_gpus: int) -> int:
    """The most GPUs, at most `num_gpus`, by which the actor can grow to a legal dp."""
    placed = situation.trainer.placed
    dp = placed.layout.dp if placed else 0
    size = replica_size(situation.spec.placement[Role.ACTOR].layout)
    growths = [(each - dp) * size for each in valid_dp(situation.spec) if each > dp]
    return max((growth for growth in growths if growth <= num_gpus), default=0)


def _available(situation: Situation, engines: tuple[Replica, ...], inference: tuple[GpuId, ...]) -> tuple[GpuId, ...]:
    """Placed GPUs that no component has and that are neither lost nor in an open transition, in the order of
    placement."""
    trainer = situation.trainer.placed
    kept = {*(gpu for engine in engines for gpu in engine), *inference, *(trainer.gpus if trainer else ())}
    there = {*(gpu for engine in situation.engines for gpu in engine.gpus), *situation.inference.gpus, *situation.free}
    return tuple(gpu for gpu in placed_gpus(situation.spec) if gpu in there and gpu not in kept)


def _grown(situation: Situation, available: tuple[GpuId, ...]) -> Placed | None:
    placed, layout = situation.trainer.placed, situation.spec.placement[Role.ACTOR].layout
    growth = _largest_growth(situation, len(available))
    dp = (placed.layout.dp if placed else 0) + growth // replica_size(layout)
    grown = with_dp(layout, dp)
    if growth == 0 or grown is None:
        return placed
    return Placed((*(placed.gpus if placed else ()), *available[:growth]), grown)


def _in_placement_order(spec: JobSpec, engines: tuple[Engine, ...]) -> tuple[Replica, ...]:
    rank = {gpu: index for index, gpu in enumerate(placed_gpus(spec))}
    return tuple(
        sorted((engine.gpus for engine in engines), key=lambda gpus: [rank.get(gpu, len(rank)) for gpu in gpus])
    )
