"""The death of an actor's rank at any time but its start costs a membership epoch, no incarnation and no sample.

The rank's state is read from its node's memory, so that the weights come out as if nothing had happened. The tests kill
a rank in an update, in a save, in a publish, in a resize before and after its commit, and while another rank is brought
back. They also remove that state, so that the checkpoint is needed, and make a rank late instead of dead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.jobs import Condition, RunningJob, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, rows, trained_draws
from tidegate.codec import encode_layout
from tidegate.config.job_config import JobConfig
from tidegate.job import snapshot_folder
from tidegate.launcher.control import control_of
from tidegate.types import Layout, NodeId
from tidegate.v1 import control_pb2
from tidegate.v1.events_pb2 import Event

pytestmark = pytest.mark.timeout(300)

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)


def scored(iteration: int) -> Condition:
    """All of the iteration's groups are ready for the actor."""
    return lambda event: (
        event.WhichOneof("body") == "iteration_reported"
        and event.source.startswith("inference")
        and event.iteration == iteration
    )


def _replaced(event: Event) -> bool:
    return event.WhichOneof("body") == "layout_committed" and event.layout_committed.HasField("reshard")


async def _ask_resize(job: RunningJob, layout: Layout, *gpus: str) -> None:
    async with control_of(job.folder) as stub:
        request = control_pb2.ResizeActorRequest(job=job.config.job, layout=encode_layout(layout), gpus=gpus)
        await stub.ResizeActor(request, timeout=10.0)


def _take_state_away(process: psutil.Process, *, member: int) -> None:
    """Removes the files in host memory that would outlive it."""
    paths = {each.path for each in process.memory_maps() if f"-member{member}-" in each.path}
    assert paths, f"process {process.pid} maps no state of member {member}"
    for path in paths:
        Path(path).unlink()


async def _finished(job: RunningJob, want_checksum: str, *, incarnations: set[int]) -> None:
    summary = (await job.result())["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    assert summary["weights_checksum"] == want_checksum
    assert {event.incarnation for event in job.events if event.incarnation} == incarnations


@pytest.mark.long
async def test_a_rank_that_dies_in_an_update_is_replaced_and_the_update_is_made_once(
    want_checksum: str, tmp_path: Path
) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(generating(0))
        victim = job.worker("n1/0")
        # The others wait for it in the middle of the update, before any of them applies it.
        victim.suspend()
        await job.until(scored(0))
        victim.kill()
        replaced = await job.until(_replaced)
        await _finished(job, want_checksum, incarnations={1})
    gpus = [grant.gpu for grant in replaced.layout_committed.grants]
    assert gpus == ["n0/0", "n0/1", "n1/0", "n1/1"]


@pytest.mark.long
async def test_a_first_rank_that_dies_between_two_updates_is_replaced(want_checksum: str, tmp_path: Path) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(generating(0))
        job.worker("n0/0").kill()
        await job.until(_replaced)
        await job.until(updated(1))
        await _finished(job, want_checksum, incarnations={1})


async def _suspended_before_close(job: RunningJob, gpu: str) -> psutil.Process:
    """A rank that has made the first iteration's last update, and is suspended before its next call."""
    await job.until(generating(0))
    scheduler = job.service("services.scheduler")
    scheduler.suspend()
    await job.until_seen(lambda: job.folder.journal.exists() and len(rows(job.folder.journal)) == 2)
    victim = job.worker(gpu)
    victim.suspend()
    scheduler.resume()
    return victim


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["n0/0", "n1/0"])
async def test_a_checkpoint_that_a_death_breaks_off_is_saved_by_all_ranks_again(
    want_checksum: str, tmp_path: Path, gpu: str
) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        victim = await _suspended_before_close(job, gpu)
        await job.until_seen(lambda: len(list(job.folder.checkpoints.glob(".partial/rank*"))) == 3)
        victim.kill()
        await job.until(_replaced)
        saved = await job.until(lambda event: event.WhichOneof("body") == "checkpoint_saved")
        assert saved.checkpoint_saved.name == "inc001-it000001"
        await _finished(job, want_checksum, incarnations={1})


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["n0/0", "n1/0"])
async def test_a_version_that_a_death_breaks_off_is_published_by_all_ranks_again(
    want_checksum: str, tmp_path: Path, gpu: str
) -> None:
    async with running(small_job("plain", checkpoint__every=3), tmp_path) as job:
        victim = await _suspended_before_close(job, gpu)
        config = JobConfig.from_json(job.folder.config.read_text())
        folders = [snapshot_folder(config, NodeId(node), incarnation=1, version=1) for node in config.cluster.nodes]
        await job.until_seen(lambda: any(path for folder in folders for path in folder.glob("rank*")))
        victim.kill()
        await job.until(_replaced)
        await _finished(job, want_checksum, incarnations={1})


SLOTS = ("n0/0", "n0/1", "n1/0", "n1/1")
MOVED = ("n0/0", "n0/4", "n1/0", "n1/1")
"""The same layout, in which one leaves, one comes and the others stay."""
MEMBERS = pytest.mark.parametrize("gpu", ["n0/1", "n1/0", "n0/4"], ids=["it leaves", "it stays", "it comes"])


def _with_standby() -> dict[str, Any]:
    return small_job(
        "plain",
        cluster__nodes={"n0": 5, "n1": 4},
        cluster__component_placement={"actor": "0,1,5,6", "rollout": "2,3,7", "inference": "8"},
        actor__standby="4",
    )


async def _held_before_updates(job: RunningJob) -> psutil.Process:
    """The inference's worker, suspended: the first iteration is open, and no minibatch is ready before it goes on."""
    await job.until(lambda event: event.WhichOneof("body") == "weights_loaded" and event.source.startswith("inference"))
    scorer = job.worker("n1/3")
    scorer.suspend()
    await job.until(generating(0))
    return scorer


