"""A job from its submission to its end, with everything that a person may do to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.decision import decide
from services.scheduler.decide.turn import checked
from services.scheduler.evolve.fold import evolve
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.course import Checkpoint
from services.scheduler.state.values import Fate, JobSpec, Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, NODES, gpu, spec
from tidegate.ownership.records import GpuState
from tidegate.types import Layout, Role, Token, instance_id, node_of


def is_iterating(state: ClusterState) -> bool:
    return state.iteration is not None and len(state.iteration.opened) == len(Role)


def test_a_job_starts_iterates_and_gives_all_gpus_back() -> None:
    drive = booted(FakeCluster(spec(num_iterations=3)))

    state = drive.run()

    assert (state.phase, state.message) == (Phase.FINISHED, "all 3 iterations are done")
    assert [(each.iteration, each.version, each.generated.num_samples) for each in state.summaries] == [
        (0, 0, 8),
        (1, 1, 8),
        (2, 2, 8),
    ]
    assert [(each.num_lost, each.num_duplicates) for each in state.summaries] == [(0, 0)] * 3
    assert state.final_checksum == "sum-3"
    assert state.checkpoint is not None
    assert state.checkpoint.next_iteration == 3


def test_an_iteration_begins_after_the_prompts_of_the_iteration_or_of_the_checkpoint_before_it() -> None:
    drive = booted(FakeCluster(spec(num_iterations=4, max_extra_prompts=2), keeps_state=False))
    drive.run_until(lambda state: is_iterating(state) and state.next_iteration == 2)
    drive.cluster.kill_worker(gpu("n0", 0))

    state = drive.run()

    opens = [command for command in drive.cluster.log if isinstance(command, cmd.OpenIteration)]
    of_actor = [command for command in opens if command.header.role is Role.ACTOR]
    assert [(each.header.incarnation, each.plan.iteration, each.plan.first_prompt) for each in of_actor] == [
        (1, 0, 0),
        (1, 1, 4),
        (1, 2, 9),
        (2, 2, 9),
        (2, 3, 15),
    ]
    assert {each.plan.max_extra_prompts for each in opens} == {2}
    assert [each.generated.num_samples for each in state.summaries if not each.is_superseded] == [8, 10, 12, 12]


def test_each_command_of_an_undisturbed_job_is_issued_once() -> None:
    drive = booted(FakeCluster(spec(num_iterations=3)))

    drive.run()

    ids = [cmd.command_id(command) for command in drive.cluster.log]
    assert len(ids) == len(set(ids))
    closes = [command for command in drive.cluster.log if isinstance(command, cmd.CloseIteration)]
    assert [(command.iteration, command.last) for command in closes if command.header.role is Role.ACTOR] == [
        (0, False),
        (1, False),
        (2, True),
    ]


def test_an_iteration_opens_only_when_rollout_and_inference_confirmed_its_version() -> None:
    drive = booted(FakeCluster(spec()))

    for _ in range(500):
        if drive.state.phase in (Phase.STOPPING, Phase.FINISHED):
            break
        before = drive.state
        drive.step()
        opened = before.iteration is None and drive.state.iteration is not None
        assert not opened or all(drive.state.holds(role, drive.state.next_version) for role in Role if role != "actor")
    assert len(drive.state.summaries) == 2


def test_the_inference_is_given_the_reference_policy_exactly_when_the_kl_term_is_on() -> None:
    for uses_reference in (True, False):
        drive = booted(FakeCluster(spec(uses_reference=uses_reference)))
        drive.run()
        loads = [command for command in drive.cluster.log if isinstance(command, cmd.LoadWeights)]
        assert loads, "versions are loaded"
        for load in loads:
            want = uses_reference and load.header.role is Role.INFERENCE
            assert (load.reference is not None) == want


def test_before_the_job_is_submitted_no_command_is_issued_and_the_reason_counts_the_instances() -> None:
    drive = Drive(FakeCluster(spec()))
    drive.cluster.start(instance_id(Role.ACTOR, NODES[0]))
    drive.step()

    decision = decide(drive.state, drive.now_ms, policy=StaticPolicy())

    assert decision.commands == ()
    assert decision.reason == "waits for the job to be submitted (1 instances joined)"


def test_a_component_waits_for_an_instance_on_each_of_its_nodes() -> None:
    cluster = FakeCluster(spec())
    drive = Drive(cluster)
    cluster.start(instance_id(Role.ACTOR, NODES[0]))
    cluster.voice.say("launcher", ev.JobSubmitted(cluster.job_spec, "{}", resume=False))
    while cluster.outbox:
        drive.step()

    assert "waits for actor@n1 to join" in drive.last_reason
    assert not cluster.store.records


def test_a_component_that_never_joins_fails_the_job_with_the_name_of_the_missing_instance() -> None:
    cluster = FakeCluster(spec(deadline_ms=1000))
    drive = Drive(cluster)
    cluster.start(instance_id(Role.ACTOR, NODES[0]))
    cluster.voice.say("launcher", ev.JobSubmitted(cluster.job_spec, "{}", resume=False))

    state = drive.run()

    assert state.phase is Phase.FAILED
    assert "waited 3 s for actor@n1 to join" in state.message


@pytest.mark.parametrize("num_steps", range(0, 30, 3))
def test_an_instance_that_never_comes_back_fails_the_job_whether_a_start_failed_before_or_not(num_steps: int) -> None:
    """The scheduler drops the pause after a failed start at its end. It must keep the wait for the instance."""
    drive = booted(FakeCluster(spec(), has_supervisor=False))
    for _ in range(num_steps):
        drive.step()
    drive.cluster.kill_instance(instance_id(Role.ACTOR, NODES[0]), tells=True)

    state = drive.run()

    assert (state.phase, state.message) == (Phase.FAILED, "waited 3 s for actor@n0 to join")


def test_samples_that_are_lost_fail_the_job_with_the_numbers() -> None:
    drive = booted(FakeCluster(spec(), num_lost=2))

    state = drive.run()

    assert state.phase is Phase.FAILED
    assert (
        "samples of iteration 0 do not add up: generated 8, trained 3 + filtered 2 + discarded 1 = 6" in state.message
    )
    assert "2 lost, 0 counted twice" in state.message


def test_a_sample_lost_and_another_counted_twice_fail_the_job_though_the_numbers_agree() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    drive.cluster.work()
    drive.cluster.outbox[:] = [_with_wrong_ids(event) for event in drive.cluster.outbox]

    state = drive.run()

    assert state.phase is Phase.FAILED
    assert "the numbers agree but the ids do not" in state.message


def _with_wrong_ids(event: ev.Event) -> ev.Event:
    if not isinstance(event.body, ev.IterationReported) or event.role is not Role.ACTOR:
        return event
    trained = event.body.trained
    wrong = Fate(num_samples=trained.num_samples, ids_digest=trained.ids_digest ^ 1)
    return replace(event, body=replace(event.body, trained=wrong))


def test_a_dead_letter_pauses_the_job_and_no_iteration_opens_until_it_is_resumed() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    drive.cluster.voice.say("actor", ev.DeadLettered("samples.tide", "not a group", 7))
    while drive.state.phase is not Phase.PAUSED:
        drive.step()
    assert drive.state.message == ("dead letter 7 of samples.tide: not a group; replay or drop it, and the job goes on")

    for _ in range(200):
        drive.step()
    assert drive.state.phase is Phase.PAUSED
    assert drive.state.next_iteration == 1, "the iteration that was open may end"
    assert drive.state.iteration is None

    drive.cluster.voice.say("control", ev.JobResumeRequested())
    assert drive.run().phase is Phase.FINISHED


@pytest.mark.parametrize("num_steps", [0, 3, 12, 20, 30, 40, 45])
def test_a_cancelled_job_gives_every_gpu_back_at_whatever_step_it_is(num_steps: int) -> None:
    drive = booted(FakeCluster(spec()))
    for _ in range(num_steps):
        drive.step()
    drive.cluster.voice.say("control", ev.JobCancelRequested("no longer needed"))

    state = drive.run()

    assert (state.phase, state.message) == (Phase.CANCELLED, "cancelled: no longer needed")
    assert not any(gate.is_held for gate in drive.cluster.gates.values())
    assert not any(record.owner for record in drive.cluster.store.gpus.values())


def test_a_fatal_failure_ends_the_job_with_its_message() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    name = instance_id(Role.ROLLOUT, NODES[0])
    failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "the model's files are gone", fatal=True)
    drive.cluster.voice.say(name, failed, incarnation=1)

    state = drive.run()

    assert (state.phase, state.message) == (Phase.FAILED, "rollout@n0: the model's files are gone")


def test_the_job_does_not_finish_before_the_last_weights_are_published() -> None:
    drive = booted(FakeCluster(spec(num_iterations=1)))
    drive.run_until(is_iterating)
    drive.cluster.work()
    held_back: list[ev.Event] = []
    while drive.step():
        held_back += [event for event in drive.cluster.outbox if isinstance(event.body, ev.WeightsPublished)]
        drive.cluster.outbox[:] = [event for event in drive.cluster.outbox if event not in held_back]

    assert drive.state.phase is Phase.RUNNING
    assert "version 1 is not published yet" in drive.last_reason

    drive.cluster.outbox[:] = held_back
    assert drive.run().final_checksum == "sum-1"


WRONG_WEIGHTS = {
    "a version published again with another checksum": (Role.ACTOR, "is immutable"),
    "a version loaded with another checksum": (Role.ROLLOUT, "its weights are not the actor's"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_differ_fail_the_job(case: str) -> None:
    role, want = WRONG_WEIGHTS[case]
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    snapshot = drive.state.snapshots[0]
    bodies: dict[Role, ev.Body] = {
        Role.ACTOR: ev.WeightsPublished(replace(snapshot, checksum="another"), None),
        Role.ROLLOUT: ev.WeightsLoaded(0, "another"),
    }
    name = instance_id(role, NODES[0])
    drive.cluster.voice.say(name, bodies[role], incarnation=1)

    state = drive.run()

    assert state.phase is Phase.FAILED
    assert want in state.message


def test_a_resumed_job_goes_on_from_its_last_checkpoint_in_a_new_incarnation() -> None:
    drive = booted(FakeCluster(spec(num_iterations=4, max_actor_restarts=0), keeps_state=False))
    drive.run_until(lambda state: state.next_iteration == 2)
    drive.cluster.kill_worker(drive.cluster.job_spec.placement[Role.ACTOR].gpus[0])
    assert drive.run().phase is Phase.FAILED

    drive.cluster.voice.say("launcher", ev.JobSubmitted(drive.cluster.job_spec, "{}", resume=True))
    drive.run_until(lambda state: state.phase is Phase.SUBMITTED or state.phase is Phase.STARTING)
    state = drive.run()

    assert (state.phase, state.incarnation, state.num_restarts) == (Phase.FINISHED, 2, 0)
    lineage = [(each.iteration, each.incarnation) for each in state.summaries if not each.is_superseded]
    assert [iteration for iteration, _ in lineage] == [0, 1, 2, 3]
    assert lineage[-1] == (3, 2)


def submitted(state: ClusterState, job: JobSpec) -> ClusterState:
    """The state after a launcher of a later boot resumed the job with this config."""
    body = ev.JobSubmitted(job, "{}", resume=True)
    return checked(state, evolve(state, ev.Event(job=JOB, source="launcher", boot=9, sequence=1, body=body)))


@pytest.mark.parametrize(
    ("num_iterations", "want"),
    [
        (3, (Phase.FINISHED, 1, "all 3 iterations are done")),
        (5, (Phase.SUBMITTED, 2, "resumes from checkpoint inc001-it000003")),
    ],
    ids=["as many", "more"],
)
def test_a_finished_job_goes_on_with_more_iterations_alone(num_iterations: int, want: tuple[Phase, int, str]) -> None:
    drive = booted(FakeCluster(spec(num_iterations=3)))
    drive.run()

    state = submitted(drive.state, spec(num_iterations=num_iterations))

    assert (state.phase, state.incarnation, state.message) == want


def test_a_finished_job_that_goes_on_takes_its_new_iterations_alone() -> None:
    drive = booted(FakeCluster(spec(num_iterations=2)))
    drive.run()
    drive.cluster.job_spec = spec(num_iterations=4)
    drive.cluster.voice.say("launcher", ev.JobSubmitted(drive.cluster.job_spec, "{}", resume=True))
    drive.run_until(lambda state: state.phase is not Phase.FINISHED)

    state = drive.run()

    assert (state.phase, state.num_restarts) == (Phase.FINISHED, 0)
    assert [(each.iteration, each.incarnation) for each in state.summaries] == [(0, 1), (1, 1), (2, 2), (3, 2)]


def test_a_resume_goes_on_without_a_node_that_it_had() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    placed = {role: Placed((gpu("n1", index),), Layout()) for index, role in enumerate(Role)}

    state = submitted(drive.state, replace(spec(), placement=placed))

    assert {node_of(each) for each in drive.state.gpus} == set(NODES)
    assert {node_of(each) for each in state.gpus} == {"n1"}
    suspects = {grant.gpu for role in Role for grant in state.suspects(role)}
    assert gpu("n1", 3) in suspects, "a slot that the config left out of a node that it has is given back"


def test_a_resume_takes_a_store_that_came_back_with_older_records_as_it_is() -> None:
    """An adoption that reached no gate: the records are old, and nobody may hold their GPUs."""
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    older = tuple(replace(each, state=GpuState.LOST, token=Token(1, 0)) for each in drive.state.gpus.values())
    assert all(each.token > Token(1, 0) for each in drive.state.records_of(Role.ROLLOUT))

    state = submitted(drive.state, spec())
    event = ev.Event(job=JOB, source="scheduler", boot=0, sequence=0, body=ev.OwnershipObserved(older, ()))
    after = evolve(state, event)

    assert tuple(after.gpus.values()) == older
    checked(drive.state, state, after)


def resumed(drive: Drive, *, next_iteration: int, incarnation: int, name: str = "found") -> ClusterState:
    """Resumes like a launcher: reports the checkpoint in the job's folder, then submits the job."""
    cluster = drive.cluster
    cluster.checkpoints[name] = next_iteration
    cluster.voice.say("launcher", ev.CheckpointSaved(next_iteration, next_iteration, name, 16))
    cluster.voice.say("launcher", ev.JobSubmitted(cluster.job_spec, "{}", resume=True))
    cluster.outbox[-2:] = [replace(event, incarnation=incarnation) for event in cluster.outbox[-2:]]
    while any(event.source == "launcher" for event in cluster.outbox):
        drive.step()
    return drive.state


