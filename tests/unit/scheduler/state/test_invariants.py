"""Each invariant finds a state that breaks it, and no invariant finds a fault in a sound state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Working
from services.scheduler.state.course import KEPT, Evaluation, Summary
from services.scheduler.state.invariants import check
from services.scheduler.state.issued import Expectation, Kind
from services.scheduler.state.observed import Inferring, Pictures
from services.scheduler.state.values import Fate
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.ownership.records import GpuState, Move, Part, PartKind, Transition
from tidegate.types import Grant, Layout, Role, Token, TransitionId

ACTOR_GPU = gpu("n0", 0)


def sound() -> ClusterState:
    drive = booted(FakeCluster(spec()))
    drive.run_until(lambda state: state.next_iteration == 1 and state.iteration is not None)
    return drive.state


def with_component(state: ClusterState, role: Role, /, **changes: object) -> ClusterState:
    component = replace(state.components[role], **changes)  # type: ignore[arg-type]  # the cases name their fields
    return replace(state, components={**state.components, role: component})


def at_work(state: ClusterState, role: Role, /, **changes: object) -> ClusterState:
    working = state.components[role].state
    assert isinstance(working, Working)
    changed = replace(working, **changes)  # type: ignore[arg-type]  # the cases name their fields
    return with_component(state, role, state=changed)


def with_record(state: ClusterState, /, **changes: object) -> ClusterState:
    record = replace(state.gpus[ACTOR_GPU], **changes)  # type: ignore[arg-type]  # the cases name their fields
    return replace(state, gpus={**state.gpus, ACTOR_GPU: record})


def with_an_actors_gpu_in_the_rollout(state: ClusterState) -> ClusterState:
    grants = (*state.components[Role.ROLLOUT].grants[:2], state.components[Role.ACTOR].grants[0])
    return at_work(state, Role.ROLLOUT, grants=grants)


def with_wrong_samples(state: ClusterState) -> ClusterState:
    summary = replace(state.summaries[0], generated=Fate(num_samples=9))
    return replace(state, summaries=(summary,))


def numbered(state: ClusterState, num: int) -> tuple[Summary, ...]:
    """Accounts of so many iterations."""
    return tuple(replace(state.summaries[0], iteration=k) for k in range(num))


def with_transitions(state: ClusterState, *, deadline_unix_ms: int) -> ClusterState:
    move = Move(ACTOR_GPU, None, state.owner(Role.ACTOR), Token(1, 1))
    part = Part(Role.ACTOR, PartKind.START, None, Layout())
    transitions = [
        Transition(TransitionId(f"tide/1/t{k}"), state.job, 1, (move,), (part,), 1, deadline_unix_ms, "")
        for k in (7, 8)
    ]
    return replace(state, transitions={each.id: each for each in transitions})


def without_a_deadline(state: ClusterState) -> ClusterState:
    endless = Expectation("k", Kind.LEAD, "ScaleUp", Role.ACTOR, 1, 1, 0, 5, 0, "")
    return replace(state, expectations={"k": endless})


BROKEN: dict[str, tuple[Callable[[ClusterState], ClusterState], str]] = {
    "a GPU works for two components": (with_an_actors_gpu_in_the_rollout, "one owner a GPU"),
    "a component works on a GPU that the store counts as lost": (
        lambda state: with_record(state, state=GpuState.LOST),
        "one owner a GPU",
    ),
    "a component works on a GPU that belongs to another": (
        lambda state: with_record(state, owner=state.owner(Role.ROLLOUT)),
        "one owner a GPU",
    ),
    "two transitions hold a GPU": (
        lambda state: with_transitions(state, deadline_unix_ms=1),
        "one open transition a GPU",
    ),
    "a transition has no deadline": (
        lambda state: with_transitions(state, deadline_unix_ms=0),
        "no open transition without a deadline",
    ),
    "a layout has more ranks than grants": (
        lambda state: at_work(state, Role.ACTOR, grants=state.components[Role.ACTOR].grants[:1]),
        "a layout's ranks are its grants",
    ),
    "a copy of the inference lacks a rank": (
        lambda state: at_work(state, Role.INFERENCE, grants=state.components[Role.INFERENCE].grants[:1]),
        "a layout's ranks are its grants",
    ),
    "an iteration's samples do not add up": (with_wrong_samples, "generated = trained + filtered + discarded"),
    "an iteration is in the lineage twice": (
        lambda state: replace(state, summaries=state.summaries * 2),
        "an iteration is once in the lineage",
    ),
    "an iteration's account is dropped": (lambda state: replace(state, summaries=()), "no account is dropped"),
    "an iteration's account becomes another's": (
        lambda state: replace(state, summaries=(replace(state.summaries[0], incarnation=9),)),
        "no account is dropped",
    ),
    "an open iteration is forgotten": (lambda state: replace(state, iteration=None), "no account is dropped"),
    "a picture outlives its iteration": (
        lambda state: replace(state, iteration=None, seen=Pictures(inferring=Inferring())),
        "pictures are of an open iteration",
    ),
    "a version is evaluated twice": (
        lambda state: replace(state, evaluations=(Evaluation(1, 1, 8, 2, ()), Evaluation(1, 2, 8, 2, ()))),
        "a version is evaluated once",
    ),
    "a command is waited for without a deadline": (without_a_deadline, "a command is waited for until a deadline"),
    "the version went back": (lambda state: replace(state, version=0), "counters only grow"),
    "the incarnation went back": (lambda state: replace(state, incarnation=0), "counters only grow"),
    "a lead is forgotten": (lambda state: with_component(state, Role.ACTOR, lead=None), "counters only grow"),
    "an instance is forgotten": (lambda state: replace(state, instances={}), "counters only grow"),
    "a token went back": (lambda state: with_record(state, token=Token(0, 9)), "tokens only grow"),
    "a GPU is forgotten": (lambda state: replace(state, gpus={}), "tokens only grow"),
    "a submission forgets a GPU of a node that it has": (
        lambda state: replace(state, gpus={}, submission="launcher/9/1"),
        "tokens only grow",
    ),
    "a running job is submitted anew without a submission": (
        lambda state: replace(state, phase=Phase.SUBMITTED),
        "phases follow their order",
    ),
    "a job stops for no end": (lambda state: replace(state, phase=Phase.STOPPING), "phases follow their order"),
}


@pytest.fixture(scope="module")
def state() -> ClusterState:
    return sound()


@pytest.mark.parametrize("case", BROKEN)
def test_a_state_that_breaks_an_invariant_is_found(state: ClusterState, case: str) -> None:
    spoil, want = BROKEN[case]

    assert check(state, state) == []
    assert want in [violation.invariant for violation in check(state, spoil(state))]


def test_a_job_that_ended_stays_as_it_ended() -> None:
    ended = replace(sound(), phase=Phase.FAILED)

    found = check(ended, replace(ended, phase=Phase.FINISHED))

    assert [str(violation) for violation in found] == ["phases follow their order: from failed to finished"]


def test_a_rollout_may_work_with_fewer_engines_than_its_layout_but_not_with_more() -> None:
    state = sound()
    grants = state.components[Role.ROLLOUT].grants

    assert check(state, at_work(state, Role.ROLLOUT, grants=grants[:1])) == []
    more = at_work(state, Role.ROLLOUT, grants=(*grants, Grant(gpu("n9", 0), Token(1, 1))))
    assert [each.invariant for each in check(state, more)] == ["a layout's ranks are its grants"]


def test_only_the_oldest_account_of_a_full_state_makes_room() -> None:
    state = replace(sound(), iteration=None)
    rows = numbered(state, KEPT + 1)
    full = replace(state, summaries=rows[:KEPT])

    assert check(full, replace(full, summaries=rows[1:])) == []
    for left in (rows[2:], (*rows[: KEPT - 1], rows[KEPT])):
        found = check(full, replace(full, summaries=left))
        assert [violation.invariant for violation in found] == ["no account is dropped"]
