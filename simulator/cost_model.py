"""The times of an iteration's parts. Every assumption is a field with its unit, its default and the default's source.

The defaults belong together: with them a static schedule of the published 64-GPU timeline (7B, GRPO) takes the
published 985 s. A decode step of an engine gives every running sequence one token and takes

    max(step_floor_s, step_base_s + step_per_sequence_s * running + step_per_kv_token_s * kv_tokens + experts)

    running    running sequences of the engine
    kv_tokens  tokens in its KV cache
    experts    step_experts_s * (1 - (1 - expert_share) ** running): those that some sequence of the batch goes to

`CostLaws` is what an iteration asks of its costs. `Costs` answers with the numbers of a scenario's section, and
`simulator.physics` with numbers that it computes from a model and a GPU.

Invariants:
- `decode_s` is the exact sum of the times of its steps, in closed form. [test_costs: decoding_is_the_sum_of_its_steps]
- `steps_within` is the inverse of `decode_s`. [test_costs: the_steps_within_a_time]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

from pydantic import Field

from simulator.assumptions import Source
from tidegate.config.base import Count, NonNegativeFloat, Positive, PositiveFloat, Section
from tidegate.elastic.plan.planner import RankTraffic
from tidegate.types import Layout

_LayoutName = Annotated[str, Field(pattern=r"^(single|(tp|pp|dp|cp|ep|vpp)\d+(-(pp|dp|cp|ep|vpp)\d+)*)$")]
_Share = Annotated[float, Field(ge=0, le=1)]
_Efficiency = Annotated[float, Field(ge=1e-3, le=1e3)]
_Slots = Annotated[int, Field(ge=1, le=1_000_000)]
"""At most the number of responses that an iteration may have."""


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
    step_experts_s: Annotated[NonNegativeFloat, Source("0: a dense model; else to read the weights of all experts")] = (
        0.0
    )
    expert_share: Annotated[_Share, Source("the share of its experts to which a model sends a token")] = 0.0
    kv_capacity_tokens: Annotated[Positive, Source("A: 2 * 80 GB * 0.85 less the weights, at 57 kB a token")] = (
        2_000_000
    )
    kv_admission_share: Annotated[
        _Share, Source("A: above it no sequence is admitted, so that running sequences can grow")
    ] = 0.92
    prefill_tokens_per_s: Annotated[PositiveFloat, Source("A: 2 * 990 TFLOP/s * 0.3 at 15.2 GFLOP a token")] = 40_000.0
    fresh_prefill_share: Annotated[_Share, Source("A: a group's members share their prompt's prefix")] = 0.25
    turn_prefill_share: Annotated[
        _Share, Source("A: part of the history that a later turn computes again; 0: the cache kept it")
    ] = 0.0

    def decode_s(self, *, running: int, kv_tokens: int, steps: int) -> float:
        """The seconds of `steps` steps. The first step has `kv_tokens` in the cache."""
        first, growth = self._line(running, kv_tokens)
        floored = min(steps, self._floored(first, growth, steps))
        rest = steps - floored
        first += growth * floored
        return floored * self.step_floor_s + rest * first + growth * rest * (rest - 1) / 2

    def steps_within(self, seconds: float, *, running: int, kv_tokens: int) -> int:
        """The largest number of whole steps that end within `seconds`."""
        steps = max(0, self._guess(seconds, *self._line(running, kv_tokens)))
        while steps and self.decode_s(running=running, kv_tokens=kv_tokens, steps=steps) > seconds:
            steps -= 1
        while self.decode_s(running=running, kv_tokens=kv_tokens, steps=steps + 1) <= seconds:
            steps += 1
        return steps

    def _line(self, running: int, kv_tokens: int) -> tuple[float, float]:
        """The seconds of the first step without the floor, and the increase from each step to the next."""
        first = self.step_base_s + self.step_per_sequence_s * running + self.step_per_kv_token_s * kv_tokens
        if self.step_experts_s:
            first += self.experts_s(running)
        return first, self.step_per_kv_token_s * running

    def experts_s(self, running: float) -> float:
        """The seconds in which a step of so many sequences reads the experts that they go to."""
        return self.step_experts_s * float(1 - (1 - self.expert_share) ** running)

    def _floored(self, first: float, growth: float, most: int) -> int:
        """The number of steps that take the floor, before the line rises above it."""
        if first >= self.step_floor_s:
            return 0
        return most if growth == 0 else math.ceil((self.step_floor_s - first) / growth)

    def _guess(self, seconds: float, first: float, growth: float) -> int:
        """An estimate of the number of steps, right within one or two."""
        if growth == 0:
            return int(seconds / max(first, self.step_floor_s))
        floored = self._floored(first, growth, 0)
        if floored and floored * self.step_floor_s >= seconds:
            return int(seconds / self.step_floor_s)
        begin = first + growth * (floored - 0.5)
        rest = seconds - floored * self.step_floor_s
        return floored + int((math.sqrt(begin * begin + 2 * growth * rest) - begin) / growth)


class TrainerCosts(Section):
    """A minibatch takes

        fixed_s + num_tokens / (rate_tokens_per_s * (num_gpus / rate_gpus) ** exponent * efficiency)

    efficiency  the value of `layout_efficiency` for the trainer's layout
    """

    fixed_s: Annotated[NonNegativeFloat, Source("A: the optimizer, and all that more GPUs do not shorten")] = 8.0
    rate_tokens_per_s: Annotated[PositiveFloat, Source("F: the published static iteration of 985 s")] = 182_000.0
    rate_gpus: Annotated[Positive, Source("the number of GPUs that has this rate")] = 64
    exponent: Annotated[
        float, Field(gt=0, le=1), Source("A: sublinear, as the published 735 s and 675 s require; 1 is linear")
    ] = 0.4
    layout_efficiency: Annotated[
        dict[_LayoutName, _Efficiency], Source("A: by layout such as tp4-dp16; other layouts have 1")
    ] = Field(default_factory=dict)

    def tokens_s(self, num_tokens: float, layout: Layout) -> float:
        rate = self.rate(layout.num_ranks) * self.layout_efficiency.get(str(layout), 1.0)
        return num_tokens / rate

    def rate(self, num_gpus: float) -> float:
        """Tokens a second in a layout with efficiency 1."""
        return self.rate_tokens_per_s * float((num_gpus / self.rate_gpus) ** self.exponent)

    def length_factor(self, lengths: Sequence[int]) -> float:
        """All tokens are alike, whatever the lengths."""
        return 1.0

    def update_s(self, layout: Layout) -> float:
        return self.fixed_s

    def has_own_rate(self, layout: Layout) -> bool:
        return str(layout) in self.layout_efficiency

    def most_rate(self, num_gpus: float) -> float:
        return self.rate(num_gpus) * max([1.0, *self.layout_efficiency.values()])

    @property
    def least_update_s(self) -> float:
        return self.fixed_s


class InferenceCosts(Section):
    rate_tokens_per_s: Annotated[PositiveFloat, Source("F: per GPU; the published 45 s on 64 GPUs")] = 26_000.0
    gpus_per_copy: Annotated[Positive, Source("A: one GPU holds a 7B model")] = 1


class SwitchCosts(Section):
    """The times of a move, without the work that it interrupts."""

    release_s: Annotated[NonNegativeFloat, Source("P: DynaRL's median move of 3.6 s; the split is assumed")] = 2.1
    acquire_s: Annotated[NonNegativeFloat, Source("P: RollMux, a warm rollout in 0.9 to 1.9 s")] = 1.5
    resubmit_s: Annotated[NonNegativeFloat, Source("A: until another engine may prefill a migrated sequence")] = 1.0
    reshard_s: Annotated[NonNegativeFloat, Source("P: DynaRL, 7B on 64 GPUs; for each reshard without a model")] = 1.25
    reshard_setup_s: Annotated[
        NonNegativeFloat, Source("A: to agree, take memory and vote; for a reshard with a model")
    ] = 0.5
    communicators_s: Annotated[
        NonNegativeFloat,
        Source("F: DynaRL's 1.25 s less setup and 9.5 GB, from 16 to 32 GPUs; for a layout that is new to the job"),
    ] = 0.37
    reshard_bytes_per_s: Annotated[PositiveFloat, Source("A: per rank, 200 Gb/s of network")] = 25e9
    trainer_warm_s: Annotated[NonNegativeFloat, Source("P: RollMux, a warm trainer in 4.1 to 5.9 s")] = 5.0
    trainer_cold_s: Annotated[NonNegativeFloat, Source("A: processes, CUDA and state after a death")] = 80.0
    inference_warm_s: Annotated[NonNegativeFloat, Source("A: a worker that stands by")] = 2.0
    engine_cold_s: Annotated[NonNegativeFloat, Source("A: an engine after the death of its process")] = 60.0
    detect_s: Annotated[NonNegativeFloat, Source("A: until a death is reported")] = 0.2

    def resharding_s(self, moved_bytes: int | None, *, is_new: bool) -> float:
        """The time of a reshard: setup + communicators + bytes / rate.

        `moved_bytes` are those of the busiest rank; None: there is no plan, so the time is `reshard_s`.
        `is_new`: the trainer has no communicators yet for this layout on these GPUs.
        """
        if moved_bytes is None:
            return self.reshard_s
        communicators_s = self.communicators_s if is_new else 0.0
        return self.reshard_setup_s + communicators_s + moved_bytes / self.reshard_bytes_per_s


class SyncCosts(Section):
    fixed_s: Annotated[NonNegativeFloat, Source("P: RollMux, publish and load of 7B 6.1 s, awake 0.9 to 1.9 s")] = 5.0
    weight_bytes: Annotated[Count, Source("0 where fixed_s includes the transfer")] = 0
    bytes_per_s: Annotated[PositiveFloat, Source("A: from a node's snapshot")] = 25e9

    @property
    def sync_s(self) -> float:
        """The time from the last optimizer step until every component has the new weights."""
        return self.fixed_s + self.weight_bytes / self.bytes_per_s


class TrainerLaw(Protocol):
    """What an iteration asks of the trainer's times."""

    @property
    def exponent(self) -> float:
        """The power of the GPUs in `most_rate`."""

    @property
    def least_update_s(self) -> float:
        """The shortest `update_s` of a layout."""

    def tokens_s(self, num_tokens: float, layout: Layout) -> float:
        """The seconds of tokens of usual lengths that the replicas share evenly."""

    def length_factor(self, lengths: Sequence[int]) -> float:
        """The seconds of sequences of these lengths, over those of as many tokens of usual lengths."""

    def update_s(self, layout: Layout) -> float:
        """The seconds of an update that its tokens do not change."""

    def has_own_rate(self, layout: Layout) -> bool:
        """Whether the rate does not follow from those of other numbers of GPUs."""

    def most_rate(self, num_gpus: float) -> float:
        """Tokens of usual lengths a second that no layout on so many GPUs exceeds: a power of the GPUs."""


