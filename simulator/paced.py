"""The costs of a job on modelled slots: the law of its pace, in the fields of the cost model. Nothing is fitted.

Invariant: engine, trainer and inference then take as long as the pace's law says.
[test_paced: costs_are_the_law]
"""

from __future__ import annotations

from collections.abc import Mapping

from simulator.job_scenario import COST_KEYS, PACED_PREFILL_SHARE
from tidegate.config.sections.pace import PaceSection
from tidegate.pace.costs import step_costs


def paced_costs(pace: PaceSection, *, num_policies: int) -> Mapping[str, float]:
    """The values by key, such as `engine.step_base_s`. `num_policies`: those that the inference computes."""
    steps = step_costs(pace, num_policies=num_policies)
    fields = {f"{section}.{name}": steps[own] for (section, name), own in COST_KEYS.items() if own in steps}
    return {**fields, "engine.fresh_prefill_share": PACED_PREFILL_SHARE}
