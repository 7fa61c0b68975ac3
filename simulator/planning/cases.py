"""The cases of physics over which a gain has a range: an iteration that is not as assumed.

    trainer    the trainer computes at x0.7 or x1.3 of the assumed rate
    decode     engines decode at x0.7 or x1.3
    spread     lengths spread x0.5 or x2 in their logarithm, with the same mean before the cut
    moves      switches and reshards take x3
    hints      the error of hints is larger than any spread, so that they tell nothing
    noise      engines, decode steps and portions vary by a tenth

The four corners are that half of all eight of the first three in which each pair of factors has all four combinations.
The spread, which is hardest to foresee, also varies alone, and so do the last three. In each case the policy is told
its rates and law, as after an iteration.

Invariants:
- Every pair of the first three has all four combinations in the corners. [test_cases: each_pair_of_factors]
- A case changes a decode step by its factor, under either law. [test_cases: a_decode_step_by_its_factor]
- A case changes every duration of a move by its factor. [test_cases: each_duration_of_a_move]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from simulator.lengths import LengthSection
from simulator.noise import NoiseSection
from simulator.physics.sections import PhysicsSection
from simulator.scenario import Scenario
from tidegate.config.base import Section

SLOW, FAST = 0.7, 1.3
NARROW, WIDE = 0.5, 2.0
DEAR = 3.0
NO_HINTS = 3.0
"""A spread of the error of hints beside which those of lengths are small."""
NOISE = 0.1

SWITCHES = (
    "release_s",
    "acquire_s",
    "resubmit_s",
    "reshard_s",
    "reshard_setup_s",
    "communicators_s",
    "reshard_bytes_per_s",
    "trainer_warm_s",
    "inference_warm_s",
)
COMPUTED = {"release_s", "acquire_s", "reshard_s", "trainer_warm_s"}
OF_PHYSICS = ("sleep_s", "wake_s", "trainer_wake_s", "host_bytes_per_s")

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, slots=True)
class Case:
    """Factors of the rates of trainer and decoding, of the spread of lengths and of the time of moves. `noise`: the
    spread of durations."""

    name: str
    trainer: float = 1.0
    decode: float = 1.0
    spread: float = 1.0
    moves: float = 1.0
    has_hints: bool = True
    noise: float = 0.0


CASES = (
    Case("as assumed"),
    Case("narrow lengths", spread=NARROW),
    Case("wide lengths", spread=WIDE),
    Case("all slow, wide lengths", SLOW, SLOW, WIDE),
    Case("slow trainer, narrow lengths", SLOW, FAST, NARROW),
    Case("fast trainer, narrow lengths", FAST, SLOW, NARROW),
    Case("all fast, wide lengths", FAST, FAST, WIDE),
    Case("dear moves", moves=DEAR),
    Case("hints tell nothing", has_hints=False),
    Case("noise", noise=NOISE),
)


def in_case(scenario: Scenario, case: Case) -> Scenario:
    """The scenario in which the case is true."""
    lengths = _spread(scenario.lengths, case.spread)
    if not case.has_hints:
        lengths = lengths.model_copy(update={"hint_sigma": NO_HINTS})
    costs = scenario.costs
    # What the physics computes follows from their own durations, unless the scenario sets it.
    computed = COMPUTED - costs.switch.model_fields_set if scenario.is_computed else set()
    switch = _slower(costs.switch, [name for name in SWITCHES if name not in computed], case.moves)
    costs = costs.model_copy(update={"switch": switch})
    changed = scenario.model_copy(update={"lengths": lengths, "costs": costs})
    if case.noise:
        noise = NoiseSection(engine_sigma=case.noise, step_sigma=case.noise, portion_sigma=case.noise)
        changed = changed.model_copy(update={"noise": noise})
    if scenario.is_computed:
        return changed.model_copy(update={"physics": _physics(scenario.physics, case)})
    steps = ("step_floor_s", "step_base_s", "step_per_sequence_s", "step_per_kv_token_s", "step_experts_s")
    engine = {name: getattr(costs.engine, name) / case.decode for name in steps}
    trainer = {"rate_tokens_per_s": costs.trainer.rate_tokens_per_s * case.trainer}
    updated = {
        "engine": costs.engine.model_copy(update=engine),
        "trainer": costs.trainer.model_copy(update=trainer),
    }
    return changed.model_copy(update={"costs": costs.model_copy(update=updated)})


def _slower(section: AnySection, names: Sequence[str], factor: float) -> AnySection:
    """The section with these durations times the factor. Of rates, whose names end in `_per_s`, the inverse."""
    values = ((name, getattr(section, name)) for name in names)
    changed = {name: value / factor if name.endswith("_per_s") else value * factor for name, value in values}
    return section.model_copy(update=changed)


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
            "moves": _slower(physics.moves, OF_PHYSICS, case.moves),
        }
    )
