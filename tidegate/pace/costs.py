"""The costs that follow from a pace's law, by the keys of the config's `assumptions.costs`. Pure; nothing is fitted.

The law gives the duration of every modelled step. Switches are not modelled: they take the time that they take here.
`SWITCHES` and `SYNC_S` have their assumed times, measured on one machine.

Invariants:
- With these costs a policy foresees each step as the law has it. [test_costs: foresees_each_step]
- What the config sets stays. [test_costs: what_the_config_sets_stays]
- A config that was written and read again has the same costs. [test_costs: written_and_read_again]
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.config.sections.costs import LEAST_RATE, MOST_RATE, CostsSection
from tidegate.config.sections.pace import PaceSection
from tidegate.pace.law import PaceLaw
from tidegate.types import Layout

_ONE_GPU = Layout()
SWITCHES: Mapping[str, float] = {
    "release_s": 0.3,
    "acquire_s": 0.4,
    "resubmit_s": 0.1,
    "reshard_s": 0.6,
    "load_s": 0.8,
    "inference_start_s": 0.5,
}
"""Measured, in seconds: the demo's model on CPU slots of 2 cores. `time_scale` does not change them: moves are really
made. The config's defaults hold for 64 GPUs and a 7B model: with them no move would pay in a short iteration."""
SYNC_S = 0.3
"""The seconds from an iteration's last update to the first token of the next: save, publish, load. Measured as
`SWITCHES`: 0.04 to 0.2 without moves, and 0.5 to 1.0 where slots go home first."""


def step_costs(pace: PaceSection, *, num_policies: int) -> Mapping[str, float]:
    """The costs of steps. `num_policies`: those that the inference computes."""
    law = PaceLaw(pace)
    base_s = law.decode_s(num_sequences=0, num_kv_tokens=0)
    return {
        "decode_floor_s": base_s,
        "decode_base_s": base_s,
        "decode_per_sequence_s": law.decode_s(num_sequences=1, num_kv_tokens=0) - base_s,
        "decode_per_kv_token_s": law.decode_s(num_sequences=0, num_kv_tokens=1) - base_s,
        "prefill_tokens_per_s": 1 / law.prefill_s(1),
        "update_s": law.update_s,
        "trainer_tokens_per_s": 1 / law.portion_s([[1]], _ONE_GPU),
        "trainer_gpus": 1,
        "trainer_exponent": 1.0,
        "inference_tokens_per_s": 1 / law.scoring_s(1, _ONE_GPU, num_policies=num_policies),
    }


def with_paced_costs(costs: CostsSection, pace: PaceSection, *, num_policies: int) -> CostsSection:
    """The law's costs and `SWITCHES` in place of the defaults. Keys that the config sets stay."""
    steps = step_costs(pace, num_policies=num_policies)
    rates = {key: min(max(value, LEAST_RATE), MOST_RATE) for key, value in steps.items() if key.endswith("_per_s")}
    paced = {**steps, **rates, **SWITCHES}
    return costs.model_copy(update={key: value for key, value in paced.items() if key not in costs.model_fields_set})