def _layouts(job: RunningJob) -> list[list[str]]:
    """The GPUs of each layout that came into force by a resize."""
    return [[grant.gpu for grant in event.layout_committed.grants] for event in job.events if _replaced(event)]


@pytest.mark.long
@MEMBERS
async def test_a_member_that_dies_in_the_first_phase_of_a_resize_costs_the_resize(
    want_checksum: str, tmp_path: Path, gpu: str
) -> None:
    async with running(_with_standby(), tmp_path) as job:
        scorer = await _held_before_updates(job)
        victim = job.worker(gpu)
        # The others wait for it as soon as the new layout is to be agreed on.
        victim.suspend()
        await _ask_resize(job, Layout(tp=2, dp=2), *MOVED)
        await job.until_seen(lambda: job.gates().get("n0/4", False))
        victim.kill()
        scorer.resume()
        await job.until(lambda event: event.WhichOneof("body") == "resize_failed")
        await _finished(job, want_checksum, incarnations={1})
    assert _layouts(job) == ([] if gpu == "n0/4" else [list(SLOTS)])


@pytest.mark.long
@MEMBERS
async def test_a_member_that_dies_once_a_resize_is_committed_is_replaced_in_the_new_layout(
    want_checksum: str, tmp_path: Path, gpu: str
) -> None:
    async with running(_with_standby(), tmp_path) as job:
        scorer = await _held_before_updates(job)
        victim = job.worker(gpu)
        await _ask_resize(job, Layout(tp=2, dp=2), *MOVED)
        await job.until_logged("resize committed")
        victim.kill()
        scorer.resume()
        await _finished(job, want_checksum, incarnations={1})
    assert _layouts(job) == [list(MOVED)] * (1 if gpu == "n0/1" else 2)


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["n0/0", "n1/1"])
async def test_a_member_that_dies_before_a_switch_is_proved_costs_no_sample(
    want_checksum: str, tmp_path: Path, gpu: str
) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        scorer = await _held_before_updates(job)
        await _ask_resize(job, Layout(tp=2, pp=2), *SLOTS)
        await job.until(_replaced)
        victim = job.worker(gpu)
        # No rank leaves, so the switch is proved with the first portion. The others wait in it for this one.
        victim.suspend()
        scorer.resume()
        await job.until(scored(0))
        victim.kill()
        await _finished(job, want_checksum, incarnations={1})
    assert _layouts(job) == [list(SLOTS)] * 2


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["n0/0", "n1/1"])
async def test_a_rank_that_dies_as_another_is_brought_back_is_brought_back_as_well(
    want_checksum: str, tmp_path: Path, gpu: str
) -> None:
    # A rank that waits for a new epoch to be complete notices a death in it by the timeout.
    async with running(small_job("plain", runtime__collective_timeout_s=5.0), tmp_path) as job:
        scorer = await _held_before_updates(job)
        second = job.worker(gpu)
        second.suspend()
        job.worker("n1/0").kill()
        await job.until(lambda event: event.WhichOneof("body") == "failed")
        # The new worker has passed the gate, and waits with the others for the one that hangs.
        await job.until_seen(lambda: job.gates()["n1/0"])
        second.kill()
        scorer.resume()
        await job.until(_replaced)
        await _finished(job, want_checksum, incarnations={1})
    assert _layouts(job) == [list(SLOTS)]


@pytest.mark.long
@pytest.mark.parametrize(("copies", "incarnations"), [("nowhere", {1, 2}), ("peer", {1})])
async def test_a_rank_whose_state_is_gone_with_it_costs_an_incarnation_unless_another_keeps_a_copy(
    want_checksum: str, tmp_path: Path, copies: str, incarnations: set[int]
) -> None:
    async with running(small_job("plain", actor__copies=copies), tmp_path) as job:
        await job.until(generating(0))
        victim = job.worker("n1/0")
        victim.suspend()
        _take_state_away(victim, member=2)
        victim.kill()
        await _finished(job, want_checksum, incarnations=incarnations)


@pytest.mark.long
async def test_a_resize_in_which_a_rank_hangs_too_long_fails_and_the_old_layout_trains_on(
    want_checksum: str, tmp_path: Path
) -> None:
    async with running(small_job("plain", runtime__collective_timeout_s=5.0), tmp_path) as job:
        await job.until(generating(0))
        hung = job.worker("n1/0")
        hung.suspend()
        await _ask_resize(job, Layout(pp=2, dp=2), "n0/0", "n0/1", "n1/0", "n1/1")
        await job.until_logged("resize aborted")
        hung.resume()
        await job.until(lambda event: event.WhichOneof("body") == "resize_failed")
        await _finished(job, want_checksum, incarnations={1})


@pytest.mark.long
async def test_nobody_waits_for_a_dead_standby_and_its_slot_gets_a_new_worker_when_it_is_needed(tmp_path: Path) -> None:
    changes = {
        "cluster__nodes": {"n0": 6, "n1": 2},
        "cluster__component_placement": {"actor": "0-1", "rollout": "2,3,6", "inference": "7"},
        "actor__layout": {"tp": 2},
        "actor__standby": "4-5",
    }
    async with running(small_job("stood-by", **changes), tmp_path) as job:
        await job.until(generating(0))
        job.worker("n0/4").kill()
        await job.until(updated(1))
        await _ask_resize(job, Layout(tp=2, dp=2), "n0/0", "n0/1", "n0/4", "n0/5")
        await job.until(_replaced)
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    assert {event.incarnation for event in job.events if event.incarnation} == {1}
