"""The costs of a job on modelled slots: the law of its pace, in the fields of the cost model. Nothing is fitted.

Invariant: engine, trainer and inference then take as long as the pace's law says.
[test_paced: costs_are_the_law]
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.config.sections.pace import PaceSection
from tidegate.pace.law import PaceLaw
from tidegate.types import Layout

_ONE_GPU = Layout()


def paced_costs(pace: PaceSection, *, num_policies: int) -> Mapping[str, float]:
    """The values by key, such as `engine.step_base_s`. `num_policies`: those that the inference computes."""
    law = PaceLaw(pace)
    base_s = law.decode_s(num_sequences=0, num_kv_tokens=0)
    return {
        "engine.step_floor_s": 0.0,
        "engine.step_base_s": base_s,
        "engine.step_per_sequence_s": law.decode_s(num_sequences=1, num_kv_tokens=0) - base_s,
        "engine.step_per_kv_token_s": law.decode_s(num_sequences=0, num_kv_tokens=1) - base_s,
        "engine.prefill_tokens_per_s": 1 / law.prefill_s(1),
        "engine.fresh_prefill_share": 1.0,
        "inference.rate_tokens_per_s": 1 / law.scoring_s(1, _ONE_GPU, num_policies=num_policies),
        "trainer.fixed_s": law.update_s,
        "trainer.rate_tokens_per_s": 1 / law.portion_s([[1]], _ONE_GPU),
        "trainer.rate_gpus": 1,
        "trainer.exponent": 1.0,
    }
