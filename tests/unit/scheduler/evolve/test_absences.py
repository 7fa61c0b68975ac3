"""The state knows since when a GPU is absent, until an event ends the absence. A job continues without a lost node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.policy_view import situation_of
from services.scheduler.evolve.absences import LONG_MS, noted, still
from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Absence, Instance
from services.scheduler.state.invariants import check
from services.scheduler.state.issued import Expectation, Kind
from services.scheduler.state.remembered import Remembered, as_configured
from services.scheduler.state.values import Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, NODES, gpu, on_either_node, spec
from tests.unit.scheduler.open_iteration import is_iterating
from tidegate.ownership.records import GpuRecord, GpuState, Owner
from tidegate.types import Grant, InstanceId, Layout, Role, Token, instance_id

N0, N1 = NODES
POLICIES: dict[str, Policy] = {
    "rlinf": RLinfPolicy(RLinfRules(2, auto_scheduler=True)),
    "rlinf that lends": RLinfPolicy(RLinfRules(2, auto_scheduler=True, use_pre_process_policy=True)),
    "dynarl": DynaRLPolicy(DynaRLRules(low_for_s=1.0)),
    "tide": TidePolicy(),
}
LOST_GPU, FREE_GPU = gpu("n1", 1), gpu("n1", 3)
TOKEN = Token(1, 5)


def placed(*, alive: tuple[str, ...] = ("rollout@n0",)) -> ClusterState:
    """A job whose policy has placed GPUs. No instance lives on n1, where one GPU is lost and one is free."""
    job = on_either_node()
    records = {each: GpuRecord(each, GpuState.OWNED, Owner(JOB, Role.ACTOR), TOKEN, None) for each in job.gpus}
    records[LOST_GPU] = GpuRecord(LOST_GPU, GpuState.LOST, Owner(JOB, Role.ROLLOUT), TOKEN, None)
    records[FREE_GPU] = GpuRecord(FREE_GPU, GpuState.FREE, None, TOKEN, None)
    instances = {InstanceId("rollout@n1"): Instance("at", 1, living=False)}
    instances |= {InstanceId(name): Instance("at", 1, living=True) for name in alive}
    return ClusterState(
        job=JOB,
        phase=Phase.RUNNING,
        spec=job,
        gpus=records,
        instances=instances,
        remembered=Remembered(assignment=as_configured(job)),
    )


def test_a_lost_gpu_and_a_free_gpu_of_a_node_without_instances_are_absent_since_a_decision_noted_them() -> None:
    first = noted(placed(), 1_000)
    assert first.absent == {LOST_GPU: Absence(TOKEN, 1_000), FREE_GPU: Absence(TOKEN, 1_000)}
    assert noted(first, 1_000) is first
    assert noted(first, 999 + LONG_MS) is first
    late = noted(first, 1_000 + LONG_MS)
    assert late.absent[LOST_GPU] == Absence(TOKEN, 1_000, is_long=True)
    assert decode_state(encode_state(late)) == late


def test_an_absence_that_is_long_stays_long_when_the_clock_steps_back() -> None:
    late = noted(noted(placed(), 1_000), 1_000 + LONG_MS)
    assert noted(late, 999 + LONG_MS) is late
    new_token = replace(late.gpus[LOST_GPU], token=Token(1, 6))
    anew = noted(replace(late, gpus={**late.gpus, LOST_GPU: new_token}), 2_000 + LONG_MS)
    assert anew.absent[LOST_GPU] == Absence(Token(1, 6), 2_000 + LONG_MS)


def test_a_decision_is_due_when_an_absence_is_long_and_then_no_more() -> None:
    first = noted(placed(), 1_000)
    assert next_due_ms(first) == 1_000 + LONG_MS
    assert next_due_ms(noted(first, 1_000 + LONG_MS)) is None


def test_neither_an_open_question_nor_its_answer_changes_an_absence() -> None:
    """The absence stays while the question is open, after its end, and while it is repeated."""
    key = f"{JOB}/{LOST_GPU}/{TOKEN}/gate"
    what = f"the gate of {LOST_GPU}"
    gate = Expectation(key, Kind.GATE, what, Role.ROLLOUT, 1, 16, 0, issued_ms=1_000, due_ms=1_000, refusal="")
    want = {LOST_GPU: Absence(TOKEN, 1_000), FREE_GPU: Absence(TOKEN, 1_000)}
    open_question = noted(replace(placed(), expectations={key: gate}), 1_000)
    assert open_question.absent == want
    no_question = still(replace(open_question, expectations={}), open_question)
    assert no_question.absent == want
    repeated = still(replace(no_question, expectations={key: replace(gate, num_issued=1)}), no_question)
    late = noted(repeated, 1_000 + LONG_MS)
    assert late.absent == {each: Absence(TOKEN, 1_000, is_long=True) for each in want}


CHANGES = {
    "the gate reports that nobody holds it": lambda state: replace(state, released=(Grant(LOST_GPU, TOKEN),)),
    "the store gives it out again": lambda state: replace(
        state, gpus={**state.gpus, LOST_GPU: replace(state.gpus[LOST_GPU], token=Token(1, 6))}
    ),
    "the job ends": lambda state: replace(state, phase=Phase.STOPPING, outcome=Phase.CANCELLED),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_absence_ends_when_the_gpu_is_released_or_given_out_or_the_job_ends(name: str) -> None:
    late = noted(noted(placed(), 1_000), 1_000 + LONG_MS)
    changed = CHANGES[name](late)
    assert LOST_GPU not in still(changed, late).absent
    assert check(late, changed), "a state that keeps an absence after its end breaks an invariant"


def with_n1(state: ClusterState, *, living: bool) -> ClusterState:
    changed = {**state.instances, InstanceId("actor@n1"): Instance("at", 2, living=living)}
    return still(replace(state, instances=changed), state)


def test_the_wait_for_a_lost_gpu_begins_anew_once_when_an_instance_joins_on_its_node() -> None:
    late = noted(noted(placed(), 1_000), 1_000 + LONG_MS)
    joined = with_n1(late, living=True)
    assert joined.absent == {LOST_GPU: Absence(TOKEN, None, is_anew=True)}
    assert not check(late, joined)
    assert next_due_ms(joined) is None
    assert decode_state(encode_state(joined)) == joined
    state, since_ms = noted(joined, 2_000 + LONG_MS), 2_000 + LONG_MS
    assert state.absent == {LOST_GPU: Absence(TOKEN, since_ms, is_anew=True)}
    for again_ms in range(since_ms, since_ms + LONG_MS, LONG_MS // 4):
        state = noted(with_n1(with_n1(state, living=False), living=True), again_ms)
        assert not state.absent[LOST_GPU].is_long
    state = noted(state, since_ms + LONG_MS)
    assert state.absent == {LOST_GPU: Absence(TOKEN, since_ms, is_long=True, is_anew=True)}
    assert with_n1(with_n1(state, living=False), living=True).absent == state.absent


def test_an_absence_that_begins_earlier_than_in_the_state_before_breaks_an_invariant() -> None:
    state = noted(placed(), 1_000)
    assert not check(state, state)
    earlier = replace(state, absent={**state.absent, LOST_GPU: Absence(TOKEN, 7)})
    assert [each.invariant for each in check(state, earlier)] == ["what is absent cannot be had"]


def test_before_the_first_choice_and_after_the_job_nothing_is_absent() -> None:
    assert not noted(replace(placed(), remembered=Remembered()), 1_000).absent
    assert not noted(replace(placed(), phase=Phase.STOPPING, outcome=Phase.FINISHED), 1_000).absent
    assert FREE_GPU not in noted(placed(alive=("rollout@n0", "inference@n1")), 1_000).absent


def lost_node(name: str, *, supervised: bool = False) -> Drive:
    """All instances of n1 die in the first iteration, after the policy's first choice."""
    drive = booted(FakeCluster(on_either_node(), has_supervisor=supervised))
    drive.policy = POLICIES[name]
    drive.run_until(lambda state: is_iterating(state) and state.remembered.assignment is not None)
    drive.run_until(lambda _: not drive.cluster.outbox)
    for role in Role:
        drive.cluster.kill_instance(instance_id(role, N1), tells=True)
    return drive


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_continues_without_a_node_that_is_lost_for_good(name: str) -> None:
    drive = lost_node(name)
    died_ms = drive.now_ms
    opened = drive.run_until(lambda state: state.incarnation == 2 and is_iterating(state))
    assert drive.now_ms - died_ms <= LONG_MS + 5_000
    assert {each.gpu for each in opened.components[Role.ACTOR].grants} == {gpu("n0", 0)}
    ended = drive.run()
    assert ended.phase is Phase.FINISHED, ended.message
    assert all(summary.num_lost == summary.num_duplicates == 0 for summary in ended.summaries)
    lineage = [summary.iteration for summary in ended.summaries if not summary.is_superseded]
    assert lineage == list(range(on_either_node().num_iterations))


