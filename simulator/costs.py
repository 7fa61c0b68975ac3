"""What each step of an iteration costs: every assumption a field with its unit, its default and the default's source.

The defaults are one set, under which a static schedule of the published 64-GPU timeline (7B, GRPO) takes its published
985 s.
A decode step of an engine takes max(step_floor_s, step_base_s + step_per_sequence_s * running +
step_per_kv_token_s * tokens in its KV cache); each step gives every running sequence one token.
Invariant: `decode_s` is the exact sum of its steps, in closed form, and `steps_within` its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from simulator.assumptions import Source
from tidegate.config.base import Count, NonNegativeFloat, Positive, PositiveFloat, Section
from tidegate.elastic.plan.planner import RankTraffic
from tidegate.types import Layout

_LayoutName = Annotated[str, Field(pattern=r"^(single|(tp|pp|dp|cp|ep|vpp)\d+(-(pp|dp|cp|ep|vpp)\d+)*)$")]
_Share = Annotated[float, Field(ge=0, le=1)]
_Efficiency = Annotated[float, Field(ge=1e-3, le=1e3)]
_Slots = Annotated[int, Field(ge=1, le=1_000_000)]
"""As many as an iteration may have responses."""


class EngineCosts(Section):
    """One engine of `gpus_per_engine` GPUs."""

    gpus_per_engine: Annotated[Positive, Source("P: TP 2 of the published 7B configuration")] = 2
    max_running: Annotated[_Slots, Source("P: max_running_requests of the published 7B configuration")] = 128
    step_floor_s: Annotated[NonNegativeFloat, Source("F: the published rollout of 505 s; a host-bound step")] = 14.1e-3
    step_base_s: Annotated[PositiveFloat, Source("A: 7.6 GB of weights a GPU at 2.5 TB/s, and the all-reduce")] = 4.0e-3
    step_per_sequence_s: Annotated[NonNegativeFloat, Source("A: the linear layers' arithmetic a token")] = 1.5e-5
    step_per_kv_token_s: Annotated[
        NonNegativeFloat, Source("P: 57,344 bytes a token (28 layers, 4 KV heads, bf16) over 2 GPUs at 3.2 TB/s")
    ] = 9.0e-9
    kv_capacity_tokens: Annotated[Positive, Source("A: 2 * 80 GB * 0.85 less the weights, at 57 kB a token")] = (
        2_000_000
    )
    kv_admission_share: Annotated[
        _Share, Source("A: beyond it nothing more is admitted, so that what runs can grow")
    ] = 0.92
    prefill_tokens_per_s: Annotated[PositiveFloat, Source("A: 2 * 990 TFLOP/s * 0.3 at 15.2 GFLOP a token")] = 40_000.0
    fresh_prefill_share: Annotated[_Share, Source("A: a group's members share their prompt's prefix")] = 0.25
    turn_prefill_share: Annotated[
        _Share, Source("A: part of the history that a later turn computes again; 0 is a cache that kept it")
    ] = 0.0

    def decode_s(self, *, running: int, kv_tokens: int, steps: int) -> float:
        """Seconds of `steps` steps, the first of them with `kv_tokens` cached."""
        first, growth = self._line(running, kv_tokens)
        floored = min(steps, self._floored(first, growth, steps))
        rest = steps - floored
        first += growth * floored
        return floored * self.step_floor_s + rest * first + growth * rest * (rest - 1) / 2

    def steps_within(self, seconds: float, *, running: int, kv_tokens: int) -> int:
        """The most whole steps that end within `seconds`."""
        steps = max(0, self._guess(seconds, *self._line(running, kv_tokens)))
        while steps and self.decode_s(running=running, kv_tokens=kv_tokens, steps=steps) > seconds:
            steps -= 1
        while self.decode_s(running=running, kv_tokens=kv_tokens, steps=steps + 1) <= seconds:
            steps += 1
        return steps

    def _line(self, running: int, kv_tokens: int) -> tuple[float, float]:
        """A step's seconds above the floor, and by how much each next one is longer."""
        first = self.step_base_s + self.step_per_sequence_s * running + self.step_per_kv_token_s * kv_tokens
        return first, self.step_per_kv_token_s * running

    def _floored(self, first: float, growth: float, most: int) -> int:
        """Steps that the floor holds, before the line reaches it."""
        if first >= self.step_floor_s:
            return 0
        return most if growth == 0 else math.ceil((self.step_floor_s - first) / growth)

    def _guess(self, seconds: float, first: float, growth: float) -> int:
        """Of the number of steps, within one or two."""
        if growth == 0:
            return int(seconds / max(first, self.step_floor_s))
        floored = self._floored(first, growth, 0)
        if floored and floored * self.step_floor_s >= seconds:
            return int(seconds / self.step_floor_s)
        begin = first + growth * (floored - 0.5)
        rest = seconds - floored * self.step_floor_s
        return floored + int((math.sqrt(begin * begin + 2 * growth * rest) - begin) / growth)


