"""After GPUs are lost for good, each component keeps its whole copies, or gets a copy that others can spare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.homes import Home, home_of, without
from services.scheduler.policy import Policy
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Absence, Component, Suspended, Working
from services.scheduler.state.layouts import replicas
from services.scheduler.state.manual_moves import ManualMoves
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.fake_parts import JOB, gpu
from tests.unit.scheduler.situations import gpus, job
from tidegate.ownership.records import GpuRecord, GpuState, Owner
from tidegate.types import GpuId, Grant, Layout, Role, Token

SPEC = job(actor=4, rollout=4, inference=2, actor_tp=2, rollout_tp=2, prompts=8, minibatches=2)
"""GPUs 0-3 train as two copies, 4-7 are two engines, 8 and 9 infer."""
ANY = TidePolicy()
"""It accepts every job."""


def lost(spec: JobSpec, gone: tuple[GpuId, ...], *, is_long: bool = True) -> ClusterState:
    """A state with lost GPUs, while an iteration runs under a policy that has placed GPUs."""
    roles = {each: role for role in Role for each in spec.placement[role].gpus}
    records = {
        each: GpuRecord(
            each, GpuState.LOST if each in gone else GpuState.OWNED, Owner(JOB, role), Token(1, 5), transition=None
        )
        for each, role in roles.items()
    }
    return ClusterState(
        job=JOB,
        phase=Phase.RUNNING,
        spec=spec,
        gpus=dict(sorted(records.items())),
        remembered=Remembered(assignment=as_configured(spec)),
        absent={gpu: Absence(Token(1, 5), 7, is_long) for gpu in gone},
    )


def home(state: ClusterState, policy: Policy = ANY) -> Home:
    assert state.spec is not None
    return home_of(state, state.spec, policy)


def sizes(spec: JobSpec) -> dict[Role, tuple[GpuId, ...]]:
    return {role: spec.placement[role].gpus for role in Role}


def spread(placement: dict[Role, tuple[tuple[GpuId, ...], Layout]], **changes: object) -> JobSpec:
    placed = {role: Placed(gpus, layout) for role, (gpus, layout) in placement.items()}
    return replace(SPEC, placement=placed, **changes)  # type: ignore[arg-type]  # only numbers are varied here


HOMES: dict[str, tuple[tuple[GpuId, ...], dict[Role, tuple[GpuId, ...]]]] = {
    "a component with whole copies keeps them": (
        (*gpus(1, 2), *gpus(9, 10)),
        {Role.ACTOR: gpus(2, 4), Role.ROLLOUT: gpus(4, 8), Role.INFERENCE: gpus(8, 9)},
    ),
    "two broken copies make a whole one": (
        (*gpus(1, 2), *gpus(3, 4)),
        {Role.ACTOR: (*gpus(0, 1), *gpus(2, 3)), Role.ROLLOUT: gpus(4, 8), Role.INFERENCE: gpus(8, 10)},
    ),
    "a component without a copy gets GPUs that are in no copy": (
        (*gpus(1, 2), *gpus(8, 10)),
        {Role.ACTOR: gpus(2, 4), Role.ROLLOUT: gpus(4, 8), Role.INFERENCE: gpus(0, 1)},
    ),
    "a component without a copy gets an engine of the rollout, and never GPUs of the actor": (
        gpus(8, 10),
        {Role.ACTOR: gpus(0, 4), Role.ROLLOUT: gpus(4, 6), Role.INFERENCE: gpus(6, 7)},
    ),
}


@pytest.mark.parametrize("name", HOMES)
def test_a_job_that_goes_on_without_gpus_is_at_home_on_the_others(name: str) -> None:
    gone, want = HOMES[name]
    spec = home(lost(SPEC, gone)).spec
    assert sizes(spec) == want
    for role in Role:
        layout = spec.placement[role].layout
        assert layout.num_ranks == len(spec.placement[role].gpus)
        assert replace(layout, dp=1) == replace(SPEC.placement[role].layout, dp=1)


def at(node: int, start: int, end: int) -> tuple[GpuId, ...]:
    return tuple(gpu(f"n{node}", index) for index in range(start, end))


TWO_NODES = spread(
    {
        Role.ACTOR: ((*at(0, 0, 2), *at(1, 0, 4)), Layout(tp=2, dp=3)),
        Role.ROLLOUT: ((*at(0, 2, 8), *at(1, 4, 8)), Layout(tp=2, dp=5)),
        Role.INFERENCE: ((*at(2, 0, 2),), Layout(tp=2)),
    }
)


def test_the_remaining_gpus_of_broken_copies_make_new_copies_inside_a_node() -> None:
    """Engines 2-3 and 4-5 of n0 and 4-5 of n1 lose a GPU each: two of the three that are left are n0's."""
    gone = (*at(0, 2, 3), *at(0, 5, 6), *at(1, 4, 5))
    rollout = home(lost(TWO_NODES, gone)).spec.placement[Role.ROLLOUT]
    assert rollout == Placed((*at(0, 6, 8), *at(1, 6, 8), *at(0, 3, 5)), Layout(tp=2, dp=3))
    between = (*at(0, 3, 4), *at(1, 4, 5), *at(0, 7, 8))
    rollout = home(lost(TWO_NODES, between)).spec.placement[Role.ROLLOUT]
    assert rollout.gpus == (*at(0, 4, 6), *at(1, 6, 8), at(0, 2, 3)[0], at(0, 6, 7)[0])