class CostLaws(Protocol):
    """What an iteration asks of its costs."""

    @property
    def engine(self) -> EngineCosts: ...
    @property
    def trainer(self) -> TrainerLaw: ...
    @property
    def inference(self) -> InferenceCosts: ...
    @property
    def switch(self) -> SwitchCosts: ...
    @property
    def sync(self) -> SyncCosts: ...


class Costs(Section):
    engine: EngineCosts = EngineCosts()
    trainer: TrainerCosts = TrainerCosts()
    inference: InferenceCosts = InferenceCosts()
    switch: SwitchCosts = SwitchCosts()
    sync: SyncCosts = SyncCosts()


def busiest_bytes(ranks: Iterable[RankTraffic]) -> int:
    """The bytes of the busiest rank of a reshard: the larger of sent and received bytes, over all ranks."""
    return max((max(moved) for moved in ranks), default=0)


def even_split(count: int, parts: int) -> tuple[int, ...]:
    """`count` items on `parts` ranks. Two ranks differ by at most one item: `parts` need not divide `count`."""
    each, more = divmod(count, parts)
    return tuple(each + (part < more) for part in range(parts))


def imbalance(count: int, parts: int) -> float:
    """The time of the rank with the most items, relative to an equal share: 1.0 for an even split."""
    return even_split(count, parts)[0] * parts / count
