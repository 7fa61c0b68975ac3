"""Baselines by name, and what each is worth in the published iteration."""

from __future__ import annotations

import pytest

from benchmarks.direct import simulate
from services.scheduler.policy.dynarl import DynaRLPolicy
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.rlinf import RLinfPolicy
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.tide_policy import TidePolicy
from simulator.baselines import MAKERS, NAMES, RULES, section_of
from simulator.job_spec import job_of
from simulator.policies import contenders_of, policies_by_name, policies_of
from simulator.scenario import ScenarioError, load_scenario
from tests.unit.simulator.scenarios import PUBLISHED, small
from tests.unit.simulator.whole_runs import check_whole
from tidegate.config.sections.scheduler import POLICIES, SchedulerSection
from tidegate.types import PromptOrder


@pytest.mark.parametrize("name", RULES)
def test_a_baseline_has_rules_that_a_job_can_have(name: str) -> None:
    section = section_of(name, SchedulerSection())
    assert SchedulerSection.model_validate(section.model_dump()) == section


def test_a_baseline_has_the_other_rules_of_the_scenario() -> None:
    section = SchedulerSection.model_validate(
        {
            "static": {"collocated": True, "order": "short_between_long"},
            "rlinf": {"max_running_requests": 7},
            "tide": {"rounds": 2},
        }
    )
    made = {name: MAKERS[name](section) for name in MAKERS}
    assert made["phases"] == PhasesPolicy()
    assert made["phases_ordered"] == PhasesPolicy(PromptOrder.LONGEST_FIRST)
    assert made["split"] == StaticPolicy()
    assert made["split_ordered"] == StaticPolicy(PromptOrder.LONGEST_FIRST)
    assert made["static"] == PhasesPolicy(PromptOrder.SHORT_BETWEEN_LONG)
    rlinf, dynarl, once = made["rlinf_ordered"], made["dynarl_priority"], made["planned_once"]
    assert isinstance(rlinf, RLinfPolicy)
    assert (rlinf.rules.max_running_requests, rlinf.rules.order) == (7, PromptOrder.LONGEST_FIRST)
    assert isinstance(dynarl, DynaRLPolicy)
    assert dynarl.rules.request_priority
    assert isinstance(once, TidePolicy)
    assert (once.rules.rounds, once.revises) == (2, False)


def test_no_baseline_hides_a_policy() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(POLICIES) < set(NAMES)


def test_every_contender_trains_every_sample_once_in_the_order_of_the_names() -> None:
    names = [*reversed(NAMES)]
    contenders = contenders_of(names, small(), 3)
    assert list(contenders) == names
    for name, contender in contenders.items():
        check_whole(simulate(contender.scenario, contender.policy, name=name, seed=3), small())
        assert bool(contender.note) is (name == "best_split")


def test_best_split_is_refused_where_there_is_no_scenario() -> None:
    with pytest.raises(ScenarioError, match="best_split is searched by simulation"):
        policies_by_name(["best_split"], SchedulerSection(), job_of(small(), small().read_lengths()))


@pytest.mark.long
def test_an_order_makes_phases_12_to_16_percent_faster_in_the_published_iteration() -> None:
    """Only the rollout is shorter: by hints of lengths, no longest prompt begins late."""
    assert over_phases("phases_ordered") == pytest.approx(1.14, abs=0.03)


@pytest.mark.long
def test_inter_stage_fusion_gains_1_04_where_1_16_is_published() -> None:
    """Published: 88 against 76 K tokens/s of phases (DynaRL, figure 11, 7B on 64 GPUs).

    Ours gains less. In the published timeline inference takes 45 s of 985 s, so that hiding all of it gains 1.05. The
    tail's sequences are prefilled again besides.
    """
    assert over_phases("fused") == pytest.approx(1.04, abs=0.02)


@pytest.mark.long
def test_rlinf_gains_1_32_where_1_16_is_published() -> None:
    """Published: 118 against 102 K tokens/s of verl in phases (RLinf, 7B on 64 GPUs), and 196 against 160 on 128.

    Ours gains more: its components hand GPUs over in seconds, and its phases have DynaRL's shares of an iteration, of
    which the rollout takes half. DynaRL measured RLinf at 73 against verl's 76 on the same GPUs.
    """
    assert over_phases("rlinf") == pytest.approx(1.32, abs=0.04)


def over_phases(name: str) -> float:
    """How much faster the published iteration is than with phases, on the lengths of seed 10."""
    scenario = load_scenario(PUBLISHED)
    made = policies_of(["phases", name], scenario)
    phases, other = (simulate(scenario, policy, seed=10, directly=True).iteration_s for policy in made.values())
    return phases / other
