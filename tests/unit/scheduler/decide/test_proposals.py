"""A policy is asked while an iteration is open and reported; else all components stay, and its memory is kept.

The job of the fake cluster: actor on n0/0 and n1/0 (dp 2), rollout on n0/1, n1/1 and n1/3, inference on n0/2 and n1/2
(tp 2); 4 prompts of 2 sequences in 2 minibatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.proposals import answer_of, placement_of, proposal_of
from services.scheduler.decide.turn import turn
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.layouts import replicas
from services.scheduler.state.observed import QUEUED, Inferring, Pictures, Training
from services.scheduler.state.remembered import Assignment, PolicyMemory, Remembered, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.fake_parts import gpu, spec
from tests.unit.scheduler.open_iteration import iterating
from tests.unit.scheduler.situations import generation, gpus, job, seen
from tidegate.types import GpuId, Layout, Role

HOME = spec().placement
LENT = Assignment(replicas((gpu("n0", 0), gpu("n1", 0), *HOME[Role.ROLLOUT].gpus), 1), None, ())
ALL_ROLLOUT = {Role.ACTOR: None, Role.ROLLOUT: Placed(LENT.gpus, Layout(dp=5)), Role.INFERENCE: None}
PRE = RLinfPolicy(RLinfRules(max_running_requests=8, auto_scheduler=True, use_pre_process_policy=True))


@dataclass(frozen=True, slots=True)
class Kept(PolicyMemory):
    number: int


KEPT = Kept(7)


@dataclass(frozen=True, slots=True)
class Asking:
    """A policy that gives all GPUs to the rollout, and asks to be asked again."""

    ask_at_ms: int | None = None

    def check(self, spec: JobSpec) -> None:
        """Every job will do."""

    def choose(self, situation: Situation) -> Choice:
        return Choice(LENT, trains=False, reason="asking", memory=KEPT, ask_at_ms=self.ask_at_ms)


def with_pictures(state: ClusterState) -> ClusterState:
    """A state in which all components have reported the open iteration, and nothing is generated yet."""
    job = state.spec
    assert job is not None
    size = job.num_prompts * job.group_size
    engines = tuple((each,) for each in job.placement[Role.ROLLOUT].gpus)
    picture = generation(job, engines, lengths=(0,) * size, places=(QUEUED,) * size)
    return replace(state, seen=Pictures(picture, Inferring(), Training()))


def running() -> ClusterState:
    return with_pictures(iterating().state)


def test_a_choice_becomes_each_components_gpus_and_layout() -> None:
    job_spec = job(actor=2, rollout=4, inference=4, rollout_tp=2, prompts=8, minibatches=2)
    assignment = Assignment((gpus(4, 6), gpus(0, 2)), Placed(gpus(6, 8), Layout(dp=2)), gpus(8, 9))
    assert placement_of(job_spec, assignment) == {
        Role.ACTOR: Placed(gpus(6, 8), Layout(dp=2)),
        Role.ROLLOUT: Placed((*gpus(4, 6), *gpus(0, 2)), Layout(tp=2, dp=2)),
        Role.INFERENCE: Placed(gpus(8, 9), Layout(dp=1)),
    }


def test_a_component_without_gpus_is_proposed_without_a_placement() -> None:
    assert placement_of(spec(), LENT) == ALL_ROLLOUT


def test_the_configured_assignment_is_the_configured_placement() -> None:
    assert placement_of(spec(), as_configured(spec())) == HOME


def test_each_policy_proposes_what_it_chooses() -> None:
    job_spec = job(actor=2, rollout=4, inference=2, prompts=8, minibatches=2)
    situation = seen(job_spec, as_configured(job_spec), num_unfinished=8, num_unsubmitted=8, remembered=Remembered())
    static = answer_of(StaticPolicy(), situation)
    assert (static.proposal.placement, static.proposal.trains) == (job_spec.placement, True)
    assert static.remembered == Remembered()
    rlinf = answer_of(PRE, situation)
    assert rlinf.proposal.placement[Role.ROLLOUT] == Placed(gpus(0, 6), Layout(dp=6))
    assert rlinf.proposal.placement[Role.ACTOR] is None
    assert (rlinf.proposal.trains, rlinf.remembered.trains) == (False, False)
    dynarl = answer_of(DynaRLPolicy(DynaRLRules(request_priority=True)), situation)
    assert dynarl.proposal.placement[Role.ROLLOUT] == Placed((*gpus(2, 6), *gpus(0, 2), *gpus(6, 8)), Layout(dp=8))
    assert (dynarl.proposal.placement[Role.INFERENCE], dynarl.proposal.trains) == (None, False)
    assert dynarl.proposal.group_order == tuple(range(8))
    assert all(each.proposal.reason.startswith(name) for name, each in [("rlinf", rlinf), ("dynarl", dynarl)])


@dataclass(frozen=True, slots=True)
class Growing:
    """A policy that places the trainer on so many GPUs, and lets it train."""

    num_gpus: int

    def check(self, spec: JobSpec) -> None:
        """Every job will do."""

    def choose(self, situation: Situation) -> Choice:
        trainer = Placed(gpus(0, self.num_gpus), Layout(dp=self.num_gpus))
        return Choice(Assignment((), trainer, ()), trains=True, reason="growing")


@pytest.mark.parametrize(("num_gpus", "want"), [(2, True), (4, False)])
def test_a_trainer_that_is_to_change_begins_no_minibatch_before_it_has_changed(num_gpus: int, want: bool) -> None:
    job_spec = job(actor=2, rollout=4, inference=2, prompts=8, minibatches=2)
    got = answer_of(Growing(num_gpus), seen(job_spec, as_configured(job_spec)))
    assert (got.proposal.trains, got.remembered.trains) == (want, want)


@pytest.mark.parametrize(("closed", "want"), [(gpus(2, 4), True), (gpus(0, 2), False), (gpus(4, 8), False)])
def test_a_trainer_whose_change_waits_for_an_instance_trains_where_it_is(closed: tuple[GpuId, ...], want: bool) -> None:
    job_spec = job(actor=2, rollout=4, inference=2, prompts=8, minibatches=2)
    situation = seen(job_spec, as_configured(job_spec))
    assert answer_of(Growing(4), situation, closed_to_trainer=lambda: frozenset(closed)).proposal.trains is want


BACK: dict[str, tuple[dict[str, Any], Assignment, str]] = {
    "sequences and no engine": (
        {"num_unfinished": 3, "num_unsubmitted": 3},
        Assignment((), Placed(gpus(0, 2), Layout(dp=2)), gpus(6, 8)),
        "3 sequences are unfinished and nobody has a GPU for them: all components return home instead of: forgetful",
    ),
    "groups to infer and no inference": (
        {"ready": (0, 2)},
        Assignment((), Placed(gpus(0, 2), Layout(dp=2)), ()),
        "6 groups are not inferred and nobody has a GPU for them: all components return home instead of: forgetful",
    ),
    "minibatches and no trainer": (
        {"num_done": 1},
        Assignment(replicas(gpus(2, 6), 1), None, gpus(6, 8)),
        "1 minibatches are not trained and nobody has a GPU for them: all components return home instead of: forgetful",
    ),
}


@dataclass(frozen=True, slots=True)
class Forgetful:
    """A policy that always chooses the same assignment, whatever work there is."""

    assignment: Assignment

    def check(self, spec: JobSpec) -> None:
        """Every job will do."""

    def choose(self, situation: Situation) -> Choice:
        return Choice(self.assignment, trains=True, reason="forgetful")


@pytest.mark.parametrize("name", BACK)
def test_work_that_a_policy_forgot_gets_its_own_gpus_back(name: str) -> None:
    fields, assignment, want = BACK[name]
    job_spec = job(actor=2, rollout=4, inference=2, prompts=8, minibatches=2)
    got = answer_of(Forgetful(assignment), seen(job_spec, as_configured(job_spec), **fields))
    assert (got.proposal.placement, got.proposal.reason) == (job_spec.placement, want)
    assert got.remembered.assignment == as_configured(job_spec), "its policy goes on from there"


def test_a_component_without_work_needs_no_gpus_and_gpus_on_their_way_are_waited_for() -> None:
    job_spec = job(actor=2, rollout=4, inference=2, prompts=8, minibatches=2)
    nobody = Forgetful(Assignment((), None, ()))
    done = seen(job_spec, as_configured(job_spec), num_done=2, num_taken=8)
    assert set(answer_of(nobody, done).proposal.placement.values()) == {None}
    engines = Assignment(replicas(gpus(2, 5), 1), None, ())
    moving = seen(job_spec, engines, num_unfinished=3, moving=gpus(5, 6))
    assert answer_of(nobody, moving).proposal.reason == "forgetful"


def test_the_policy_of_a_running_job_is_asked_with_the_last_pictures() -> None:
    state = running()
    got = proposal_of(state, Asking(ask_at_ms=2_000_000), 1_000_000)
    assert got.proposal.placement == ALL_ROLLOUT
    assert (got.proposal.reason, got.ask_at_ms, got.remembered.own) == ("asking", 2_000_000, KEPT)


@pytest.mark.parametrize("ask_at_ms", [None, 999_999, 1_000_000])
def test_a_policy_is_not_asked_again_at_a_time_that_has_passed(ask_at_ms: int | None) -> None:
    """A time that has passed would have the policy asked again at once, without end."""
    assert proposal_of(running(), Asking(ask_at_ms), 1_000_000).ask_at_ms is None


def without_ranks(state: ClusterState) -> ClusterState:
    actor = state.components[Role.ACTOR].with_grants(state.components[Role.ACTOR].grants[:1])
    return replace(state, components={**state.components, Role.ACTOR: actor})


NOT_ASKED: dict[str, tuple[Callable[[ClusterState], ClusterState], str]] = {
    "a job that starts": (lambda state: replace(state, phase=Phase.STARTING), "the job is starting"),
    "a job that stops": (lambda state: replace(state, phase=Phase.STOPPING), "the job is stopping"),
    "a paused job": (lambda state: replace(state, phase=Phase.PAUSED), "the job is paused"),
    "no open iteration": (lambda state: replace(state, iteration=None), "no iteration is open"),
    "no picture": (lambda state: replace(state, seen=Pictures()), "not every component has reported the iteration yet"),
    "an actor that lost a rank": (without_ranks, "the actor waits for ranks that it lost"),
}


@pytest.mark.parametrize("name", NOT_ASKED)
def test_where_the_policy_is_not_asked_every_component_is_at_home(name: str) -> None:
    change, want = NOT_ASKED[name]
    state = replace(change(running()), remembered=Remembered(iteration=7, assignment=LENT, trains=False))
    got = proposal_of(state, Asking(ask_at_ms=2_000_000), 1_000_000)
    assert (got.proposal.placement, got.proposal.trains) == (HOME, True)
    assert (got.remembered, got.ask_at_ms) == (state.remembered, None)
    assert got.proposal.reason == f"{want}: the placement stays or returns to (actor 2, rollout 3, inference 2)"


def test_while_the_policy_is_not_asked_every_component_stays_where_the_policy_put_it_in_this_iteration() -> None:
    state = running()
    assert state.iteration is not None
    remembered = Remembered(state.incarnation, state.iteration.plan.iteration, LENT, trains=False)
    paused = replace(state, phase=Phase.PAUSED, remembered=remembered)
    got = proposal_of(paused, Asking(), 1_000_000)
    assert (got.proposal.placement, got.proposal.trains) == (ALL_ROLLOUT, False)
    restarted = replace(paused, remembered=replace(remembered, incarnation=state.incarnation - 1))
    assert proposal_of(restarted, Asking(), 1_000_000).proposal.placement == HOME


def test_a_component_without_gpus_whose_lead_is_new_gets_some_and_the_others_go_home() -> None:
    state = running()
    assert state.iteration is not None
    remembered = Remembered(state.incarnation, state.iteration.plan.iteration, LENT, trains=False)
    silent = replace(state, remembered=remembered, seen=replace(state.seen, generation=None))
    assert proposal_of(silent, Asking(), 1_000_000).proposal.placement == ALL_ROLLOUT
    mute = replace(silent, seen=replace(silent.seen, inferring=None))
    got = proposal_of(mute, Asking(), 1_000_000)
    assert (got.proposal.placement, got.proposal.trains) == (HOME, True)


def test_a_manual_move_overrides_the_policy_and_other_components_go_home() -> None:
    state = running()
    assert state.iteration is not None
    asked = Placed((gpu("n1", 0),), Layout())
    remembered = Remembered(state.incarnation, state.iteration.plan.iteration, LENT, trains=False)
    got = proposal_of(replace(state, asked=asked, remembered=remembered), Asking(), 1_000_000)
    assert got.proposal.placement == {**HOME, Role.ACTOR: asked}
    assert got.proposal.trains, "the trainer goes on where a person wants it"
    assert got.remembered == remembered


def test_where_a_person_moved_the_actor_is_its_place_for_every_policy() -> None:
    moved = Placed((gpu("n1", 0),), Layout())
    state = replace(running(), moved=moved)
    for policy in (StaticPolicy(), RLinfPolicy(RLinfRules(max_running_requests=8))):
        assert proposal_of(state, policy, 1_000_000).proposal.placement == {**HOME, Role.ACTOR: moved}


def test_a_policys_memory_is_written_with_its_decision_and_is_no_structural_change() -> None:
    state = running()
    made = turn(state, 1_000_000, Asking(ask_at_ms=1_000_500))
    after = made.after
    assert (after.remembered.assignment, after.remembered.trains) == (LENT, False)
    assert (after.ask_at_ms, next_due_ms(after)) == (1_000_500, 1_000_500)
    assert after.version == state.version
    assert "asking" in made.decided.reason


def test_a_policy_that_names_no_time_is_not_asked_at_its_earlier_one() -> None:
    state = replace(running(), ask_at_ms=1_000_000)
    assert turn(state, 1_000_000, Asking()).after.ask_at_ms is None