def test_a_component_that_gets_a_copy_from_gpus_of_others_gets_it_inside_a_node() -> None:
    """Inference loses its node. One GPU of the actor's broken copy is nobody's, on n0; the rollout's last engine, of
    which one GPU is lost, leaves another on n1: a whole pair is better."""
    gone = (*at(2, 0, 2), *at(0, 1, 2), *at(1, 7, 8))
    spec = home(lost(TWO_NODES, gone)).spec
    assert spec.placement[Role.INFERENCE].gpus == (at(0, 0, 1)[0], at(1, 6, 7)[0]), "across nodes where nothing else is"
    also = (*gone, *at(1, 6, 7))
    spec = home(lost(TWO_NODES, also)).spec
    assert spec.placement[Role.INFERENCE] == Placed(at(1, 4, 6), Layout(tp=2))
    assert spec.placement[Role.ROLLOUT].layout == Layout(tp=2, dp=3)


def test_a_reproducible_actor_is_at_home_with_copies_that_divide_its_shards() -> None:
    spec = job(actor=4, rollout=4, inference=2, prompts=8, minibatches=2)
    assert home(lost(spec, gpus(3, 4))).spec.placement[Role.ACTOR] == Placed(gpus(0, 3), Layout(dp=3))
    reproducible = replace(spec, num_logical_shards=4)
    assert home(lost(reproducible, gpus(3, 4))).spec.placement[Role.ACTOR] == Placed(gpus(0, 2), Layout(dp=2))


def test_a_home_is_one_that_the_policy_accepts_where_there_is_one() -> None:
    """With four prompts a minibatch RLinf trains one, two or four copies. To lend the actor's GPUs to engines of two it
    needs an even number of them."""
    spec = job(actor=4, rollout=4, inference=2, rollout_tp=2, prompts=8, minibatches=2)
    state = lost(spec, gpus(3, 4))
    assert home(state, RLinfPolicy(RLinfRules(16, auto_scheduler=True))).spec.placement[Role.ACTOR].layout.dp == 2
    odd = replace(spec, num_prompts=12)
    lends = RLinfPolicy(RLinfRules(16, auto_scheduler=True, use_pre_process_policy=True))
    keeps = RLinfPolicy(RLinfRules(16, auto_scheduler=True))
    assert home(lost(odd, gpus(3, 4)), keeps).spec.placement[Role.ACTOR].layout.dp == 3
    assert home(lost(odd, gpus(3, 4)), lends).spec.placement[Role.ACTOR].layout.dp == 2
    assert home(lost(odd, gpus(1, 4)), lends).spec.placement[Role.ACTOR] == Placed(gpus(0, 1), Layout()), (
        "one GPU makes no engine of two: no home is accepted, and the job goes on all the same"
    )


def test_an_actor_that_has_no_copy_left_gets_a_free_slot_of_its_own() -> None:
    """Rollout and inference have one copy each, and spare none."""
    spec = replace(job(actor=1, rollout=1, inference=1, prompts=8, minibatches=2), standby=gpus(3, 5))
    state = lost(spec, gpus(0, 1))
    assert sizes(home(state).spec) == {Role.ACTOR: gpus(3, 4), Role.ROLLOUT: gpus(1, 2), Role.INFERENCE: gpus(2, 3)}
    moved_away = replace(lost(spec, gpus(3, 5)), moved=Placed(gpus(4, 5), Layout()))
    assert home(moved_away).spec.placement[Role.ACTOR] == Placed(gpus(0, 1), Layout()), "where the config has it"
    assert home(lost(spec, (*gpus(0, 1), *gpus(3, 5)))) == Home(spec), "and none where none is left"


def test_standby_gpus_go_to_the_actor_alone() -> None:
    spec = replace(job(actor=1, rollout=1, inference=1, prompts=8, minibatches=2), standby=gpus(3, 5))
    assert home(lost(spec, gpus(2, 3))) == Home(spec)


def test_an_actor_that_lost_nothing_stays_where_a_person_moved_it() -> None:
    """A person moved it to three copies, of which RLinf would train one, two or four."""
    spec = replace(job(actor=4, rollout=4, inference=2, prompts=8, minibatches=2), standby=gpus(10, 11))
    asked = Placed(gpus(0, 3), Layout(dp=3))
    rlinf = RLinfPolicy(RLinfRules(16, auto_scheduler=True))
    for gone in (gpus(4, 5), gpus(3, 4), gpus(10, 11)):
        at_home = home(replace(lost(spec, gone), moved=asked), rlinf).spec
        assert at_home.placement[Role.ACTOR] == asked
        assigned = replace(as_configured(spec), trainer=asked)
        assert without(assigned, at_home, frozenset(gone), rlinf).trainer == asked
    at_home = home(replace(lost(spec, gpus(2, 3)), moved=asked), rlinf).spec
    assert at_home.placement[Role.ACTOR] == Placed(gpus(0, 2), Layout(dp=2))


