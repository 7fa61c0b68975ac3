"""`dynarl`: the donor and receiver rules that DynaRL published, a baseline to compare with. Pure.

Order:
1. An iteration starts with every GPU in the rollout.
2. The rollout becomes a donor when more than `low_share` of its engines stay under `low_kv_use` of their KV capacity
   for `low_for_s`.
3. Then a few numbers of engines to keep are scored by the slowest stage (`stages`). The best one becomes pending.
4. The first pending move is carried out at once, a later one when the trainer is between two updates.
5. When the rollout ends, its GPUs go to the trainer in the same way.

Invariants:
- 3 to 10 candidates are scored. [test_dynarl_policy: rules_outside_the_published]
- No candidate overfills the engines that stay; keeping all engines is one. [test_dynarl_policy:
  candidate_that_its_engines_hold]
- An iteration has at most `num_minibatches` moves: one before the first minibatch, and one after each but the last. It
  has more only for a trainer that lost its GPUs. [test_policies: dynarl_keeps_its_bounds]
- While work waits, no GPU is idle that a whole unit of a component with work could use.
  [test_policies: strands_no_gpu_that_work]

Assumptions, where nothing is published:
- A donor has no sequence that waits for an engine.
- Inference gets its configured GPUs while groups wait for it or are still to come, then none.
- The trainer gets the rest in whole data-parallel copies, in any number, and never fewer GPUs than it has. Of several
  layouts that the job allows it gets the fastest (`actor_layouts`). The published 16,
  32 and 52 GPUs are no divisors of a minibatch.
- After a move the remaining engines use at most `max_kv_use` of their KV capacity.
- The engines with the fewest KV tokens leave.
- With request priority, prompts go longest first, by the lengths that an earlier epoch saw. The predictor uses these
  lengths too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.situation import Choice, Situation, Split
from services.scheduler.policy.stages import layouts_of, remaining_work, slowest_stage_s
from services.scheduler.state.layouts import Replica, engine_size, placed_gpus, replica_size, replicas
from services.scheduler.state.remembered import Assignment, PolicyMemory, as_configured
from services.scheduler.state.values import JobSpec
from tidegate.short_lists import counted
from tidegate.types import GpuId, NodeId, Role, node_of

MIN_CANDIDATES, MAX_CANDIDATES = 3, 10


@dataclass(frozen=True, slots=True)
class DynaRLRules:
    """By DynaRL's paper the result changes little for `low_kv_use` from 0.1 to 0.3 and `low_for_s` from 2 to 8 s.
    `released_shares`: the candidates, besides releasing no engine."""

    request_priority: bool = False
    low_kv_use: float = 0.3
    low_share: float = 0.8
    low_for_s: float = 4.0
    max_kv_use: float = 0.8
    released_shares: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)

    def __post_init__(self) -> None:
        num_candidates = len(self.released_shares) + 1
        if not MIN_CANDIDATES <= num_candidates <= MAX_CANDIDATES:
            raise ValueError(
                f"dynarl scores {MIN_CANDIDATES} to {MAX_CANDIDATES} candidates, {num_candidates} are named; "
                f"name {MIN_CANDIDATES - 1} to {MAX_CANDIDATES - 1} released_shares"
            )
        for name, share in (
            ("low_kv_use", self.low_kv_use),
            ("low_share", self.low_share),
            ("max_kv_use", self.max_kv_use),
            *(("released_shares", each) for each in self.released_shares),
        ):
            if not 0 < share <= 1:
                raise ValueError(f"dynarl: {name}={share} is a share, it must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class DynaRLMemory(PolicyMemory):
    """`is_begun`: the trainer was given its GPUs in this iteration. `num_answered`: minibatches that were done at the
    last move. `low_since_ms`: since when the engines are nearly empty. `pending_engines`: how many engines are to be
    left once the trainer is between two updates."""

    is_begun: bool = False
    num_answered: int = 0
    low_since_ms: int | None = None
    pending_engines: int | None = None


@dataclass(frozen=True, slots=True)
class DynaRLPolicy:
    rules: DynaRLRules

    def check(self, spec: JobSpec) -> None:
        """It can run every job: GPUs that fit no move stay where they are."""

    def choose(self, situation: Situation) -> Choice:
        recalled = situation.recalled(DynaRLMemory)
        opened = Assignment(_everywhere(situation.spec), trainer=None, inference=())
        assigned, memory = recalled or (opened, DynaRLMemory())
        training = situation.trainer.training
        if training.num_minibatches_done == situation.spec.num_minibatches:
            reason = "all minibatches are done: every component is where it is placed"
            return self._chosen(situation, as_configured(situation.spec), memory, reason)
        if situation.moving:
            return self._chosen(situation, assigned, memory, f"{counted(len(situation.moving), 'GPU')} on the way")
        memory, reason = self._planned(situation, memory)
        is_free_to_move = training.is_at_boundary and (
            not memory.is_begun
            or situation.trainer.placed is None
            or training.num_minibatches_done > memory.num_answered
        )
        if memory.pending_engines is None or not is_free_to_move:
            return self._chosen(situation, assigned, memory, reason)
        assigned = _assigned(situation, split_of(situation, min(memory.pending_engines, len(situation.engines))))
        moved = replace(
            memory,
            is_begun=assigned.trainer is not None,
            num_answered=training.num_minibatches_done,
            pending_engines=None,
        )
        return self._chosen(situation, assigned, moved, reason)

    def _chosen(self, situation: Situation, assigned: Assignment, memory: DynaRLMemory, reason: str) -> Choice:
        return Choice(
            assignment=assigned,
            trains=memory.is_begun,
            reason=f"dynarl: {reason}; {assigned}",
            memory=memory,
            group_order=_longest_first(situation) if self.rules.request_priority else (),
        )

    def _planned(self, situation: Situation, memory: DynaRLMemory) -> tuple[DynaRLMemory, str]:
        """The memory with the pending move, and with the time since when the rollout is nearly empty."""
        if not situation.num_unfinished:
            has_more_to_give = split_of(situation, 0) != _present(situation)
            pending = 0 if has_more_to_give else None
            return replace(memory, pending_engines=pending, low_since_ms=None), "the rollout is done"
        low = sum(engine.kv_use < self.rules.low_kv_use for engine in situation.engines)
        use = f"{low} of {len(situation.engines)} engines under {self.rules.low_kv_use:g} of their KV"
        if not self._is_low(situation, low):
            return replace(memory, low_since_ms=None), use
        since = situation.now_ms if memory.low_since_ms is None else memory.low_since_ms
        low_for_s = (situation.now_ms - since) / 1000
        if memory.pending_engines is not None or low_for_s < self.rules.low_for_s:
            return replace(memory, low_since_ms=since), f"{use} for {low_for_s:g} s"
        pending, scored = self._best(situation)
        reason = f"{use} for {low_for_s:g} s; {scored}"
        return replace(memory, pending_engines=pending, low_since_ms=None), reason

    def _is_low(self, situation: Situation, num_low: int) -> bool:
        num_engines = len(situation.engines)
        waits = situation.generation.queue or any(engine.num_waiting for engine in situation.engines)
        return num_engines > 1 and not waits and num_low > self.rules.low_share * num_engines

    def _best(self, situation: Situation) -> tuple[int | None, str]:
        """The number of engines to keep, None for all, and a reason. Of equal scores the candidate with fewer moves
        wins."""
        left = remaining_work(situation, uses_hints=self.rules.request_priority)
        best: int | None = None
        stays_s = best_s = slowest_stage_s(situation, left, _present(situation))
        num_scored = 1
        for num_engines in self._candidates(situation):
            split = split_of(situation, num_engines)
            if split.num_trainer_gpus <= situation.trainer.num_gpus:
                continue
            num_scored += 1
            seconds = slowest_stage_s(situation, left, split)
            if seconds < best_s:
                best, best_s = num_engines, seconds
        return best, f"{num_scored} candidates, {stays_s:.1f} s as it is, {best_s:.1f} s at best"

    def _candidates(self, situation: Situation) -> tuple[int, ...]:
        """Numbers of engines to keep that have room for all unfinished sequences, the largest first."""
        engines = situation.engines
        num_kv_tokens = sum(engine.num_kv_tokens for engine in engines)
        slots = min(engine.max_running for engine in engines)
        capacity_tokens = min(engine.kv_capacity_tokens for engine in engines) * self.rules.max_kv_use
        kept = {max(1, len(engines) - round(len(engines) * share)) for share in self.rules.released_shares}
        holding = (
            num
            for num in kept
            if num < len(engines) and situation.num_unfinished <= num * slots and num_kv_tokens <= num * capacity_tokens
        )
        return tuple(sorted(holding, reverse=True))


def split_of(situation: Situation, num_engines: int) -> Split:
    """The split that keeps `num_engines` engines. Inference has its configured GPUs while it has work, the trainer the
    rest. GPUs that make no whole copy of the trainer go to inference, or stay in engines."""
    spec, now = situation.spec, situation.trainer.num_gpus
    size = engine_size(spec)
    rest = len(_there(situation)) - num_engines * size
    unit = replica_size(spec.placement[Role.INFERENCE].layout)
    num_configured = 0 if situation.is_inferred else len(spec.placement[Role.INFERENCE].gpus)
    num_inference = max(0, min(num_configured, rest - now)) // unit * unit
    num_trainer = max(now, layouts_of(situation).num_ranks(max(0, rest - num_inference)))
    left = max(0, rest - num_inference - num_trainer)
    if num_configured:
        num_inference += left // unit * unit
        left %= unit
    if situation.num_unfinished:
        num_engines = min(len(situation.engines), num_engines + left // size)
    return Split(num_engines, num_trainer, num_inference)


def _present(situation: Situation) -> Split:
    return Split(len(situation.engines), situation.trainer.num_gpus, len(situation.inference.gpus))


def _there(situation: Situation) -> tuple[GpuId, ...]:
    """Placed GPUs that a component may get: none that is lost or in an open transition."""
    trainer = situation.trainer.placed
    held = {gpu for engine in situation.engines for gpu in engine.gpus}
    held.update(situation.inference.gpus, situation.free, trainer.gpus if trainer else ())
    return tuple(gpu for gpu in placed_gpus(situation.spec) if gpu in held)


def _assigned(situation: Situation, split: Split) -> Assignment:
    """Which GPUs the split gives to each component. A GPU stays where it is if it can, else it goes home if it can."""
    spec, placed = situation.spec, situation.trainer.placed
    fullest = sorted(situation.engines, key=lambda engine: -engine.num_kv_tokens)[: split.num_engines]
    kept = {engine.gpus for engine in fullest}
    engines = tuple(engine.gpus for engine in situation.engines if engine.gpus in kept)
    trainer = placed.gpus if placed else ()
    taken = {*trainer, *(gpu for engine in engines for gpu in engine)}
    pool = [gpu for gpu in _there(situation) if gpu not in taken]
    present = set(situation.inference.gpus)
    homes = {role: set(spec.placement[role].gpus) for role in Role}
    pool.sort(key=lambda gpu: (gpu not in present, gpu not in homes[Role.INFERENCE], gpu in homes[Role.ACTOR]))
    inference, pool = tuple(pool[: split.num_inference_gpus]), pool[split.num_inference_gpus :]
    pool.sort(key=lambda gpu: gpu not in homes[Role.ACTOR])
    gpus = (*trainer, *pool[: split.num_trainer_gpus - len(trainer)])
    return Assignment(engines, layouts_of(situation).placed(gpus), inference)


def _everywhere(spec: JobSpec) -> tuple[Replica, ...]:
    """The configured engines, and as many on the other components' GPUs as fit on each node."""
    size = engine_size(spec)
    lent = (*spec.placement[Role.ACTOR].gpus, *spec.placement[Role.INFERENCE].gpus)
    by_node: dict[NodeId, list[GpuId]] = {}
    for gpu in lent:
        by_node.setdefault(node_of(gpu), []).append(gpu)
    more = (engine for gpus in by_node.values() for engine in replicas(tuple(gpus), size))
    return (*as_configured(spec).engines, *more)


def _longest_first(situation: Situation) -> tuple[int, ...]:
    """Prompts with a sequence that no engine has, longest first by their hints. A prompt without a hint counts as the
    mean."""
    picture = situation.generation
    hints = np.array(picture.hints or (0.0,) * picture.num_groups)
    known = hints[hints > 0]
    expected = np.where(hints > 0, hints, known.mean() if len(known) else 0.0)
    waiting = np.unique(np.flatnonzero(picture.is_unfinished & (picture.place_of < 0)) // picture.group_size)
    return tuple(waiting[np.argsort(-expected[waiting], kind="stable")].tolist())