@pytest.mark.parametrize("name", POLICIES)
def test_an_actor_whose_only_node_is_lost_for_good_continues_on_its_standby_gpus(name: str) -> None:
    placement = {
        Role.ACTOR: Placed((gpu("n1", 0),), Layout()),
        Role.ROLLOUT: Placed((gpu("n0", 1),), Layout()),
        Role.INFERENCE: Placed((gpu("n0", 2),), Layout()),
    }
    job = replace(spec(max_actor_restarts=99, standby=(gpu("n0", 3),)), placement=placement)
    drive = booted(FakeCluster(job, has_supervisor=False))
    drive.policy = POLICIES[name]
    drive.run_until(lambda state: is_iterating(state) and state.remembered.assignment is not None)
    drive.run_until(lambda _: not drive.cluster.outbox)
    for role in Role:
        drive.cluster.kill_instance(instance_id(role, N1), tells=True)
    opened = drive.run_until(lambda state: state.incarnation == 2 and is_iterating(state))
    assert {each.gpu for each in opened.components[Role.ACTOR].grants} <= {gpu("n0", 3)}
    ended = drive.run()
    assert ended.phase is Phase.FINISHED, ended.message


def test_under_the_static_policy_a_node_that_is_lost_for_good_ends_the_job() -> None:
    drive = booted(FakeCluster(on_either_node(), has_supervisor=False))
    drive.policy = StaticPolicy()
    drive.run_until(is_iterating)
    for role in Role:
        drive.cluster.kill_instance(instance_id(role, N1), tells=True)
    ended = drive.run()
    assert ended.phase is Phase.FAILED
    assert "waited 3 s for an instance on n1, whose gate must tell of lost GPUs" in ended.message