def test_the_remaining_gpus_of_an_assigned_trainer_make_a_layout_that_the_policy_accepts() -> None:
    spec = job(actor=2, rollout=4, inference=2, rollout_tp=2, prompts=8, minibatches=2)
    grown = Assignment((gpus(2, 4),), Placed((*gpus(0, 2), *gpus(4, 6)), Layout(dp=4)), gpus(6, 8))
    gone = frozenset(gpus(5, 6))
    rlinf = RLinfPolicy(RLinfRules(16, auto_scheduler=True))
    assert without(grown, spec, gone, rlinf).trainer == Placed(gpus(0, 2), Layout(dp=2))
    assert without(grown, spec, gone, ANY).trainer == Placed(gpus(0, 2) + gpus(4, 5), Layout(dp=3))
    shards = replace(spec, num_logical_shards=4)
    assert without(grown, shards, gone, ANY).trainer == Placed(gpus(0, 2), Layout(dp=2))


def needed(state: ClusterState) -> bool:
    return home(state) == Home(SPEC)


def test_a_gpu_is_gone_once_it_is_absent_for_long_and_the_job_goes_on() -> None:
    state = lost(SPEC, gpus(9, 10))
    assert home(state).gone == set(gpus(9, 10))
    assert needed(lost(SPEC, gpus(9, 10), is_long=False))
    assert needed(replace(state, absent={}))


def test_a_job_waits_for_lost_gpus_where_a_component_could_get_no_copy() -> None:
    assert needed(lost(SPEC, (*gpus(4, 6), *gpus(8, 10)))), "the rollout keeps an engine, and the actor spares nothing"


def test_a_component_that_is_down_does_not_wait_for_gpus_that_the_actor_has() -> None:
    state = lost(SPEC, gpus(8, 10))
    grants = tuple(Grant(gpu, Token(1, 5)) for gpu in (*gpus(0, 4), *gpus(6, 8)))
    at_work = Working(grants, Placed(tuple(grant.gpu for grant in grants), Layout(dp=len(grants))))
    grown = replace(state, components={**state.components, Role.ACTOR: Component(state=at_work)})
    assert needed(grown)
    suspended = {role: Component(state=Suspended()) for role in (Role.ROLLOUT, Role.INFERENCE)}
    assert home(replace(grown, components={**grown.components, **suspended})).gone == set(gpus(8, 10))


def test_an_assignment_is_kept_except_for_lost_gpus_and_their_copies() -> None:
    assigned = Assignment(replicas(gpus(4, 8), 2), Placed(gpus(0, 4), Layout(tp=2, dp=2)), gpus(8, 10))
    gone = frozenset((*gpus(0, 1), *gpus(5, 6), *gpus(8, 9)))
    left = without(assigned, home(lost(SPEC, tuple(gone))).spec, gone, ANY)
    assert left == Assignment((gpus(6, 8),), Placed(gpus(2, 4), Layout(tp=2)), gpus(9, 10))
    assert without(left, SPEC, gone, ANY) is left


def test_whole_copies_of_inference_are_kept_when_another_is_broken() -> None:
    placed = {role: (SPEC.placement[role].gpus, SPEC.placement[role].layout) for role in (Role.ACTOR, Role.ROLLOUT)}
    pairs = spread({**placed, Role.INFERENCE: (gpus(8, 12), Layout(tp=2, dp=2))})
    assigned = Assignment((gpus(4, 6),), None, gpus(8, 12))
    assert without(assigned, pairs, frozenset(gpus(8, 9)), ANY).inference == gpus(10, 12)


def test_where_an_assignment_would_leave_a_component_without_gpus_all_components_are_at_home() -> None:
    assigned = Assignment((gpus(4, 6),), None, gpus(8, 9))
    gone = frozenset(gpus(8, 9))
    spec = home(lost(SPEC, gpus(8, 9))).spec
    assert without(assigned, spec, gone, ANY) == as_configured(spec)


def test_drained_gpus_are_used_rather_than_lost_ones_where_both_together_leave_no_copy() -> None:
    actor, rollout = (SPEC.placement[role].gpus for role in (Role.ACTOR, Role.ROLLOUT))
    gone, drained = (*actor[:2], *rollout[:2]), (*actor[2:], *rollout[2:])
    state = replace(lost(SPEC, gone), manual=ManualMoves(drained=drained))
    found = home(state)
    assert (found.gone, found.drained) == (frozenset(gone), frozenset())
    assert frozenset(gone).isdisjoint(slot for placed in found.spec.placement.values() for slot in placed.gpus)
