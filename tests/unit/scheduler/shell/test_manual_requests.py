"""A person's moves over real gRPC: what is answered, which event does it, and what is refused.

The job: actor on n0/0 and n1/0 (dp 2), rollout on n0/1, n1/1 and n1/3, inference on n0/2 and n1/2 (tp 2), n0/3 on
standby; 4 samples a minibatch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.evolve.fold import evolve
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state, event_of
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.manual_moves import ManualMoves
from services.scheduler.state.values import Placed
from tests.component_bench import JOB
from tests.unit.scheduler.fake_parts import gpu
from tests.unit.scheduler.manual_job import HOME, ROLLOUT, SMALLER, SPARE, running, split
from tests.unit.scheduler.shell.controlled import Controlled, controlled
from tidegate.codec import encode_layout
from tidegate.ports.rpc import PeerRefused
from tidegate.types import GpuId, Layout
from tidegate.v1 import control_pb2, events_pb2, types_pb2

ScaleJob, MigrateGpus, DrainGpus = (
    control_pb2.ScaleJobRequest,
    control_pb2.MigrateGpusRequest,
    control_pb2.DrainGpusRequest,
)
REQUESTS: dict[str, tuple[str, Any, list[tuple[str, list[str], list[str]]]]] = {
    "scale": (
        "ScaleJob",
        ScaleJob(job=JOB, actor=4, rollout=2),
        [("ROLE_ROLLOUT", ["n1/3"], []), ("ROLE_ACTOR", [], ["n0/3", "n1/3"])],
    ),
    "scale into a layout": (
        "ScaleJob",
        ScaleJob(job=JOB, layout=encode_layout(Layout(tp=2))),
        [("ROLE_ACTOR", [], [])],
    ),
    "migrate": (
        "MigrateGpus",
        MigrateGpus(job=JOB, leaving=["n1/1"], coming=["n0/3"]),
        [("ROLE_ROLLOUT", ["n1/1"], []), ("ROLE_ROLLOUT", [], ["n0/3"])],
    ),
    "drain": ("DrainGpus", DrainGpus(job=JOB, targets=["n1/1"]), [("ROLE_ROLLOUT", ["n1/1"], [])]),
    "drain what nobody has": ("DrainGpus", DrainGpus(job=JOB, targets=["n0/3"]), []),
}


async def ask(of: Controlled, method: str, request: Any) -> control_pb2.ManualMove:
    move: control_pb2.ManualMove = (await getattr(of.stub, method)(request)).move
    return move


async def published(of: Controlled) -> list[events_pb2.Event]:
    return [event async for _, event in of.cluster.bus.events.read(JOB)]


@pytest.mark.parametrize("case", REQUESTS)
async def test_a_dry_run_has_the_plan_of_the_request_and_leads_to_no_event(tmp_path: Path, case: str) -> None:
    method, request, want = REQUESTS[case]
    async with controlled(tmp_path) as of:
        of.state = running().state
        dry = type(request)()
        dry.CopyFrom(request)
        dry.dry_run = True
        plan = await ask(of, method, dry)
        assert (await published(of), plan.stream_sequence) == ([], 0)
        move = await ask(of, method, request)
        steps = [(types_pb2.Role.Name(step.role), list(step.leaves), list(step.comes)) for step in move.steps]
        assert steps == want
        (event,) = await published(of)
        assert event.WhichOneof("body") == ("drain_requested" if method == "DrainGpus" else "split_requested")
        assert move.stream_sequence == 1
        move.stream_sequence = 0
        assert move == plan


@pytest.mark.parametrize("case", REQUESTS)
async def test_the_event_of_a_request_changes_the_state_and_a_codec_keeps_it(tmp_path: Path, case: str) -> None:
    method, request, _ = REQUESTS[case]
    async with controlled(tmp_path) as of:
        of.state = before = running().state
        await ask(of, method, request)
        (message,) = await published(of)
        message.job = before.job
        after = evolve(before, event_of(message))
        assert after.ignored == before.ignored
        assert (after.manual, after.asked) != (before.manual, before.asked)
        assert decode_state(encode_state(after)) == after


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no GPU is left": ("ScaleJob", ScaleJob(job=JOB, rollout=8), "the rollout can have 1, 2, 3, 4"),
    "nothing is asked": ("ScaleJob", ScaleJob(job=JOB), "no component is named"),
    "two sizes": ("ScaleJob", ScaleJob(job=JOB, actor=2, layout=encode_layout(Layout())), "give one of the two"),
    "GPUs of nobody": ("ScaleJob", ScaleJob(job=JOB, rollout=2, gpus=["n0/0"]), "GPUs are named for the actor"),
    "a layout that the model does not fit": (
        "ScaleJob",
        ScaleJob(job=JOB, layout=encode_layout(Layout(cp=3))),
        "must be 0; legal cp: 1, 2, 4",
    ),
    "16 ranks": ("ScaleJob", ScaleJob(job=JOB, layout=encode_layout(Layout(dp=16))), "the actor can have 1, 2, 3"),
    "a GPU in use": ("MigrateGpus", MigrateGpus(job=JOB, leaving=["n1/1"], coming=["n0/0"]), "free: n0/3"),
    "no GPU to drain": ("DrainGpus", DrainGpus(job=JOB), "no GPU is named; name GPUs or nodes of the job"),
    "no such node": ("DrainGpus", DrainGpus(job=JOB, targets=["n7"]), "on n0, n1"),
    "all GPUs": ("DrainGpus", DrainGpus(job=JOB, targets=["n0", "n1"]), "each of these alone can be: n0/0"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_request_that_cannot_be_is_refused_with_what_would_work(tmp_path: Path, case: str) -> None:
    method, request, want = REFUSED[case]
    async with controlled(tmp_path) as of:
        of.state = running().state
        with pytest.raises(PeerRefused) as refused:
            await ask(of, method, request)
        assert want in refused.value.reason
        assert refused.value.error == "MoveRefused"
        assert await published(of) == []


async def test_a_job_that_does_not_run_moves_no_gpu_by_hand(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        of.state = replace(running().state, phase=Phase.PAUSED)
        for method, request, _ in REQUESTS.values():
            with pytest.raises(PeerRefused, match="is paused: GPUs move by hand while their job is running") as refused:
                await ask(of, method, request)
            assert refused.value.error == "NotNow"


async def test_an_undo_names_what_is_still_drained(tmp_path: Path) -> None:
    async with controlled(tmp_path) as of:
        of.state = replace(running().state, manual=ManualMoves(drained=(SPARE, gpu("n1", 1))))
        move = await ask(of, "DrainGpus", DrainGpus(job=JOB, targets=["n0/3"], undo=True))
        assert list(move.drained_gpus) == ["n1/1"]
        (event,) = await published(of)
        assert event.drain_requested == events_pb2.DrainRequested(gpus=["n0/3"], undo=True)


def split_to(placed: Placed) -> ManualMoves:
    return ManualMoves(split={**HOME, ROLLOUT: placed})


async def test_a_job_says_which_places_persons_asked_for_are_open_and_which_gpus_are_drained(tmp_path: Path) -> None:
    fewer = Placed((GpuId("n0/1"),), Layout())

    def at_home(state: ClusterState) -> ClusterState:
        return replace(state, manual=replace(split_to(HOME[ROLLOUT]), drained=(SPARE,)))

    async with controlled(tmp_path) as of:
        of.state = replace(running().state, manual=split_to(fewer))
        status = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))
        assert [(place.role, list(place.gpus)) for place in status.open_places] == [(types_pb2.ROLE_ROLLOUT, ["n0/1"])]
        of.state = at_home(running().state)
        status = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))
        assert (list(status.open_places), list(status.drained_gpus)) == ([], ["n0/3"])


async def test_a_job_says_which_drained_gpus_it_uses_after_all(tmp_path: Path) -> None:
    state = running().state
    async with controlled(tmp_path) as of:
        for drained, want in (((SPARE,), []), (tuple(sorted(state.gpus)), sorted(state.gpus))):
            of.state = replace(state, manual=ManualMoves(drained=drained))
            status = await of.stub.GetJob(control_pb2.GetJobRequest(job=JOB))
            assert list(status.used_drained_gpus) == want


async def test_a_resize_of_the_actor_to_gpus_that_a_split_under_way_gives_to_others_is_refused(tmp_path: Path) -> None:
    drive = running()
    split(drive, SMALLER)
    state = drive.run_until(lambda state: state.resize() is not None)
    async with controlled(tmp_path) as of:
        of.state = state
        with pytest.raises(PeerRefused, match="n1/0: no slot of the actor, whose slots are n0/0, n0/3"):
            await of.stub.ResizeActor(
                control_pb2.ResizeActorRequest(job=JOB, layout=encode_layout(Layout(dp=2)), gpus=["n0/0", "n1/0"])
            )
        assert await published(of) == []
