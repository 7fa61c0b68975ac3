"""The fold of single events: a refused event changes nothing but the count of its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from services.scheduler.evolve.fold import evolve
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.observed import Generation, Inferring, Training
from services.scheduler.state.values import Fate, Placed, Snapshot
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, NODES, gpu, spec
from tidegate.types import Grant, InstanceId, Layout, Role, Token, instance_id

ACTOR = instance_id(Role.ACTOR, NODES[0])
OTHER_ACTOR = instance_id(Role.ACTOR, NODES[1])
ROLLOUT = instance_id(Role.ROLLOUT, NODES[0])
OLD = (Grant(gpu("n0", 1), Token(1, 0)),)
BROKEN = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "a late message", fatal=False)
REPORT = ev.IterationReported(Fate(num_samples=8), Fate(), (), (), 0, ())


def iterating() -> Drive:
    """A job whose incarnation, boots and epochs are above 1, so that events can have older ones."""
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    drive.cluster.kill_instance(ACTOR, tells=True)
    drive.cluster.kill_instance(ROLLOUT, tells=True)
    drive.cluster.restart_dead()
    drive.run_until(lambda state: is_iterating(state) and state.incarnation == 2)
    while drive.cluster.outbox:
        drive.step()
    return drive


def is_iterating(state: ClusterState) -> bool:
    return state.iteration is not None and len(state.iteration.opened) == len(Role)


def event_of(source: str, body: ev.Body, **fields: object) -> ev.Event:
    event = ev.Event(job=JOB, source=source, boot=9, sequence=1, body=body, incarnation=2)
    return replace(event, **fields)  # type: ignore[arg-type]  # the cases name their fields


SNAPSHOT = Snapshot(2, 0, "files-0", "sum-0", b"")
REFUSED: dict[str, tuple[ev.Event, str]] = {
    "an event of another job": (event_of("control", ev.JobCancelRequested(""), job="other"), "of another job"),
    "an event of an older start of its instance": (
        event_of(ACTOR, ev.InstanceJoined(ACTOR, "x", 1), boot=1),
        "of an older start of its source",
    ),
    "an older start that another source reports": (
        event_of("scheduler", ev.InstanceJoined(ACTOR, "x", 1)),
        "of an older start of its source",
    ),
    "a lease that expired for an older start": (
        event_of("scheduler", ev.InstanceLost(ACTOR, 1)),
        "of an older start of its source",
    ),
    "an election before the present one": (
        event_of(OTHER_ACTOR, ev.LeadElected(OTHER_ACTOR, "x", 1), boot=1, sequence=50),
        "of an older lead epoch",
    ),
    "a report of an older incarnation": (
        event_of(OTHER_ACTOR, REPORT, boot=1, sequence=50, incarnation=1),
        "of an older incarnation",
    ),
    "a report of a later incarnation": (
        event_of(OTHER_ACTOR, REPORT, boot=1, sequence=50, incarnation=3),
        "of a later incarnation",
    ),
    "a report of an instance that does not lead": (
        event_of(ACTOR, REPORT, boot=2, sequence=50),
        "not of the component's lead",
    ),
    "a report of an iteration that is not open": (
        event_of(OTHER_ACTOR, REPORT, boot=1, sequence=50, iteration=1),
        "of an iteration that is not open",
    ),
    "a worker's failure under an older token than the present one": (
        event_of(
            instance_id(Role.ROLLOUT, NODES[1]),
            ev.Failed(ev.FailedWhat.WORKER, OLD, -9, "killed", False),
            boot=1,
            sequence=50,
        ),
        "under old tokens",
    ),
    "a whole component's failure of an older incarnation": (
        event_of(OTHER_ACTOR, BROKEN, boot=1, sequence=50, incarnation=1),
        "of an older incarnation",
    ),
    "a whole component's failure reported by an instance that does not lead it": (
        event_of(ROLLOUT, BROKEN, boot=2, sequence=50),
        "not of the component's lead",
    ),
    "a fatal failure reported by an instance that does not lead": (
        event_of(ACTOR, replace(BROKEN, fatal=True), boot=2, sequence=50),
        "not of the component's lead",
    ),
    "a fatal failure of an older incarnation": (
        event_of(OTHER_ACTOR, replace(BROKEN, fatal=True), boot=1, sequence=50, incarnation=1),
        "of an older incarnation",
    ),
    "a fatal failure of a source that is no component": (
        event_of("control", replace(BROKEN, fatal=True)),
        "failed without a component",
    ),
    "an event that acted under old tokens": (
        event_of(instance_id(Role.ROLLOUT, NODES[1]), ev.WeightsLoaded(0, "files-0"), boot=1, sequence=50, grants=OLD),
        "under old tokens",
    ),
    "a release of GPUs that the component does not have any more": (
        event_of(instance_id(Role.ROLLOUT, NODES[1]), ev.GpusReleased(OLD), boot=1, sequence=50),
        "under old tokens",
    ),
    "a layout of a transition that is closed": (
        event_of(
            OTHER_ACTOR,
            ev.LayoutCommitted(Layout(dp=2), OLD, 0),
            boot=1,
            sequence=50,
            transition_id="tide/1/t1",
        ),
        "of a transition that is not open",
    ),
    "weights of an older incarnation": (
        event_of(OTHER_ACTOR, ev.WeightsPublished(replace(SNAPSHOT, incarnation=1), None), boot=1, sequence=50),
        "of an older incarnation",
    ),
    "a load of weights that were never published": (
        event_of(instance_id(Role.ROLLOUT, NODES[1]), ev.WeightsLoaded(5, "sum-5"), boot=1, sequence=50),
        "of a version that is not published",
    ),
    "a gate's report without a question": (
        event_of("scheduler", ev.GateReported(NODES[0], (ev.GateState(gpu("n0", 1), Token(1, 1), False),))),
        "of GPUs that nobody asked about",
    ),
    "an answer to a command that is not waited for": (
        event_of("scheduler", ev.CommandAnswered("tide/1/x/a0", True, "")),
        "answers a command that is not waited for",
    ),
    "a second submission": (event_of("launcher", ev.JobSubmitted(spec(), "{}", False)), "the job exists"),
    "a resume of a job that is not paused": (event_of("control", ev.JobResumeRequested()), "the job is not paused"),
}


@pytest.fixture(scope="module")
def running() -> ClusterState:
    return iterating().state


@pytest.mark.parametrize("case", REFUSED)
def test_an_event_that_is_refused_changes_only_the_count_of_refusals(running: ClusterState, case: str) -> None:
    event, want = REFUSED[case]

    after = evolve(running, event)

    assert after.ignored.get(want, 0) == running.ignored.get(want, 0) + 1, after.ignored
    assert replace(after, ignored=running.ignored, clocks=running.clocks) == running


EVERY_KIND: tuple[ev.Body, ...] = (
    ev.Progress((), 1, 2, "train"),
    ev.Backlog("scored", 5),
    ev.GpusReleased(OLD),
    ev.GpusAcquired(OLD),
    ev.LayoutCommitted(Layout(dp=2), OLD, 0),
    BROKEN,
    ev.InstanceJoined(InstanceId("actor@n7"), "x", 1),
    ev.InstanceLost(InstanceId("actor@n7"), 1),
    ev.LeadElected(InstanceId("actor@n7"), "x", 9),
    ev.WeightsPublished(SNAPSHOT, None),
    ev.WeightsLoaded(0, "files-0"),
    REPORT,
    ev.EvaluationReported(0, 8, 2, ()),
    ev.CheckpointSaved(2, 2, "c2", 9),
    ev.DeadLettered("samples.tide", "not a group", 7),
    ev.JobSubmitted(spec(), "{}", resume=True),
    ev.JobCancelRequested("enough"),
    ev.JobResumeRequested(),
    ev.ResizeRequested(Placed((gpu("n7", 0),), Layout())),
    ev.ResizeFailed("no memory"),
    ev.SplitRequested({role: Placed((gpu("n7", index),), Layout()) for index, role in enumerate(Role)}),
    ev.DrainRequested((gpu("n0", 0),), is_undone=False),
    ev.GateReported(NODES[0], (ev.GateState(gpu("n7", 0), Token(1, 1), held=True),)),
    ev.CommandAnswered("tide/1/x/a0", accepted=False, message="not ready"),
    ev.OwnershipObserved((), ()),
    Generation((), 2, (), ()),
    Inferring((0,)),
    Training(1, 1),
)


@pytest.mark.parametrize("body", EVERY_KIND, ids=lambda body: type(body).__name__)
def test_every_kind_of_event_folds_without_an_error_into_a_new_a_running_and_an_ending_state(
    running: ClusterState, body: ev.Body
) -> None:
    ending = evolve(running, event_of("control", ev.JobCancelRequested("enough")))
    for state in (ClusterState(job=JOB), running, ending):
        for source in ("control", ACTOR, OTHER_ACTOR, ROLLOUT, "actor@n7"):
            for incarnation in (0, 1, 2, 3):
                event = event_of(
                    source, body, sequence=70, incarnation=incarnation, grants=OLD, transition_id="tide/1/t1"
                )
                assert evolve(state, event).job == JOB


def test_the_kinds_of_events_above_are_all_there_are() -> None:
    assert {type(body) for body in EVERY_KIND} == set(get_args(ev.Body))


def test_an_event_delivered_twice_counts_once(running: ClusterState) -> None:
    event = event_of("control", ev.JobCancelRequested("enough"), stream_sequence=7)
    once = evolve(running, event)

    twice = evolve(once, event)

    assert once.phase is Phase.STOPPING
    assert (twice.version, twice.ignored["applied before"]) == (once.version, 1)


def test_events_of_one_source_count_once_each_in_whatever_order_they_come(running: ClusterState) -> None:
    start = running.clocks[OTHER_ACTOR].through
    events = [
        event_of(OTHER_ACTOR, ev.Progress((), number, 9, "train"), boot=1, sequence=start + number)
        for number in (3, 1, 2, 3, 1)
    ]
    state = running
    for event in events:
        state = evolve(state, event)

    assert state.progress[Role.ACTOR].num_done == 2
    assert state.ignored["seen before"] == running.ignored.get("seen before", 0) + 2
    assert state.clocks[OTHER_ACTOR].through == start + 3
    assert state.clocks[OTHER_ACTOR].ahead == ()


def test_progress_and_backlog_are_folded_in_without_raising_the_guarding_version(running: ClusterState) -> None:
    progress = event_of(OTHER_ACTOR, ev.Progress((("loss", 0.5),), 1, 2, "train"), boot=1, sequence=60)
    backlog = event_of(OTHER_ACTOR, ev.Backlog("scored", 5), boot=1, sequence=61)

    after = evolve(evolve(running, progress), backlog)

    assert after.version == running.version
    assert after.progress[Role.ACTOR].metrics == (("loss", 0.5),)
    assert after.backlog == {"scored": 5}


def test_a_structural_event_raises_the_guarding_version_by_one(running: ClusterState) -> None:
    after = evolve(running, event_of("control", ev.JobCancelRequested("enough")))

    assert after.version == running.version + 1


def test_ownership_read_unchanged_leaves_the_version_and_an_older_record_changes_nothing(running: ClusterState) -> None:
    records = tuple(running.gpus.values())
    same = event_of("scheduler", ev.OwnershipObserved(records, tuple(running.transitions.values())))
    older = tuple(replace(record, token=Token(0, 0)) for record in records)
    stale = event_of("scheduler", ev.OwnershipObserved(older, tuple(running.transitions.values())))

    assert evolve(running, same) == running
    assert evolve(running, stale) == running


def test_an_event_of_a_newer_start_of_an_instance_shows_the_death_of_the_start_before() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    name = InstanceId("rollout@n1")

    after = evolve(drive.state, event_of(name, ev.Progress((), 0, 1, "generate"), boot=2, incarnation=1))

    assert [grant.gpu for grant in after.components[Role.ROLLOUT].grants] == [gpu("n0", 1)]
    assert after.version == drive.state.version + 1


def test_a_failure_of_a_component_with_an_old_token_leaves_its_open_start_alone() -> None:
    drive = booted(FakeCluster(spec()))
    name = instance_id(Role.INFERENCE, NODES[0])
    drive.run_until(lambda state: state.transition_of(Role.INFERENCE) is not None)
    assert not drive.state.components[Role.INFERENCE].is_up

    after = evolve(drive.state, event_of(name, BROKEN, boot=1, sequence=50, incarnation=1))

    assert after.ignored["under old tokens"] == 1
    assert after.components == drive.state.components


def test_a_report_counts_even_if_another_component_got_its_gpus_since() -> None:
    drive = iterating()
    name = instance_id(Role.ROLLOUT, NODES[1])

    after = evolve(drive.state, event_of(name, REPORT, boot=1, sequence=50, grants=OLD))

    assert after.iteration is not None
    assert Role.ROLLOUT in after.iteration.reports
