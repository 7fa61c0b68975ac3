"""A person's requests to a live job, over real gRPC: they read the last written state, and make changes by events."""

from __future__ import annotations

import asyncio
import json
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.shell.codecs.state_codec import job_spec
from services.scheduler.shell.control import MAX_WAIT_S, is_lent, write_endpoint
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Working
from services.scheduler.state.course import Iteration
from services.scheduler.state.remembered import Assignment, Remembered
from services.scheduler.state.values import IterationPlan, Placed
from tests.component_bench import JOB
from tests.unit.scheduler.shell.controlled import LED, STATE, Controlled, controlled
from tidegate.codec import decode_layout, encode_layout
from tidegate.ports.rpc import PeerRefused
from tidegate.types import GpuId, Grant, Layout, Role, Token
from tidegate.v1 import control_pb2, events_pb2


def test_a_component_whose_gpus_the_policy_gave_to_others_is_lent_in_that_iteration() -> None:
    plan = IterationPlan(1, 1, 0, 4, 2, 2, 7)
    trainer = Placed((GpuId("n0/0"),), Layout())
    held = Remembered(2, 1, Assignment(engines=(), trainer=trainer, inference=()))
    state = replace(STATE, iteration=Iteration(plan), remembered=held)
    assert [is_lent(state, role) for role in (Role.ACTOR, Role.ROLLOUT, Role.INFERENCE)] == [False, True, True]
    for other in (replace(held, iteration=0), replace(held, incarnation=1), Remembered()):
        assert not any(is_lent(replace(state, remembered=other), role) for role in Role)
    assert not any(is_lent(replace(state, iteration=None), role) for role in Role)


async def test_a_job_is_described_from_the_state_with_the_reason_of_the_last_decision(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        job = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))
        assert (job.job, job.incarnation, job.phase, job.iteration, job.version) == (JOB, 2, "running", 1, 1)
        assert (job.last_reason, job.final_checksum) == ("static: nothing to do", "")
        actor = job.components[0]
        assert (actor.lead, actor.lead_epoch, actor.state) == ("actor@n0", 3, "up")
        assert [grant.gpu for grant in actor.grants] == ["n0/0"]
        assert [component.state for component in job.components] == ["up", "down", "down"]
        (iteration,) = job.iterations
        assert (iteration.incarnation, iteration.num_generated, iteration.num_trained, iteration.num_filtered) == (
            2,
            8,
            6,
            2,
        )
        assert (iteration.num_lost, iteration.num_duplicates) == (0, 0)
        (evaluation,) = job.evaluations
        assert (evaluation.version, evaluation.num_prompts, evaluation.samples_per_prompt) == (1, 8, 2)
        assert dict(evaluation.metrics) == {"exact_match/pass@2": 0.5}


async def test_a_job_has_a_final_checksum_once_the_weights_after_its_last_iteration_are_published(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as of:
        last = replace(job_spec(of.cluster.config), num_iterations=1)
        of.state = replace(STATE, spec=last, next_version=1)
        assert (await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))).final_checksum == "sum-1"
        of.state = replace(of.state, next_iteration=0)
        assert (await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))).final_checksum == ""


async def test_before_any_state_was_written_the_job_is_submitted(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        of.state = None
        job = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))
        assert (job.phase, job.iteration, list(job.iterations)) == ("submitted", 0, [])


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("GetJob", control_pb2.GetJobRequest),
        ("CancelJob", control_pb2.CancelJobRequest),
        ("ListDeadLetters", control_pb2.ListDeadLettersRequest),
        ("DropDeadLetter", control_pb2.DropDeadLetterRequest),
        ("ReplayDeadLetter", control_pb2.ReplayDeadLetterRequest),
        ("ResizeActor", partial(control_pb2.ResizeActorRequest, layout=encode_layout(Layout()))),
    ],
)
async def test_another_job_is_refused_by_name_and_leads_to_no_event(
    tmp_path: Path, method: str, request_type: Any
) -> None:
    async with controlled(tmp_path) as of:
        with pytest.raises(PeerRefused, match="job 'another' is not here; this scheduler runs 'bench'") as refused:
            await getattr(of.stub, method)(request_type(job="another"))
        assert (refused.value.status, refused.value.error) == ("INVALID_ARGUMENT", "UnknownJob")
        assert await of.bodies() == []


def resizable(of: Controlled) -> ClusterState:
    """An actor on n0/0 and n0/1 that runs."""
    grants = tuple(Grant(GpuId(f"n0/{index}"), Token(1, 1)) for index in range(2))
    actor = replace(LED, state=Working(grants, Placed(tuple(grant.gpu for grant in grants), Layout(dp=2))))
    return replace(STATE, spec=job_spec(of.cluster.config), components={**STATE.components, Role.ACTOR: actor})


