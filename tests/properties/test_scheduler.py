"""Whole jobs under whatever may happen: deaths at every step, iterations that fail, leases that lapse, leads that move,
words that come too late, an actor that is resized at any moment, events late, twice and out of order, lost commands.

`Drive` checks the invariants after every single step, and the fake cluster asserts that no GPU is taken back from a
living worker.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.decide.decision import after_decision, decide
from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.losses import MAX_DEATHS
from services.scheduler.policy import Policy
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.values import Placed, total
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, NODES, gpu, spec
from tidegate.ownership.records import Outcome
from tidegate.types import GpuId, Grant, Layout, Role, instance_id

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NUM_ITERATIONS = 2
MAX_BLOWS = 5
MAX_STEPS_ON = 40
"""An undisturbed job takes about twice as many."""

ordinary = st.tuples(
    st.sampled_from(["deliver"] * 6 + ["repeat", "lose commands", "work", "beat", "show"]), st.integers(0, 7)
)
blow = st.tuples(
    st.sampled_from(
        [
            "kill worker",
            "kill instance",
            "kill instance unseen",
            "fail iteration",
            "lapse",
            "move lead",
            "fail late",
            "fail late, fatally",
        ]
    ),
    st.integers(0, 40),
)
SLOTS = (gpu("n0", 0), gpu("n1", 0), gpu("n0", 3), gpu("n1", 4))
PLACES = (
    Placed(SLOTS, Layout(tp=2, dp=2)),
    Placed(SLOTS[1:2], Layout()),
    Placed(SLOTS[2:], Layout(pp=2)),
    Placed(SLOTS[:2], Layout(tp=2)),
    Placed(SLOTS[1::-1], Layout(dp=2)),
    Placed((SLOTS[3], SLOTS[0], SLOTS[1]), Layout(dp=3)),
)
resize = st.tuples(st.sampled_from(["resize"] * 4 + ["fail resize"]), st.integers(0, len(PLACES) - 1))
MAX_RESIZES = 4
on = st.tuples(st.just("run on"), st.integers(0, MAX_STEPS_ON))
rank_death = st.tuples(st.sampled_from(["kill rank", "kill rank, told later"]), st.integers(0, 7))
MAX_RANK_DEATHS = (MAX_DEATHS + 1) // 2
"""Outlived whenever they come: one that is told after a resize failed of it may count twice."""
recovery = st.tuples(st.sampled_from(["restart", "renew"]), st.just(0))


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Events, lost commands and resizes: nobody dies."""
    steps = draw(st.lists(ordinary, max_size=90))
    for _ in range(draw(st.integers(0, MAX_RESIZES))):
        where = draw(st.integers(0, len(steps)))
        steps[where:where] = [draw(on), draw(resize)]
    return steps


@st.composite
def schedules_with_rank_deaths(draw: st.DrawFn) -> list[tuple[str, int]]:
    """And of the actor's ranks, which its lead waits for, in a resize or in none."""
    steps = draw(schedules())
    for _ in range(draw(st.integers(1, MAX_RANK_DEATHS))):
        where = draw(st.integers(0, len(steps)))
        steps[where:where] = [draw(on), draw(rank_death)]
    return steps


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens, in order: mostly events, with resizes and up to `MAX_BLOWS` blows among them."""
    steps = draw(schedules())
    for _ in range(draw(st.integers(0, MAX_BLOWS))):
        where = draw(st.integers(0, len(steps)))
        steps[where:where] = [draw(on), draw(blow)]
        steps.insert(draw(st.integers(where + 2, len(steps))), draw(recovery))
    return steps


def repeatable(drive: Drive) -> list[ev.Event]:
    """What changes nothing when told again, whatever the stream says. A loss is not among it: of one start there may be
    several, with returns between them, and only the stream's sequence tells a repeat from the next."""
    return [event for event in drive.delivered if not isinstance(event.body, ev.InstanceLost)]


