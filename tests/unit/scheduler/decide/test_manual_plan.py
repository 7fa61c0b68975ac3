"""A plan foretells the transitions that a manual move makes, in an order in which they can be made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.manual_plan import planned_steps
from services.scheduler.state.switch_costs import ReshardCosts
from services.scheduler.state.values import Placed
from tests.unit.scheduler.fake_parts import gpu
from tests.unit.scheduler.manual_job import (
    ACTOR,
    FEWER_ENGINES,
    HOME,
    INFERENCE,
    LARGER,
    MOVED_ENGINE,
    ROLLOUT,
    SMALLER,
    is_at,
    planned,
    running,
    split,
)
from tidegate.ownership.records import PartKind
from tidegate.types import Layout, Role

SWAPPED = {
    **HOME,
    ACTOR: Placed((gpu("n0", 1), gpu("n1", 0)), Layout(dp=2)),
    ROLLOUT: Placed((gpu("n0", 0), gpu("n1", 1), gpu("n1", 3)), Layout(dp=3)),
}
"""The actor and the rollout exchange a GPU."""
OTHER_INFERENCE = {**HOME, INFERENCE: Placed((gpu("n0", 3), gpu("n1", 2)), Layout(tp=2))}
"""The only copy of the inference moves."""
CASES = {
    "a larger actor": LARGER,
    "a smaller actor": SMALLER,
    "fewer engines": FEWER_ENGINES,
    "a moved engine": MOVED_ENGINE,
    "a swap": SWAPPED,
    "the only copy moves": OTHER_INFERENCE,
    "another layout": {**HOME, ACTOR: Placed(HOME[ACTOR].gpus, Layout(tp=2))},
}


@pytest.mark.parametrize("case", CASES)
def test_the_job_makes_the_foretold_transitions(case: str) -> None:
    drive, placement = running(), CASES[case]
    foretold = [(step.role, set(step.leaves), set(step.comes)) for step in planned_steps(drive.state, placement)]
    sent = len(drive.cluster.log)
    split(drive, placement)
    drive.run_until(is_at(placement))
    # The inference's release and start need not be together: only the order of what waits is foretold.
    assert sorted(planned(drive, sent), key=str) == sorted(foretold, key=str)


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_only_gpus_that_are_free_or_that_an_earlier_step_gives_up(case: str) -> None:
    state = running().state
    free = {slot for slot, record in state.gpus.items() if record.owner is None}
    for step in planned_steps(state, CASES[case]):
        assert set(step.comes) <= free
        assert set(step.waits_for) <= set(step.comes)
        assert step.estimated_s is None or step.estimated_s > 0
        free |= set(step.leaves)
    assert planned_steps(state, dict(HOME)) == ()


def test_a_component_that_is_to_have_no_gpus_is_suspended() -> None:
    state = running().state
    steps = planned_steps(state, {**HOME, ACTOR: None, ROLLOUT: None})
    assert [(step.role, step.change, step.comes) for step in steps] == [
        (Role.ROLLOUT, PartKind.SUSPEND, ()),
        (Role.ACTOR, PartKind.SUSPEND, ()),
    ]


def test_a_change_of_tp_lasts_as_long_as_policies_assume_it_does() -> None:
    state = running().state
    assert state.spec is not None
    reshard = ReshardCosts(
        setup_s=1.0, communicators_s=2.0, bytes_per_s=1e9, weight_bytes=10**9, optimizer_bytes=10**10, gpus_per_host=4
    )
    costs = replace(state.spec.costs, reshard=reshard)
    state = replace(state, spec=replace(state.spec, costs=costs))
    (step,) = planned_steps(state, {**HOME, ACTOR: Placed(HOME[ACTOR].gpus, Layout(tp=2))})
    want_s = state.learned.costs(costs).trainer_reshapes_s(copy_size=1, new_size=2, most=2)[2, 1]
    assert step.estimated_s == want_s != costs.reshard_s
