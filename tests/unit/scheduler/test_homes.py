"""Without GPUs that are lost for good every component keeps its whole copies, or gets one of what others can spare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.components import Component
from services.scheduler.homes import NUM_ASKS, at_home, done_without, gate_key, without
from services.scheduler.issued import Expectation, Kind
from services.scheduler.policy.situation import as_configured, as_engines
from services.scheduler.remembered import Assignment, Remembered
from services.scheduler.state import ClusterState, Phase
from services.scheduler.values import JobSpec, Placed
from tests.unit.scheduler.fake_parts import JOB
from tests.unit.scheduler.situations import gpus, job
from tidegate.ownership import GpuRecord, GpuState, Owner
from tidegate.types import GpuId, Grant, Layout, Role, Token

SPEC = job(actor=4, rollout=4, inference=2, actor_tp=2, rollout_tp=2, prompts=8, minibatches=2)
"""GPUs 0-3 train as two copies, 4-7 are two engines, 8 and 9 infer."""


def lost(spec: JobSpec, gone: tuple[GpuId, ...], *, num_asks: int = NUM_ASKS) -> ClusterState:
    """While an iteration runs under a policy that places GPUs."""
    roles = {gpu: role for role in Role for gpu in spec.placement[role].gpus}
    records = {
        gpu: GpuRecord(
            gpu, GpuState.LOST if gpu in gone else GpuState.OWNED, Owner(JOB, role), Token(1, 5), transition=None
        )
        for gpu, role in roles.items()
    }
    state = ClusterState(
        job=JOB,
        phase=Phase.RUNNING,
        spec=spec,
        gpus=dict(sorted(records.items())),
        remembered=Remembered(assignment=as_configured(spec)),
    )
    asked = [gate_key(state, records[gpu]) for gpu in gone]
    return replace(
        state,
        expectations={key: Expectation(key, Kind.GATE, "", None, 0, num_asks, 0, 0, 1, "") for key in asked},
    )


def sizes(spec: JobSpec) -> dict[Role, tuple[GpuId, ...]]:
    return {role: spec.placement[role].gpus for role in Role}


HOMES: dict[str, tuple[tuple[GpuId, ...], dict[Role, tuple[GpuId, ...]]]] = {
    "who has whole copies left keeps them": (
        (*gpus(1, 2), *gpus(9, 10)),
        {Role.ACTOR: gpus(2, 4), Role.ROLLOUT: gpus(4, 8), Role.INFERENCE: gpus(8, 9)},
    ),
    "two broken copies make a whole one": (
        (*gpus(1, 2), *gpus(3, 4)),
        {Role.ACTOR: (*gpus(0, 1), *gpus(2, 3)), Role.ROLLOUT: gpus(4, 8), Role.INFERENCE: gpus(8, 10)},
    ),
    "who has none gets what is in no copy": (
        (*gpus(1, 2), *gpus(8, 10)),
        {Role.ACTOR: gpus(2, 4), Role.ROLLOUT: gpus(4, 8), Role.INFERENCE: gpus(0, 1)},
    ),
    "or one of the rollout's engines, and never the actor's": (
        gpus(8, 10),
        {Role.ACTOR: gpus(0, 4), Role.ROLLOUT: gpus(4, 6), Role.INFERENCE: gpus(6, 7)},
    ),
}


@pytest.mark.parametrize("name", HOMES)
def test_a_job_that_goes_on_without_gpus_is_at_home_on_the_others(name: str) -> None:
    gone, want = HOMES[name]
    home = at_home(lost(SPEC, gone), SPEC)
    assert sizes(home) == want
    for role in Role:
        layout = home.placement[role].layout
        assert layout.num_ranks == len(home.placement[role].gpus)
        assert replace(layout, dp=1) == replace(SPEC.placement[role].layout, dp=1)


def needed(state: ClusterState) -> bool:
    return not done_without(state) and at_home(state, SPEC).placement == SPEC.placement


def test_a_gpu_is_done_without_once_its_gate_was_asked_often_enough_under_a_policy_that_places_gpus() -> None:
    state = lost(SPEC, gpus(9, 10))
    assert done_without(state) == set(gpus(9, 10))
    assert needed(lost(SPEC, gpus(9, 10), num_asks=NUM_ASKS - 1))
    assert needed(replace(state, remembered=Remembered())), "a policy that leaves everything as configured"
    assert needed(replace(state, phase=Phase.STOPPING))
    back = GpuRecord(gpus(9, 10)[0], GpuState.FREE, None, Token(1, 5))
    assert needed(replace(state, gpus={**state.gpus, back.gpu: back}))


def test_where_a_component_could_get_no_copy_nothing_is_done_without() -> None:
    assert needed(lost(SPEC, (*gpus(4, 6), *gpus(8, 10)))), "the rollout keeps an engine, and the actor spares nothing"


def test_a_component_that_is_down_does_not_wait_for_gpus_that_the_actor_has() -> None:
    state = lost(SPEC, gpus(8, 10))
    grants = tuple(Grant(gpu, Token(1, 5)) for gpu in (*gpus(0, 4), *gpus(6, 8)))
    grown = replace(state, components={**state.components, Role.ACTOR: Component(grants=grants)})
    assert needed(grown)
    suspended = {role: Component(is_suspended=True) for role in (Role.ROLLOUT, Role.INFERENCE)}
    assert done_without(replace(grown, components={**grown.components, **suspended})) == set(gpus(8, 10))


def test_what_was_assigned_is_kept_but_for_lost_gpus_and_their_copies() -> None:
    assigned = Assignment(as_engines(gpus(4, 8), 2), Placed(gpus(0, 4), Layout(tp=2, dp=2)), gpus(8, 10))
    gone = frozenset((*gpus(0, 1), *gpus(5, 6), *gpus(8, 9)))
    left = without(assigned, at_home(lost(SPEC, tuple(gone)), SPEC), gone)
    assert left == Assignment((gpus(6, 8),), Placed(gpus(2, 4), Layout(tp=2)), gpus(9, 10))
    assert without(left, SPEC, gone) is left


def test_where_a_component_would_be_left_with_nothing_everything_is_at_home() -> None:
    assigned = Assignment((gpus(4, 6),), None, gpus(8, 9))
    spec = at_home(lost(SPEC, gpus(8, 9)), SPEC)
    assert without(assigned, spec, gpus(8, 9)) == as_configured(spec)