@pytest.mark.parametrize("name", POLICIES)
def test_gpus_of_a_node_that_comes_back_are_given_to_components_again(name: str) -> None:
    drive = lost_node(name)
    drive.run_until(lambda state: state.incarnation == 2 and is_iterating(state))
    assert {each.is_long for each in drive.state.absent.values()} == {True}
    for role in Role:
        drive.cluster.start(instance_id(role, N1))
    drive.run_until(
        lambda state: not state.absent and not any(record.state is GpuState.LOST for record in state.gpus.values())
    )
    drive.run_until(
        lambda state: any(
            grant.gpu in state.gpus and grant.gpu.startswith("n1")
            for each in state.components.values()
            for grant in each.grants
        )
    )
    assert drive.run().phase is Phase.FINISHED


def test_a_policy_does_not_get_a_free_gpu_of_a_node_without_instances() -> None:
    drive = lost_node("dynarl")
    drive.run_until(lambda state: bool(state.absent) and state.incarnation == 2 and is_iterating(state))
    state = drive.state
    freed = replace(state.gpus[FREE_GPU], state=GpuState.FREE, owner=None)
    state = noted(replace(state, gpus={**state.gpus, FREE_GPU: freed}), drive.now_ms)
    situation = situation_of(state, drive.now_ms)
    assert situation is not None
    assert FREE_GPU in state.absent
    assert FREE_GPU not in situation.free
    alive = replace(state, absent={})
    assert (after := situation_of(alive, drive.now_ms)) is not None
    assert FREE_GPU in after.free