def test_a_checkpoint_that_the_launcher_finds_is_where_a_resume_without_a_state_begins() -> None:
    cluster = FakeCluster(spec(num_iterations=3))
    drive = Drive(cluster)
    state = resumed(drive, next_iteration=2, incarnation=5)
    assert (state.incarnation, state.next_iteration, state.next_version) == (5, 2, 2)
    for role in Role:
        for node in NODES:
            cluster.start(instance_id(role, node))

    state = drive.run()

    assert (state.phase, state.incarnation) == (Phase.FINISHED, 5)
    assert [each.iteration for each in state.summaries] == [2]
    ups = [command for command in cluster.log if isinstance(command, cmd.ScaleUp)]
    assert {command.checkpoint for command in ups if command.header.role is Role.ACTOR} == {"found"}


FOUND = {
    "a newer checkpoint than the state knows": (2, "found", 2),
    "another of the same iteration": (1, "found", 1),
    "an older one, because the one that the state knows is gone": (0, "found", 0),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_resume_with_a_state_begins_from_the_checkpoint_that_the_launcher_found(case: str) -> None:
    found, want_name, want_iteration = FOUND[case]
    drive = booted(FakeCluster(spec(num_iterations=4)))
    drive.run_until(lambda state: is_iterating(state) and state.next_iteration == 1)

    state = resumed(drive, next_iteration=found, incarnation=9)

    assert state.checkpoint is not None
    assert (state.checkpoint.name, state.next_iteration, state.incarnation) == (want_name, want_iteration, 9)
    assert drive.run().phase is Phase.FINISHED


@pytest.mark.parametrize(
    ("name", "want"),
    [("inc001-it000002", [False, False]), ("inc002-it000002", [False, True]), ("found", [False, False])],
    ids=["of the state's incarnation", "of a later one, which the state does not know", "without an incarnation"],
)
def test_accounts_count_only_as_far_as_the_found_checkpoints_lineage_is_known(name: str, want: list[bool]) -> None:
    drive = booted(FakeCluster(spec(num_iterations=4)))
    state = drive.run_until(lambda state: is_iterating(state) and state.next_iteration == 2)
    first = Checkpoint(next_iteration=1, version=1, name="inc001-it000001", incarnation=1)
    drive.state = replace(state, checkpoint=first)

    state = resumed(drive, next_iteration=2, incarnation=9, name=name)

    assert [each.is_superseded for each in state.summaries[:2]] == want
    assert state.next_iteration == 2


def test_an_actor_that_passes_over_a_damaged_checkpoint_trains_again_what_came_after_the_older_one() -> None:
    drive = booted(FakeCluster(spec(num_iterations=3, max_actor_restarts=9)))
    state = drive.run_until(lambda state: is_iterating(state) and state.next_iteration == 2)
    assert state.checkpoint is not None
    # Its lead finds the files damaged, and loads the checkpoint before.
    drive.cluster.checkpoints[state.checkpoint.name] = 1
    drive.cluster.move_lead(Role.ACTOR)

    restarted = drive.run_until(lambda state: state.incarnation == 2 and state.components[Role.ACTOR].is_up)

    assert restarted.next_iteration == 1
    assert f"checkpoint {state.checkpoint.name} could not be used" in restarted.message
    assert "goes on from iteration 1 and trains again what came after it" in restarted.message
    again = drive.run_until(lambda each: each.incarnation == 2 and each.next_iteration == 2)
    assert again.checkpoint is not None
    assert again.checkpoint.name == "inc002-it000002", "the next save counts, though the damaged one was as far"
    state = drive.run()
    assert state.phase is Phase.FINISHED
    assert [each.iteration for each in state.summaries if not each.is_superseded] == [0, 1, 2]


def test_a_checkpoint_that_a_launcher_reports_leaves_the_present_incarnation_as_it_is() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    event = ev.Event(
        job=JOB, source="launcher", boot=1, sequence=9, body=ev.CheckpointSaved(9, 9, "found", 0), incarnation=2
    )

    after = evolve(drive.state, event)

    assert after.checkpoint == Checkpoint(next_iteration=9, version=9, name="found", incarnation=2)
    assert replace(after, checkpoint=None, version=0) == replace(drive.state, version=0)


def test_a_resume_takes_an_incarnation_at_least_as_high_as_that_of_the_found_checkpoint() -> None:
    state = ClusterState(job=JOB)
    saved = ev.CheckpointSaved(2, 2, "found", 16)
    state = evolve(state, ev.Event(job=JOB, source="launcher", boot=1, sequence=1, body=saved, incarnation=4))
    submitted = ev.JobSubmitted(spec(), "{}", resume=True)

    after = evolve(state, ev.Event(job=JOB, source="launcher", boot=1, sequence=2, body=submitted, incarnation=1))

    assert (after.incarnation, after.next_iteration) == (4, 2)


def test_a_submission_that_comes_twice_counts_once() -> None:
    submission = ev.Event(
        job=JOB, source="launcher", boot=1, sequence=1, body=ev.JobSubmitted(spec(), "{}", resume=True), incarnation=1
    )
    once = evolve(ClusterState(job=JOB), submission)

    twice = evolve(once, submission)

    assert once.incarnation == 1
    assert twice == replace(once, ignored={"submitted before": 1})


LATER_EVENTS: dict[str, ev.Body] = {
    "another cancel": ev.JobCancelRequested("another reason"),
    "a dead letter": ev.DeadLettered("samples.tide", "not a group", 7),
    "a resume": ev.JobResumeRequested(),
}


@pytest.mark.parametrize("case", LATER_EVENTS)
def test_a_job_that_is_ending_keeps_its_outcome(case: str) -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(is_iterating)
    drive.cluster.voice.say("control", ev.JobCancelRequested("no longer needed"))
    drive.run_until(lambda state: state.phase is Phase.STOPPING)
    drive.cluster.voice.say("control", LATER_EVENTS[case])

    state = drive.run()

    assert (state.phase, state.message) == (Phase.CANCELLED, "cancelled: no longer needed")


def test_every_decision_of_a_job_has_a_reason_that_does_not_hold_the_time() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run()

    for event, now_ms, decision in drive.seen:
        assert event is None or event.job == JOB
        if decision is not None:
            assert str(now_ms) not in decision.reason
            assert any(letter.isdigit() for letter in decision.reason)
