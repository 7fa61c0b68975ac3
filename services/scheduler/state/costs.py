"""What a step of an iteration, a move and a response are assumed to cost, as a policy reckons with them: frozen values.

`ASSUMED` is what a job knows before its config says otherwise; `tidegate.config.sections.costs` has the numbers and
their sources. What the job measures replaces the assumption (`learned`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.scheduler.state.observed import Floats
from services.scheduler.state.switch_costs import ReshardCosts, TrainerSwitchCosts, switch_seconds
from tidegate.config.sections.costs import CostsSection, LengthsSection


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """What earlier iterations, or the config, say of the logarithm of a response's tokens: its mean and its spread
    between prompts and within a group, and how far a hint is off. `max_tokens`: where a response is cut; None:
    nowhere."""

    log_mean: float
    sigma_prompt: float
    sigma_group: float
    sigma_hint: float
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Seconds of a decode step: `base + running * per_sequence + kv * per_kv_token`, at least `floor`."""

    floor_s: float
    base_s: float
    per_sequence_s: float
    per_kv_token_s: float

    def seconds(self, *, num_running: float, num_kv_tokens: float) -> float:
        roofline_s = self.base_s + num_running * self.per_sequence_s + num_kv_tokens * self.per_kv_token_s
        return max(self.floor_s, roofline_s)

    def slowed(self, factor: float) -> DecodeStep:
        """Every step takes so many times as long."""
        return DecodeStep(
            floor_s=self.floor_s * factor,
            base_s=self.base_s * factor,
            per_sequence_s=self.per_sequence_s * factor,
            per_kv_token_s=self.per_kv_token_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a decode step and of each kind of switch, as measured. `resubmit_s`: a sequence that moves stands still;
    `update_s`: what of a minibatch no GPU makes shorter; `reshard_s`: of every reshard where `reshard` is None."""

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

    def trainer_switches_s(self, *, copy_size: int, most: int, known: tuple[int, ...] = ()) -> Floats:
        """As `switch_seconds`: by the trainer's copies before and after."""
        own = TrainerSwitchCosts(self.load_s, self.reshard_s, self.reshard)
        return switch_seconds(own, copy_size=copy_size, most=most, known=known)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second until the job has measured its own: of the trainer by its GPUs, for some numbers of them, and of
    a GPU of inference."""

    trainer: tuple[tuple[int, float], ...]
    inference_tokens_per_s_per_gpu: float

    def __post_init__(self) -> None:
        if not self.trainer or any(size < 1 or not 0 < rate < math.inf for size, rate in self.trainer):
            told = f"rates of the trainer by its GPUs: {self.trainer}"
            raise ValueError(f"{told}; name one at least, all finite and above 0")
        if not 0 < self.inference_tokens_per_s_per_gpu < math.inf:
            told = f"a rate of inference of {self.inference_tokens_per_s_per_gpu} tokens/s a GPU"
            raise ValueError(f"{told}; it is finite and above 0")


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
    """Of the trainer from one to all of the job's GPUs: between them the config's exponent holds."""
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