def happen(drive: Drive, what: str, number: int) -> None:
    cluster = drive.cluster
    match what:
        case "deliver":
            drive.step(number)
        case "run on":
            # Else few examples come as far as an open iteration.
            for _ in range(number):
                drive.step()
        case "repeat" if told := repeatable(drive):
            drive.deliver(told[-1 - number % len(told)])
        case "lose commands":
            drive.num_losses = 1
        case "work":
            cluster.work()
        case "beat":
            drive.decide()
        case "show":
            cluster.show(list(Role)[number % len(Role)], eighths=number)
        case "kill worker":
            slots = sorted(cluster.gpus)
            cluster.kill_worker(slots[number % len(slots)])
        case "kill rank" | "kill rank, told later" if slots := ranks_waited_for(drive):
            cluster.kill_worker(slots[number % len(slots)])
            if what == "kill rank":
                drive.deliver(cluster.outbox.pop())
        case "kill instance" | "kill instance unseen":
            names = sorted(cluster.instances)
            cluster.kill_instance(names[number % len(names)], tells=what == "kill instance")
        case "fail iteration":
            cluster.fail_iteration(list(Role)[number % len(Role)])
        case "lapse":
            cluster.lapse(sorted(cluster.instances)[number % len(cluster.instances)])
        case "move lead":
            cluster.move_lead(list(Role)[number % len(Role)])
        case "fail late" | "fail late, fatally":
            name = sorted(cluster.instances)[number % len(cluster.instances)]
            cluster.fail_late(name, fatal=what == "fail late, fatally")
        case "resize":
            cluster.say_as("control", ev.ResizeRequested(PLACES[number]))
        case "fail resize":
            cluster.num_failing_resizes = 1
        case "restart":
            cluster.restart_dead()
        case "renew":
            cluster.renew()
        case _:
            pass


def ranks_waited_for(drive: Drive) -> list[GpuId]:
    """Of an actor that is past its start: without one of them there is one left both of those that it has and of those
    that it is to have."""
    state = drive.state
    component, transition = state.components[Role.ACTOR], state.resize()
    if state.phase is not Phase.RUNNING or state.transition_of(Role.ACTOR) != transition:
        return []
    leaving, coming = state.moving(Role.ACTOR, transition) if transition is not None else ((), ())
    has = {grant for grant in component.grants if works(drive.cluster, grant)}
    will_have = {grant for grant in {*has, *coming} - set(leaving) if works(drive.cluster, grant)}
    return sorted(grant.gpu for grant in has | will_have if has - {grant} and will_have - {grant})


def works(cluster: FakeCluster, grant: Grant) -> bool:
    gate = cluster.gates[grant.gpu]
    return gate.is_held and gate.highest == grant.token


def finished(
    steps: list[tuple[str, int]],
    *,
    keeps_state: bool = True,
    policy: Policy | None = None,
    evaluate_every: int = NUM_ITERATIONS,
    has_supervisor: bool = True,
) -> Drive:
    """To the end of the job, by the static policy unless another is given. A job that stands still, with no event to
    come and no timer set, fails here."""
    job = spec(
        num_iterations=NUM_ITERATIONS,
        max_actor_restarts=3 * MAX_BLOWS,
        standby=SLOTS[2:],
        evaluate_every=evaluate_every,
    )
    drive = booted(FakeCluster(job, keeps_state=keeps_state, has_supervisor=has_supervisor))
    drive.policy = policy or drive.policy
    for what, number in steps:
        happen(drive, what, number)
    drive.run()
    return drive


@SLOW
@given(histories(), st.booleans())
def test_whatever_happens_the_job_finishes_and_gives_every_gpu_back(
    steps: list[tuple[str, int]], keeps_state: bool
) -> None:
    drive = finished(steps, keeps_state=keeps_state)

    assert (drive.state.phase, drive.state.message) == (Phase.FINISHED, f"all {NUM_ITERATIONS} iterations are done")
    assert not any(gate.is_held for gate in drive.cluster.gates.values())
    assert not any(record.owner for record in drive.cluster.gpus.values())


