"""`fused`: RLHFuse's inter-stage fusion, phases whose inference begins in the rollout's tail. A baseline. Pure.

1. All GPUs generate.
2. Once at most `tail_share` of the sequences are unfinished, and few enough for fewer engines, the fewest engines that
   hold them go on. The others let go of their GPUs, and inference gets these.
3. When the last sequence has ended, inference goes on with the GPUs that it has.
4. When the last group has its log-probabilities, all GPUs train.
5. Each component goes home.

Published (Zhong et al., arXiv 2409.13221): once the unfinished samples are below a threshold, they move to fewer
generating instances, and the others begin inference. Its fusion of the training of two models has no counterpart here:
a job trains one.

Assumptions, where we found nothing published:
- The threshold is `TAIL_SHARE`.
- As many engines go on as the limit of running sequences needs, and at most `MAX_KV_USE` of their KV capacity after the
  move. They are those with the most KV tokens.
- A moved sequence is prefilled again, as under every policy.

Invariants:
- An iteration has four placements and home, whatever happens in it. [test_fused_policy: four_placements_and_home]
- The engines that go on hold every unfinished sequence. [test_fused_policy: hold_every_unfinished]
- Nothing is trained before the last group has its log-probabilities. [test_fused_policy: four_placements_and_home]
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy.opening_order import opening_order
from services.scheduler.policy.phases import whole_trainer
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.layouts import engine_size, most_copies, placed_gpus, replicas
from services.scheduler.state.remembered import Assignment, PolicyMemory, as_configured
from services.scheduler.state.values import JobSpec
from tidegate.types import GpuId, PromptOrder, Role

TAIL_SHARE = 0.3
"""The published iteration (seed 0) takes 969 s with 0.2, 957 s with 0.3, 951 s with 0.4, and phases 991 s. With 0.45 it
takes 1022 s, because inference has too few GPUs: the default stays away from there."""

MAX_KV_USE = 0.8
"""As DynaRL's rule for engines that take moved sequences (`scheduler.dynarl.max_kv_use`): these still grow."""


@dataclass(frozen=True, slots=True)
class FusedMemory(PolicyMemory):
    """`is_fused`: engines have let go of GPUs for inference in this iteration."""

    is_fused: bool = False


@dataclass(frozen=True, slots=True)
class FusedPolicy:
    tail_share: float = TAIL_SHARE
    order: PromptOrder = PromptOrder.AS_GIVEN

    def __post_init__(self) -> None:
        if not 0 < self.tail_share <= 1:
            raise ValueError(f"fused: tail_share={self.tail_share} is a share, it must be above 0 and at most 1")

    def check(self, spec: JobSpec) -> None:
        """It can run every job."""

    def choose(self, situation: Situation) -> Choice:
        spec = situation.spec
        everywhere = Assignment(replicas(placed_gpus(spec), engine_size(spec)), trainer=None, inference=())
        at, memory = situation.recalled(FusedMemory) or (everywhere, FusedMemory())
        if situation.trainer.training.num_minibatches_done == spec.num_minibatches:
            why, at = "all minibatches are done: every component is where it is placed", as_configured(spec)
        elif situation.num_unfinished:
            why = f"{situation.num_unfinished} of {situation.num_sequences} sequences are unfinished"
            if not memory.is_fused and (fused := self._fused(situation)) is not None:
                at, memory = fused, FusedMemory(is_fused=True)
        elif not situation.is_inferred:
            why = f"{len(situation.inference.inferring.ready)} of {situation.generation.num_groups} groups are inferred"
            at = Assignment((), trainer=None, inference=at.inference or _inference(spec, placed_gpus(spec)))
        else:
            why = "all groups are inferred"
            at = Assignment((), trainer=whole_trainer(situation), inference=())
        return Choice(
            at,
            trains=at.trainer is not None,
            reason=f"fused: {why}; {at}",
            memory=memory,
            group_order=opening_order(situation, self.order),
        )

    def _fused(self, situation: Situation) -> Assignment | None:
        """The tail on the fewest engines that hold it. None before the tail, and where no engine could leave."""
        engines, num_left = situation.engines, situation.num_unfinished
        if not engines or num_left > self.tail_share * situation.num_sequences:
            return None
        slots = min(engine.max_running for engine in engines)
        room_tokens = MAX_KV_USE * min(engine.kv_capacity_tokens for engine in engines)
        num_kv_tokens = sum(engine.num_kv_tokens for engine in engines)
        num_kept = max(1, -(-num_left // slots), -int(-num_kv_tokens // room_tokens))
        fullest = sorted(engines, key=lambda engine: -engine.num_kv_tokens)[:num_kept]
        kept = {engine.gpus for engine in fullest}
        held = {gpu for gpus in kept for gpu in gpus}
        inference = _inference(situation.spec, tuple(gpu for gpu in placed_gpus(situation.spec) if gpu not in held))
        if num_kept >= len(engines) or not inference:
            return None
        return Assignment(tuple(engine.gpus for engine in engines if engine.gpus in kept), None, inference)


def _inference(spec: JobSpec, gpus: tuple[GpuId, ...]) -> tuple[GpuId, ...]:
    whole = most_copies(spec.placement[Role.INFERENCE].layout, gpus)
    return whole.gpus if whole else ()
