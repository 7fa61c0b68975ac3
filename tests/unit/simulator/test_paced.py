"""The simulator's costs of a job on modelled slots are the law of its pace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.calibration import fitted_values, scenario_of
from simulator.cost_model import Costs
from simulator.paced import paced_costs
from tests.unit.simulator.simulated_recording import recorded_run
from tidegate.config.sections.costs import CostsSection
from tidegate.config.sections.pace import PaceSection
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.packing import TokenCap
from tidegate.pace.costs import SWITCHES, with_paced_costs
from tidegate.pace.law import PaceLaw
from tidegate.types import Layout

PACE = PaceSection(time_scale=0.05, tokens_per_token=96, responses_per_response=8)
LAW = PaceLaw(PACE)


def costs_of(pace: PaceSection, *, num_policies: int = 1) -> Costs:
    raw: dict[str, dict[str, float]] = {}
    for key, value in paced_costs(pace, num_policies=num_policies).items():
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = value
    return Costs.model_validate(raw)


@given(running=st.integers(0, 64), kv_tokens=st.integers(0, 20_000), tokens=st.integers(1, 10**6), dp=st.integers(1, 8))
def test_costs_are_the_law_of_the_pace(running: int, kv_tokens: int, tokens: int, dp: int) -> None:
    costs = costs_of(PACE, num_policies=2)
    decode_s = costs.engine.decode_s(running=running, kv_tokens=kv_tokens, steps=1)
    assert decode_s == pytest.approx(LAW.decode_s(num_sequences=running, num_kv_tokens=kv_tokens))
    assert tokens / costs.engine.prefill_tokens_per_s == pytest.approx(LAW.prefill_s(tokens))
    layout, each = Layout(dp=dp), [[tokens]] * dp
    update_s = costs.trainer.fixed_s + costs.trainer.tokens_s(tokens * dp, layout)
    assert update_s == pytest.approx(LAW.training_s(each, layout))
    scoring_s = tokens / costs.inference.rate_tokens_per_s
    assert scoring_s == pytest.approx(LAW.scoring_s(tokens, Layout(), num_policies=2))


def test_a_calibration_of_a_paced_job_takes_its_law_and_fits_only_the_rest(tmp_path: Path) -> None:
    truth = costs_of(PACE)
    truth = truth.model_copy(
        update={
            "engine": truth.engine.model_copy(
                update={"gpus_per_engine": 1, "max_running": 32, "kv_capacity_tokens": 2560}
            ),
            "sync": truth.sync.model_copy(update={"fixed_s": 0.7}),
        }
    )
    run = recorded_run(tmp_path, truth, num_iterations=3, limits=BatchLimits(max_sequences=16))
    cluster = run.config.cluster.model_copy(update={"pace": PACE})
    assumed = with_paced_costs(CostsSection(), PACE, num_policies=1)
    assumptions = run.config.assumptions.model_copy(update={"costs": assumed})
    paced = replace(run, config=run.config.model_copy(update={"cluster": cluster, "assumptions": assumptions}))
    got = scenario_of(fitted_values(paced)).costs
    assert (got.switch.release_s, got.switch.trainer_warm_s) == (SWITCHES["release_s"], SWITCHES["load_s"])
    for section in ("engine", "inference", "trainer"):
        got_values, want_values = (getattr(costs, section).model_dump() for costs in (got, truth))
        for name, value in want_values.items():
            assert got_values[name] == pytest.approx(value, rel=1e-3), (section, name)
    assert got.sync.fixed_s == pytest.approx(0.7, rel=0.05)


def test_a_calibration_has_the_micro_batches_of_a_paced_job_alone(tmp_path: Path) -> None:
    """The fitted rate of another job's trainer contains the waits of replicas."""
    run = recorded_run(tmp_path, num_iterations=2)
    assert scenario_of(fitted_values(run)).algorithm.micro_batches is None
    cluster = run.config.cluster.model_copy(update={"pace": PACE})
    for capped, want in ((None, BatchLimits(max_sequences=16)), (256, TokenCap(256, 7, 256 * 7))):
        actor = run.config.actor.model_copy(update={"max_tokens_per_microbatch": capped})
        config = run.config.model_copy(update={"cluster": cluster, "actor": actor})
        found = scenario_of(fitted_values(replace(run, config=config), token_cost=7))
        assert found.workload().limits == want
