"""The assumed cost of a decode step, of a move and of a response, as policies use it: frozen values.

The `ASSUMED_...` constants hold where a job's config says nothing. `tidegate.config.sections.costs` has the numbers and
their sources. The job's own measurements replace the assumptions (`learned`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.scheduler.state.observed import Floats
from services.scheduler.state.switch_costs import ReshardCosts, TrainerSwitchCosts, reshape_seconds, switch_seconds
from tidegate.config.sections.costs import CostsSection, LengthsSection
from tidegate.types import Layout


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """The distribution of response lengths, from earlier iterations or from the config.

    `log_mean` is the mean of the logarithm of a response's number of tokens. `sigma_prompt` is the spread of that
    logarithm between prompts, `sigma_group` its spread within a group, `sigma_hint` the spread of the error of a hint.
    `max_tokens` is the length at which a response is cut. None: there is no limit.
    """

    log_mean: float
    sigma_prompt: float
    sigma_group: float
    sigma_hint: float
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The duration of a decode step: `max(floor_s, base_s + num_running * per_sequence_s + num_kv_tokens *
    per_kv_token_s)`."""

    floor_s: float
    base_s: float
    per_sequence_s: float
    per_kv_token_s: float

    def seconds(self, *, num_running: float, num_kv_tokens: float) -> float:
        roofline_s = self.base_s + num_running * self.per_sequence_s + num_kv_tokens * self.per_kv_token_s
        return max(self.floor_s, roofline_s)

    def slowed(self, factor: float) -> DecodeStep:
        """The law of an engine whose every step takes `factor` times as long."""
        return DecodeStep(
            floor_s=self.floor_s * factor,
            base_s=self.base_s * factor,
            per_sequence_s=self.per_sequence_s * factor,
            per_kv_token_s=self.per_kv_token_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """The durations of a decode step and of each kind of switch.

    - `resubmit_s`: how long a sequence pauses when it moves to another engine.
    - `update_s`: the part of a minibatch's duration that does not depend on the number of GPUs.
    - `reshard_s`: the duration of every reshard if `reshard` is None.
    """

    decode: DecodeStep
    update_s: float
    release_s: float
    acquire_s: float
    resubmit_s: float
    prefill_tokens_per_s: float
    reshard_s: float
    load_s: float
    inference_start_s: float
    reshard: ReshardCosts | None = None

    def trainer_switches_s(self, *, copy_size: int, most: int) -> Floats:
        """The matrix of `switch_seconds`: by the number of the trainer's copies before and after."""
        own = TrainerSwitchCosts(self.load_s, self.reshard_s, self.reshard)
        return switch_seconds(own, copy_size=copy_size, most=most)

    def trainer_reshapes_s(self, *, copy_size: int, new_size: int, most: int) -> Floats:
        """The matrix of `reshape_seconds`: by the number of the trainer's copies of `copy_size` GPUs before, and of
        `new_size` GPUs after."""
        own = TrainerSwitchCosts(self.load_s, self.reshard_s, self.reshard)
        return reshape_seconds(own, copy_size=copy_size, new_size=new_size, most=most)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates in tokens/s that hold until the job has measured its own.

    `trainer` has pairs of a number of GPUs and the trainer's rate on them, for some numbers of GPUs. `by_layout` has
    rates in layouts of copies that are known to be faster or slower than others on as many GPUs.
    """

    trainer: tuple[tuple[int, float], ...]
    inference_tokens_per_s_per_gpu: float
    by_layout: tuple[tuple[Layout, float], ...] = ()

    def __post_init__(self) -> None:
        rated = (*self.trainer, *((layout.num_ranks, rate) for layout, rate in self.by_layout))
        if not self.trainer or any(size < 1 or not 0 < rate < math.inf for size, rate in rated):
            rates = f"rates of the trainer by its number of GPUs: {self.trainer}"
            raise ValueError(f"{rates}; give at least one, each finite and above 0")
        if not 0 < self.inference_tokens_per_s_per_gpu < math.inf:
            rate = f"a rate of inference of {self.inference_tokens_per_s_per_gpu} tokens/s a GPU"
            raise ValueError(f"{rate}; give one that is finite and above 0")


def costs_of(section: CostsSection, *, gpus_per_host: int) -> Costs:
    return Costs(
        decode=DecodeStep(
            floor_s=section.decode_floor_s,
            base_s=section.decode_base_s,
            per_sequence_s=section.decode_per_sequence_s,
            per_kv_token_s=section.decode_per_kv_token_s,
        ),
        update_s=section.update_s,
        release_s=section.release_s,
        acquire_s=section.acquire_s,
        resubmit_s=section.resubmit_s,
        prefill_tokens_per_s=section.prefill_tokens_per_s,
        reshard_s=section.reshard_s,
        load_s=section.load_s,
        inference_start_s=section.inference_start_s,
        reshard=_reshard_of(section, gpus_per_host),
    )


def _reshard_of(section: CostsSection, gpus_per_host: int) -> ReshardCosts | None:
    if not section.weight_bytes:
        return None
    return ReshardCosts(
        setup_s=section.reshard_setup_s,
        communicators_s=section.communicators_s,
        bytes_per_s=section.reshard_bytes_per_s,
        weight_bytes=section.weight_bytes,
        optimizer_bytes=section.optimizer_bytes,
        gpus_per_host=gpus_per_host,
    )


def rates_of(section: CostsSection, *, num_gpus: int) -> Rates:
    """The trainer's rates on one GPU and on all of the job's GPUs. The config's exponent holds between the two."""
    trainer = tuple((size, section.trainer_rate(size)) for size in sorted({1, num_gpus}))
    return Rates(trainer, section.inference_tokens_per_s)


def lengths_of(section: LengthsSection, *, max_new_tokens: int) -> LengthLaw:
    return LengthLaw(
        log_mean=section.log_mean(max_new_tokens),
        sigma_prompt=section.sigma_prompt,
        sigma_group=section.sigma_group,
        sigma_hint=section.sigma_hint,
        max_tokens=max_new_tokens,
    )


ASSUMED_COSTS = costs_of(CostsSection(), gpus_per_host=8)
ASSUMED_RATES = rates_of(CostsSection(), num_gpus=64)
ASSUMED_LENGTHS = lengths_of(LengthsSection(), max_new_tokens=27_648)