async def test_a_resize_becomes_an_event_and_is_answered_with_its_gpus(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        of.state = resizable(of)
        request = control_pb2.ResizeActorRequest(job=JOB, layout=encode_layout(Layout(tp=2)))
        answer = await of.stub.ResizeActor(request)
        assert list(answer.gpus) == ["n0/0", "n0/1"]
        events = [event async for _, event in of.cluster.bus.events.read(JOB)]
        (asked,) = [event.resize_requested for event in events if event.WhichOneof("body") == "resize_requested"]
        assert (decode_layout(asked.layout), list(asked.gpus)) == (Layout(tp=2), ["n0/0", "n0/1"])
        assert (answer.in_force, answer.stream_sequence) == (False, len(events))
        assert of.state.asked is None


async def test_a_client_that_knows_the_state_waits_for_its_next_version_and_another_gets_it_at_once(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as of:
        of.state = replace(STATE, version=7)
        of.change = lambda: setattr(of, "state", replace(STATE, version=8, phase=Phase.FINISHED))
        old = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB, known_state_version=6, wait_s=2.0))
        at_once = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB, known_state_version=7))
        assert (old.state_version, at_once.state_version, of.waits_s) == (7, 7, [])
        new = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB, known_state_version=7, wait_s=2.0))
        assert (new.state_version, new.phase, of.waits_s) == (8, "finished", [2.0])
        await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB, known_state_version=8, wait_s=1e9))
        assert of.waits_s == [2.0, MAX_WAIT_S]


async def test_a_resize_to_where_the_actor_is_says_so(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        of.state = resizable(of)
        there = control_pb2.ResizeActorRequest(job=JOB, layout=encode_layout(Layout(dp=2)), gpus=["n0/0", "n0/1"])
        assert (await of.stub.ResizeActor(there)).in_force
        turned = control_pb2.ResizeActorRequest(job=JOB, layout=encode_layout(Layout(dp=2)), gpus=["n0/1", "n0/0"])
        assert not (await of.stub.ResizeActor(turned)).in_force


async def test_resizes_that_have_not_ended_are_listed_with_the_events_behind_the_answer(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        before, gpus = resizable(of), (GpuId("n0/0"), GpuId("n0/1"))
        asked, later = Placed(gpus, Layout(tp=2)), Placed(gpus[:1], Layout())
        of.state = replace(before, asked=asked, asked_next=later, applied_seq=7)
        job = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))
        assert [decode_layout(place.layout) for place in job.open_resizes] == [asked.layout, later.layout]
        assert [tuple(place.gpus) for place in job.open_resizes] == [asked.gpus, later.gpus]
        assert job.applied_sequence == 7


@pytest.mark.parametrize(
    ("layout", "gpus", "phase", "error", "want"),
    [
        (Layout(dp=3), ["n0/0", "n0/1"], Phase.RUNNING, "ResizeRefused", "= 1 \\* 1 \\* 3 \\* 1 = 3 ranks on 2 GPUs"),
        (
            Layout(dp=3),
            [],
            Phase.RUNNING,
            "ResizeRefused",
            "3 ranks on 2 GPUs; the actor has 2 slots \\(n0/0, n0/1\\); legal dp .*: 1, 2",
        ),
        (
            Layout(dp=2),
            ["n0/0", "n0/2"],
            Phase.RUNNING,
            "ResizeRefused",
            "n0/2: no slot of the actor, whose slots are n0/0, n0/1",
        ),
        (Layout(cp=3), [], Phase.RUNNING, "ResizeRefused", "= 8 % \\(2 \\* 3\\) = 2, must be 0; legal cp: 1, 2, 4"),
        (Layout(tp=2), [], Phase.PAUSED, "NotNow", "bench is paused: GPUs move by hand while their job is running"),
    ],
    ids=[
        "ranks and GPUs differ",
        "not that many slots",
        "another's GPU",
        "a layout that the model does not fit",
        "a job that does not run",
    ],
)
async def test_a_resize_that_cannot_be_is_refused_with_the_numbers(
    tmp_path: Path, layout: Layout, gpus: list[str], phase: Phase, error: str, want: str
) -> None:
    async with controlled(tmp_path) as of:
        of.state = replace(resizable(of), phase=phase)
        request = control_pb2.ResizeActorRequest(job=JOB, layout=encode_layout(layout), gpus=gpus)
        with pytest.raises(PeerRefused, match=want) as refused:
            await of.stub.ResizeActor(request)
        assert refused.value.error == error
        assert await of.bodies() == []


