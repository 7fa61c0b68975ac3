"""The cases of physics over which a gain has a range: an iteration that is not as assumed.

    trainer    the trainer computes at x0.7 or x1.3 of the assumed rate
    decode     engines decode at x0.7 or x1.3
    spread     lengths spread x0.5 or x2 in their logarithm, with the same mean before the cut

The four corners are that half of all eight in which each pair of factors has all four combinations. The spread, which
is hardest to foresee, also varies alone. In each case the policy is told its rates and law, as after an iteration.

Invariants:
- Every pair of factors has all four combinations in the corners. [test_cases: each_pair_of_factors]
- A case changes a decode step by its factor, under either law. [test_cases: a_decode_step_by_its_factor]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.lengths import LengthSection
from simulator.physics.sections import PhysicsSection
from simulator.scenario import Scenario

SLOW, FAST = 0.7, 1.3
NARROW, WIDE = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """Factors of the rates of trainer and decoding, and of the spread of lengths."""

    name: str
    trainer: float = 1.0
    decode: float = 1.0
    spread: float = 1.0


CASES = (
    Case("as assumed"),
    Case("narrow lengths", spread=NARROW),
    Case("wide lengths", spread=WIDE),
    Case("all slow, wide lengths", SLOW, SLOW, WIDE),
    Case("slow trainer, narrow lengths", SLOW, FAST, NARROW),
    Case("fast trainer, narrow lengths", FAST, SLOW, NARROW),
    Case("all fast, wide lengths", FAST, FAST, WIDE),
)


def in_case(scenario: Scenario, case: Case) -> Scenario:
    """The scenario in which the case is true."""
    changed = scenario.model_copy(update={"lengths": _spread(scenario.lengths, case.spread)})
    if scenario.is_computed:
        return changed.model_copy(update={"physics": _physics(scenario.physics, case)})
    costs = scenario.costs
    steps = ("step_floor_s", "step_base_s", "step_per_sequence_s", "step_per_kv_token_s", "step_experts_s")
    engine = {name: getattr(costs.engine, name) / case.decode for name in steps}
    trainer = {"rate_tokens_per_s": costs.trainer.rate_tokens_per_s * case.trainer}
    updated = {
        "engine": costs.engine.model_copy(update=engine),
        "trainer": costs.trainer.model_copy(update=trainer),
    }
    return changed.model_copy(update={"costs": costs.model_copy(update=updated)})


def _spread(lengths: LengthSection, factor: float) -> LengthSection:
    """The mean of a lognormal law is median * exp(variance / 2): the median gives way."""
    variance = lengths.sigma_prompt**2 + lengths.sigma_group**2
    changed = {
        "sigma_prompt": lengths.sigma_prompt * factor,
        "sigma_group": lengths.sigma_group * factor,
        "median_tokens": lengths.median_tokens * math.exp((1 - factor**2) * variance / 2),
    }
    return lengths.model_copy(update=changed)


def _physics(physics: PhysicsSection, case: Case) -> PhysicsSection:
    """Every term of a decode step, and the trainer's kernels."""
    decode, trainer, gpu = physics.decode, physics.trainer, physics.named_gpu()
    times = ("layer_s", "all_reduce_s", "expert_layer_s", "sampling_s", "host_s", "arithmetic_share")
    rates = ("kernel_efficiency", "expert_kernel_efficiency")
    return physics.model_copy(
        update={
            "shape": physics.named_shape(),
            "gpu": gpu.model_copy(update={"memory_bytes_per_s": gpu.memory_bytes_per_s * case.decode}),
            "decode": decode.model_copy(update={name: getattr(decode, name) / case.decode for name in times}),
            "trainer": trainer.model_copy(update={name: getattr(trainer, name) * case.trainer for name in rates}),
        }
    )