class TrainerCosts(Section):
    """A minibatch takes `fixed_s` and its tokens at rate_tokens_per_s * (GPUs / rate_gpus) ** exponent."""

    fixed_s: Annotated[NonNegativeFloat, Source("A: the optimizer and what of a minibatch no GPU makes shorter")] = 8.0
    rate_tokens_per_s: Annotated[PositiveFloat, Source("F: the published static iteration of 985 s")] = 182_000.0
    rate_gpus: Annotated[Positive, Source("the GPUs that the rate is of")] = 64
    exponent: Annotated[
        float, Field(gt=0, le=1), Source("A: sublinear, as the published 735 s and 675 s ask; 1 is linear")
    ] = 0.4
    layout_efficiency: Annotated[
        dict[_LayoutName, _Efficiency], Source("A: by layout such as tp4-dp16; what is not named has 1")
    ] = Field(default_factory=dict)

    def tokens_s(self, num_tokens: float, layout: Layout) -> float:
        rate = self.rate(layout.num_ranks) * self.layout_efficiency.get(str(layout), 1.0)
        return num_tokens / rate

    def rate(self, num_gpus: float) -> float:
        """Tokens a second of a layout whose efficiency is 1."""
        return self.rate_tokens_per_s * float((num_gpus / self.rate_gpus) ** self.exponent)


class InferenceCosts(Section):
    rate_tokens_per_s: Annotated[PositiveFloat, Source("F: of a GPU; the published 45 s on 64 GPUs")] = 26_000.0


class SwitchCosts(Section):
    """What a move costs besides the work it interrupts."""

    release_s: Annotated[NonNegativeFloat, Source("P: DynaRL's median move of 3.6 s; the split is assumed")] = 2.1
    acquire_s: Annotated[NonNegativeFloat, Source("P: RollMux, a warm rollout in 0.9 to 1.9 s")] = 1.5
    resubmit_s: Annotated[NonNegativeFloat, Source("A: until a migrated sequence may be prefilled elsewhere")] = 1.0
    reshard_s: Annotated[NonNegativeFloat, Source("P: DynaRL, 7B on 64 GPUs; of each, where no model is named")] = 1.25
    reshard_setup_s: Annotated[NonNegativeFloat, Source("A: to agree, take memory and vote; of a model's reshard")] = (
        0.5
    )
    communicators_s: Annotated[
        NonNegativeFloat,
        Source("F: DynaRL's 1.25 s less setup and 9.5 GB, from 16 to 32 GPUs; of a layout that is new to the job"),
    ] = 0.37
    reshard_bytes_per_s: Annotated[PositiveFloat, Source("A: of a rank, 200 Gb/s of network")] = 25e9
    trainer_warm_s: Annotated[NonNegativeFloat, Source("P: RollMux, a warm trainer in 4.1 to 5.9 s")] = 5.0
    trainer_cold_s: Annotated[NonNegativeFloat, Source("A: processes, CUDA and state after a death")] = 80.0
    inference_warm_s: Annotated[NonNegativeFloat, Source("A: a worker that stands by")] = 2.0
    engine_cold_s: Annotated[NonNegativeFloat, Source("A: an engine whose process has died")] = 60.0
    detect_s: Annotated[NonNegativeFloat, Source("A: until a death is told")] = 0.2

    def resharding_s(self, moved_bytes: int | None, *, is_new: bool) -> float:
        """`moved_bytes` are those of the busiest rank, None where there is no plan; `is_new`: the trainer has no groups
        yet for the layout on these GPUs."""
        if moved_bytes is None:
            return self.reshard_s
        communicators_s = self.communicators_s if is_new else 0.0
        return self.reshard_setup_s + communicators_s + moved_bytes / self.reshard_bytes_per_s


class SyncCosts(Section):
    fixed_s: Annotated[NonNegativeFloat, Source("P: RollMux, publish and load of 7B 6.1 s, awake 0.9 to 1.9 s")] = 5.0
    weight_bytes: Annotated[Count, Source("0 where fixed_s holds the transfer too")] = 0
    bytes_per_s: Annotated[PositiveFloat, Source("A: from a node's snapshot")] = 25e9

    @property
    def sync_s(self) -> float:
        """From the last optimizer step until every component has the new weights."""
        return self.fixed_s + self.weight_bytes / self.bytes_per_s


class Costs(Section):
    """All of them."""

    engine: EngineCosts = EngineCosts()
    trainer: TrainerCosts = TrainerCosts()
    inference: InferenceCosts = InferenceCosts()
    switch: SwitchCosts = SwitchCosts()
    sync: SyncCosts = SyncCosts()


def busiest_bytes(ranks: Iterable[RankTraffic]) -> int:
    """Of a reshard: what the rank that moves most sends or receives, whichever is more."""
    return max((max(moved) for moved in ranks), default=0)


def even_split(count: int, parts: int) -> tuple[int, ...]:
    """`count` things over `parts` ranks, none with more than one above another: nothing has to divide."""
    each, more = divmod(count, parts)
    return tuple(each + (part < more) for part in range(parts))


def imbalance(count: int, parts: int) -> float:
    """How much longer the rank with most of an uneven split takes than a fair share would."""
    return even_split(count, parts)[0] * parts / count
