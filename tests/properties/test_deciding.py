"""Every policy over histories of an open iteration, with reports in any order, twice and late, with deaths and resizes.

`Drive` checks the state's invariants after every step; here are those of what is proposed and decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.scheduler.decide.proposals import PolicyAnswer, proposal_of
from services.scheduler.decide.turn import turn
from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.components import Absence
from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import JobSpec
from tests import effort
from tests.properties.job_histories import NUM_ITERATIONS, SLOTS, finished, happen
from tests.properties.job_histories import histories as histories_of_jobs
from tests.unit.scheduler.drive import MAX_STEPS, Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, NODES, on_either_node, spec
from tests.unit.scheduler.open_iteration import is_iterating
from tidegate.config.sections.scheduler import POLICIES as POLICY_NAMES
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.order_of_responses import MOST_PLACES
from tidegate.types import GpuId, Role, instance_id

FEW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SECTIONS: dict[str, dict[str, object]] = {
    "static": {"policy": "static"},
    "static in phases": {"policy": "static", "static": {"collocated": True}},
    "rlinf": {"policy": "rlinf", "rlinf": {"max_running_requests": 2}},
    "rlinf that lends": {
        "policy": "rlinf",
        "rlinf": {"max_running_requests": 2, "use_pre_process_policy": True, "use_wait_before_last_iter_policy": False},
    },
    "dynarl": {"policy": "dynarl", "dynarl": {"low_for_s": 1.0}},
    "dynarl with priority": {"policy": "dynarl", "dynarl": {"low_for_s": 1.0, "request_priority": True}},
    "tide": {"policy": "tide"},
}
POLICIES: dict[str, Policy] = {
    name: policy_of(SchedulerSection.model_validate(section)) for name, section in SECTIONS.items()
}
QUICK = ("static", "rlinf that lends", "dynarl with priority", "tide")
"""One of each policy, with all that it may do."""
assert {SECTIONS[name]["policy"] for name in QUICK} == set(POLICY_NAMES), "a policy without properties"
EIGHTHS = 8

report = st.tuples(st.just("tell"), st.integers(0, 3 * (EIGHTHS + 1) - 1))
late = st.tuples(st.just("tell late"), st.integers(0, 3 * (EIGHTHS + 1) - 1))
passing = st.tuples(st.just("later"), st.integers(1, 5))
other = st.tuples(
    st.sampled_from(["deliver", "repeat", "kill worker", "move lead", "lapse", "resize", "restart", "renew"]),
    st.integers(0, 5),
)
EVERY = st.integers(1, NUM_ITERATIONS)
"""Iterations between two evaluations."""
STEPS = st.lists(st.one_of(report, report, report, late, passing, passing, other), min_size=5, max_size=40)


def histories(name: str, steps: list[tuple[str, int]], *, job: JobSpec | None = None) -> Drive:
    """From the opening of a job's first iteration."""
    drive = booted(FakeCluster(job or spec(max_actor_restarts=99, standby=SLOTS[2:])))
    drive.policy = POLICIES[name]
    drive.run_until(is_iterating)
    for what, number in steps:
        if what in ("tell", "tell late"):
            drive.cluster.show(list(Role)[number % 3], eighths=number // 3)
            if what == "tell" and drive.cluster.outbox:
                drive.deliver(drive.cluster.outbox.pop())
        elif what == "later":
            drive.now_ms += 1000 * number
            drive.decide()
        elif what != "deliver" or drive.cluster.outbox:
            happen(drive, what, number)
    return drive


def replayed(drive: Drive, policy: Policy) -> list[tuple[ClusterState, PolicyAnswer]]:
    """What is proposed, and to which state, as another replica sees the same; it decides the same, byte for byte."""
    state, proposed = ClusterState(job=JOB), []
    events: list[ev.Event] = []
    for event, now_ms, want in drive.seen:
        if event is not None:
            events.append(event)
        if want is not None:
            made = turn(state, now_ms, policy, events=events)
            assert repr(made.decision) == repr(want)
            if made.folded.spec is not None:
                proposed.append((made.folded, proposal_of(made.folded, policy, now_ms)))
            state, events = decode_state(encode_state(made.after)), []
    assert encode_state(state) == encode_state(drive.state)
    return proposed


@pytest.mark.parametrize("name", effort.cases(POLICIES, always=QUICK))
@settings(FEW, max_examples=4)
@given(steps=STEPS)
def test_decisions_repeat_byte_for_byte_and_propose_few_moves_to_what_layouts_can_do(
    name: str, steps: list[tuple[str, int]]
) -> None:
    check_history(name, steps)


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@settings(FEW, max_examples=100)
@given(steps=STEPS)
def test_decisions_repeat_and_propose_what_can_be_done_over_many_histories(
    name: str, steps: list[tuple[str, int]]
) -> None:
    check_history(name, steps)


@pytest.mark.parametrize("name", effort.cases(POLICIES, always=QUICK))
@settings(FEW, max_examples=4)
@given(steps=histories_of_jobs(), keeps_state=st.booleans(), every=EVERY)
def test_whatever_happens_a_job_finishes_under_every_policy(
    name: str, steps: list[tuple[str, int]], keeps_state: bool, every: int
) -> None:
    check_job(name, steps, keeps_state=keeps_state, every=every)


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@settings(FEW, max_examples=200)
@given(steps=histories_of_jobs(), keeps_state=st.booleans(), every=EVERY)
def test_a_job_finishes_under_every_policy_over_many_histories(
    name: str, steps: list[tuple[str, int]], keeps_state: bool, every: int
) -> None:
    check_job(name, steps, keeps_state=keeps_state, every=every)


@pytest.mark.parametrize("name", effort.cases(POLICIES, always=QUICK))
@settings(FEW, max_examples=4)
@given(steps=histories_of_jobs(), keeps_state=st.booleans(), every=EVERY)
def test_a_job_whose_dead_stay_dead_finishes_or_fails_with_a_reason_under_every_policy(
    name: str, steps: list[tuple[str, int]], keeps_state: bool, every: int
) -> None:
    check_end(name, steps, keeps_state=keeps_state, every=every)


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@settings(FEW, max_examples=200)
@given(steps=histories_of_jobs(), keeps_state=st.booleans(), every=EVERY)
def test_a_job_whose_dead_stay_dead_ends_under_every_policy_over_many_histories(
    name: str, steps: list[tuple[str, int]], keeps_state: bool, every: int
) -> None:
    check_end(name, steps, keeps_state=keeps_state, every=every)


without_resizes = st.one_of(
    report,
    report,
    late,
    passing,
    st.tuples(st.sampled_from(["deliver", "repeat", "kill worker", "move lead", "lapse", "renew"]), st.integers(0, 5)),
)
PLACING = [name for name in POLICIES if name != "static"]


@pytest.mark.parametrize("name", effort.cases(PLACING, always=QUICK))
@settings(FEW, max_examples=3)
@given(steps=st.lists(without_resizes, max_size=30))
def test_a_job_whose_node_is_lost_for_good_finishes_without_it(name: str, steps: list[tuple[str, int]]) -> None:
    check_without_node(name, steps)


@pytest.mark.long
@pytest.mark.parametrize("name", PLACING)
@settings(FEW, max_examples=100)
@given(steps=st.lists(without_resizes, max_size=30))
def test_jobs_whose_node_is_lost_for_good_finish_over_many_histories(name: str, steps: list[tuple[str, int]]) -> None:
    check_without_node(name, steps)


def check_without_node(name: str, steps: list[tuple[str, int]]) -> None:
    """Each component can have a copy on the other. What is absent stays so, and its time with it, through every event
    and every decision, until the job ends."""
    drive = histories(name, steps, job=on_either_node())
    drive.run_until(lambda state: state.remembered.assignment is not None)
    drive.run_until(lambda _: not drive.cluster.outbox)
    assume(drive.state.phase is Phase.RUNNING)
    drive.cluster.has_supervisor = False
    for role in Role:
        drive.cluster.lapse(instance_id(role, NODES[1]))
        drive.cluster.kill_instance(instance_id(role, NODES[1]), tells=False)
    # Until all three are known to be dead, the others are asked for the gate.
    drive.run_until(lambda _: not drive.cluster.outbox)
    known: Mapping[GpuId, Absence] = {}
    was_long = False
    for _ in range(MAX_STEPS):
        if drive.state.phase in OVER:
            break
        assert drive.step(), drive.last_reason
        absent = {each: it for each, it in drive.state.absent.items() if each.startswith(NODES[1])}
        was_long = was_long or any(it.is_long for it in absent.values())
        if drive.state.phase not in OVER:
            # A transition that was open when the node died may still hand a GPU out, or release it.
            same = {each: it for each, it in known.items() if drive.state.gpus[each].token == it.token}
            assert {each: absent[each].since_ms for each in same} == {each: it.since_ms for each, it in same.items()}
            assert all(absent[each].is_long for each, it in same.items() if it.is_long)
        known = absent
    assert was_long
    drive.run()
    assert drive.state.outcome is Phase.FINISHED, drive.state.message
    assert all(summary.num_lost == summary.num_duplicates == 0 for summary in drive.state.summaries)


def check_end(name: str, steps: list[tuple[str, int]], *, keeps_state: bool, every: int) -> None:
    """It does not stand still; `finished` says so where it does. Who stays dead is seen to be so, by its lease."""
    steps = [("kill instance" if what == "kill instance unseen" else what, number) for what, number in steps]
    policy = POLICIES[name]
    drive = finished(steps, keeps_state=keeps_state, policy=policy, evaluate_every=every, has_supervisor=False)
    assert drive.state.phase in (Phase.FINISHED, Phase.FAILED)
    assert drive.state.message


def check_job(name: str, steps: list[tuple[str, int]], *, keeps_state: bool, every: int) -> None:
    """No sample lost, no GPU kept."""
    drive = finished(steps, keeps_state=keeps_state, policy=POLICIES[name], evaluate_every=every)
    assert drive.state.phase is Phase.FINISHED, drive.state.message
    assert not any(gate.is_held for gate in drive.cluster.gates.values())
    assert not any(record.owner for record in drive.cluster.store.gpus.values())
    lineage = [summary for summary in drive.state.summaries if not summary.is_superseded]
    assert [summary.iteration for summary in lineage] == list(range(NUM_ITERATIONS))
    assert all(summary.num_lost == summary.num_duplicates == 0 for summary in drive.state.summaries)


def check_history(name: str, steps: list[tuple[str, int]]) -> None:
    proposals = replayed(histories(name, steps), POLICIES[name])
    for state, proposed in proposals:
        check_placement(state, proposed)
    check_moves(proposals)


def check_placement(state: ClusterState, proposed: PolicyAnswer) -> None:
    """GPUs that there are, each once, one for each rank; and of the configured layout, or of what a person asked for,
    only the number of copies changes."""
    spec = state.spec
    assert spec is not None
    placement = proposed.proposal.placement
    assert placement.keys() == set(Role)
    counted = Counter(gpu for placed in placement.values() if placed is not None for gpu in placed.gpus)
    assert counted.keys() <= set(spec.gpus)
    assert max(counted.values()) == 1
    for role, placed in placement.items():
        if placed is None:
            continue
        assert placed.layout.num_ranks == len(placed.gpus)
        home = state.home(role)
        assert home is not None
        if placed != state.asked:
            assert replace(placed.layout, dp=home.layout.dp) == home.layout
    assert proposed.proposal.reason
    assert max(Counter(proposed.proposal.group_order).values(), default=0) <= MOST_PLACES


def check_moves(proposals: list[tuple[ClusterState, PolicyAnswer]]) -> None:
    """After each minibatch at most one, one before the first, one home; and that again where a later picture takes a
    report back."""
    assigned: dict[tuple[int, int], list[Assignment]] = {}
    for state, proposed in proposals:
        remembered = proposed.remembered
        if state.iteration is not None and remembered.assignment is not None:
            key = (remembered.incarnation, state.iteration.plan.iteration)
            assigned.setdefault(key, []).append(remembered.assignment)
    most = 2 * (spec().num_minibatches + 2)
    for assignments in assigned.values():
        assert sum(before != after for before, after in pairwise(assignments)) <= most