async def test_a_cancel_becomes_an_event_and_changes_nothing_itself(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        await of.stub.CancelJob(control_pb2.CancelJobRequest(job=JOB, reason="a better idea"))
        events = [event async for _, event in of.cluster.bus.events.read(JOB)]
        assert [event.job_cancel_requested for event in events] == [
            events_pb2.JobCancelRequested(reason="a better idea")
        ]
        assert (events[0].source, events[0].incarnation) == ("control", 2)
        assert of.cluster.written_state() == ClusterState(job=JOB)


async def test_dead_letters_are_listed_and_the_job_goes_on_once_the_last_is_dealt_with(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        first, second = await of.bury(0), await of.bury(1)
        listed = (await of.stub.ListDeadLetters(control_pb2.ListDeadLettersRequest(job=JOB))).dead_letters
        assert [(letter.id, letter.reason) for letter in listed] == [
            (first, "prompt 0 is odd"),
            (second, "prompt 1 is odd"),
        ]
        await of.stub.DropDeadLetter(control_pb2.DropDeadLetterRequest(job=JOB, id=first))
        assert await of.bodies() == []
        await of.stub.ReplayDeadLetter(control_pb2.ReplayDeadLetterRequest(job=JOB, id=second))
        assert await of.bodies() == ["job_resume_requested"]
        assert await of.cluster.bus.dead_letters.list(JOB) == []


async def test_a_dead_letter_that_is_not_there_is_not_found_and_nothing_goes_on(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        with pytest.raises(PeerRefused) as refused:
            await of.stub.DropDeadLetter(control_pb2.DropDeadLetterRequest(job=JOB, id=7))
        assert refused.value.status == "NOT_FOUND"
        assert await of.bodies() == []


async def test_a_job_that_is_paused_without_a_dead_letter_goes_on_by_a_drop(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        assert of.state is not None
        of.state = replace(of.state, phase=Phase.PAUSED)
        await of.stub.DropDeadLetter(control_pb2.DropDeadLetterRequest(job=JOB, id=7))
        assert await of.bodies() == ["job_resume_requested"]


async def test_a_wrong_number_is_not_found_while_the_paused_job_has_a_dead_letter(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        assert of.state is not None
        of.state = replace(of.state, phase=Phase.PAUSED)
        letter = await of.bury(0)
        with pytest.raises(PeerRefused) as refused:
            await of.stub.DropDeadLetter(control_pb2.DropDeadLetterRequest(job=JOB, id=letter + 1))
        assert refused.value.status == "NOT_FOUND"
        assert await of.bodies() == []


async def test_gpus_are_listed_with_their_owner_and_token(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        store = await of.cluster.client()
        await store.register((GpuId("n0/1"), GpuId("n0/0")))
        await store.mark_lost(GpuId("n0/1"), (await store.gpus())[GpuId("n0/1")].token)
        listed = (await of.stub.ListGpus(control_pb2.ListGpusRequest())).gpus
        assert [(gpu.gpu, gpu.state, gpu.job) for gpu in listed] == [("n0/0", "free", ""), ("n0/1", "lost", "")]


async def test_events_are_read_from_where_one_asks_and_followed(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        announcer = of.cluster.announcer("launcher")
        for number in range(3):
            await announcer.publish(events_pb2.DeadLettered(dead_letter=number), incarnation=1)
        request = control_pb2.ListEventsRequest(job=JOB, after_sequence=1)
        got = [
            (each.stream_sequence, each.event.dead_lettered.dead_letter) async for each in of.stub.ListEvents(request)
        ]
        assert got == [(2, 1), (3, 2)]
        following = of.stub.ListEvents(control_pb2.ListEventsRequest(job=JOB, after_sequence=3, follow=True))
        coming = asyncio.ensure_future(anext(aiter(following)))
        await announcer.publish(events_pb2.Progress(num_done=9), incarnation=1)
        assert (await coming).event.progress.num_done == 9


async def test_logs_are_read_whole_lines_only_of_all_or_of_one_source(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        (of.logs / "actor@n0.jsonl").write_text("one\ntwo\nhalf a li")
        (of.logs / "scheduler.jsonl").write_text("three\n")

        async def lines(source: str) -> list[str]:
            request = control_pb2.ReadLogsRequest(job=JOB, source=source)
            return [each.line async for each in of.stub.ReadLogs(request)]

        assert await lines("") == ["one", "two", "three"]
        assert await lines("scheduler") == ["three"]
        with pytest.raises(PeerRefused, match="no log of 'nobody'; there are actor@n0, scheduler"):
            await lines("nobody")


def test_only_this_user_may_read_where_the_control_api_answers(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    path.write_text("of an earlier run")
    path.chmod(0o644)
    write_endpoint(path, endpoint="127.0.0.1:5", pid=42, credential=tmp_path / "operator")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    written = {"control": "127.0.0.1:5", "pid": 42, "credential": str(tmp_path / "operator")}
    assert json.loads(path.read_text()) == written