@SLOW
@given(histories(), st.booleans())
def test_in_the_final_lineage_every_iteration_is_there_once_and_no_sample_is_lost(
    steps: list[tuple[str, int]], keeps_state: bool
) -> None:
    drive = finished(steps, keeps_state=keeps_state)

    lineage = [summary for summary in drive.state.summaries if not summary.is_superseded]
    assert [summary.iteration for summary in lineage] == list(range(NUM_ITERATIONS))
    for summary in drive.state.summaries:
        accounted = total((summary.trained, *summary.filtered, *summary.discarded))
        assert (accounted.num_samples, accounted.ids_digest) == (
            summary.generated.num_samples,
            summary.generated.ids_digest,
        )
    assert all(summary.trained.num_samples for summary in lineage)
    assert [evaluation.version for evaluation in drive.state.evaluations] == [0, NUM_ITERATIONS]


@SLOW
@given(schedules())
def test_resizes_alone_cost_no_incarnation_no_sample_and_no_failed_start(steps: list[tuple[str, int]]) -> None:
    drive = finished([(what, number) for what, number in steps if what != "lose commands"])

    assert drive.state.incarnation == 1
    assert [summary.is_superseded for summary in drive.state.summaries] == [False] * NUM_ITERATIONS
    assert not any(component.num_failed_starts for component in drive.state.components.values())
    records = drive.cluster.records.values()
    assert sum(record.reason.startswith("start the actor") for record in records) == 1
    resizes = [record for record in records if record.reason.startswith("the actor from")]
    assert all(record.outcome is not Outcome.OPEN for record in resizes)


@SLOW
@given(schedules_with_rank_deaths())
def test_deaths_of_ranks_once_the_first_iteration_is_open_cost_no_incarnation_and_no_sample(
    steps: list[tuple[str, int]],
) -> None:
    drive = finished([(what, number) for what, number in steps if what not in ("lose commands", "fail resize")])

    assert (drive.state.incarnation, drive.state.num_restarts) == (1, 0)
    assert [summary.is_superseded for summary in drive.state.summaries] == [False] * NUM_ITERATIONS
    assert all(summary.num_lost == summary.num_duplicates == 0 for summary in drive.state.summaries)
    assert not any(component.num_failed_starts for component in drive.state.components.values())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_a_replica_that_reads_the_same_history_decides_the_same_byte_for_byte(steps: list[tuple[str, int]]) -> None:
    drive = finished(steps)

    state = ClusterState(job=JOB)
    policy = StaticPolicy()
    for event, now_ms, want in drive.seen:
        if event is not None:
            state = evolve(state, event)
        if want is not None:
            got = decide(state, now_ms, policy=policy)
            assert repr(got) == repr(want)
            state = decode_state(encode_state(after_decision(state, got, now_ms)))
    assert encode_state(state) == encode_state(drive.state)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_each_command_takes_effect_once_under_one_lead(steps: list[tuple[str, int]]) -> None:
    drive = finished(steps)

    assert len(drive.cluster.effects) == len(set(drive.cluster.effects))
    opened = [effect for effect in drive.cluster.effects if "/open/" in effect]
    assert len({effect.rpartition("/a")[0] for effect in opened}) == len(opened)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.randoms(use_true_random=False))
def test_events_of_a_finished_job_told_again_in_any_order_change_nothing(
    steps: list[tuple[str, int]], shuffler: object
) -> None:
    drive = finished(steps)
    state = drive.state

    again = repeatable(drive)
    shuffler.shuffle(again)  # type: ignore[attr-defined]  # hypothesis's own Random, seeded by the example
    for event in again:
        state = evolve(state, event)

    assert (state.phase, state.version, state.summaries) == (
        drive.state.phase,
        drive.state.version,
        drive.state.summaries,
    )


def test_every_instance_may_die_at_every_step_of_a_job() -> None:
    names = [instance_id(role, node) for role in Role for node in NODES]
    num_steps = len(finished([]).delivered)
    for name in names:
        for at_step in range(0, num_steps, 4):
            number = sorted(names).index(name)
            steps = [("deliver", 0)] * at_step + [("kill instance", number)]
            assert finished(steps).state.phase is Phase.FINISHED, f"{name} died at step {at_step}"
