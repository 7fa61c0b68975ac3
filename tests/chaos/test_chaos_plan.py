"""Plans of the driver: a seed draws the same again, and what it draws can be run."""

from __future__ import annotations

import json

import pytest

from tests.chaos.faults.kinds import KINDS
from tests.chaos.moments import EVENTS, Moment
from tests.chaos.plan import MOST_FAULTS, plan_of, read_plan
from tests.chaos.variants import TRAININGS, Variant, reference_of
from tidegate.config.job_config import parse_config

PLANS = [plan_of(seed) for seed in range(200)]


def test_the_same_seed_draws_the_same_plan() -> None:
    assert [plan_of(seed) for seed in range(200)] == PLANS
    assert len({json.dumps(plan.record()) for plan in PLANS}) == len(PLANS)


def test_a_plan_is_read_back_from_its_record() -> None:
    assert [read_plan(json.loads(json.dumps(plan.record()))) for plan in PLANS] == PLANS


def test_every_kind_and_every_moment_is_drawn() -> None:
    planned = [each for plan in PLANS for each in plan.faults]
    assert {each.fault.kind for each in planned} == set(KINDS)
    assert {each.moment.event for each in planned} == set(EVENTS)
    assert {len(plan.faults) for plan in PLANS} == set(range(1, MOST_FAULTS + 1))
    moments = [[each.moment for each in plan.faults] for plan in PLANS]
    assert any(len(set(each)) < len(each) for each in moments), "pairs at once"


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_alone_is_drawn_on_request(kind: str) -> None:
    plans = [plan_of(seed, only=kind) for seed in range(20)]
    assert {each.fault.kind for plan in plans for each in plan.faults} == {kind}
    assert {plan.variant.servers for plan in plans} <= ({"own", "embedded"} & _servers(kind))


def _servers(kind: str) -> set[str]:
    needs = KINDS[kind].needs
    return {"own", "embedded"} if needs == "any" else {needs}


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'Earthquake'; there are Kill, Pause"):
        plan_of(0, only="Earthquake")


def test_each_plan_is_of_a_job_that_can_be_configured() -> None:
    for variant in {plan.variant for plan in PLANS}:
        config = parse_config(variant.job("chaos"))
        assert config.algorithm.iterations == variant.training.iterations
        assert (config.actor.num_logical_shards is not None) == variant.is_reproducible


def test_variants_of_one_training_have_one_reference() -> None:
    references: dict[object, set[Variant]] = {}
    for plan in PLANS:
        references.setdefault(plan.variant.training, set()).add(reference_of(plan.variant))
    assert references.keys() == set(TRAININGS)
    assert [len(found) for found in references.values()] == [1] * len(TRAININGS)


def test_a_moment_comes_with_the_nth_event_of_its_kind_and_stays() -> None:
    rows = [{"id": f"a/{number}", "gpus_acquired": {}} for number in range(3)]
    moment = Moment("gpus_acquired", 2, 0.0)
    assert [moment.is_reached(rows[:count]) for count in range(4)] == [False, False, True, True]
    assert not moment.is_reached([rows[0], rows[0]]), "an event that was read twice is one"


def test_the_moment_of_a_phase_counts_iterations_in_which_it_goes_on() -> None:
    def progress(iteration: int, num_done: str) -> dict[str, object]:
        told = {"phase": "generate", "num_done": num_done, "num_total": "4"}
        return {"id": f"{iteration}/{num_done}", "iteration": iteration, "progress": told}

    moment = Moment("generating", 2, 0.0)
    assert not moment.is_reached([progress(0, "1"), progress(0, "2"), progress(1, "0"), progress(1, "4")])
    assert moment.is_reached([progress(0, "1"), progress(1, "3")])
