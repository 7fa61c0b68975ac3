"""A job whose actor is resized while it trains: every sample once, no incarnation spent, those that leave stand by."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.jobs import RunningJob, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.codec import decode_layout, encode_layout
from tidegate.launcher.control import control_of
from tidegate.types import Layout
from tidegate.v1 import control_pb2


async def resize(job: RunningJob, layout: Layout, *gpus: str) -> None:
    """Ask for it and wait for its commit; AssertionError when it fails instead."""
    async with control_of(job.folder) as stub:
        request = control_pb2.ResizeActorRequest(job=job.config.job, layout=encode_layout(layout), gpus=gpus)
        await stub.ResizeActor(request, timeout=10.0)
    ended = await job.until(
        lambda event: (
            event.WhichOneof("body") == "resize_failed"
            or (
                event.WhichOneof("body") == "layout_committed"
                and event.layout_committed.HasField("reshard")
                and decode_layout(event.layout_committed.layout) == layout
                and [grant.gpu for grant in event.layout_committed.grants] == list(gpus)
            )
        )
    )
    assert ended.WhichOneof("body") == "layout_committed", ended.resize_failed.message


async def test_an_actor_grows_moves_and_shrinks_while_the_job_goes_on(tmp_path: Path) -> None:
    changes = {"cluster__component_placement__actor": "0-1", "actor__layout": {"tp": 2}, "actor__standby": "4-5"}
    async with running(small_job("resized", **changes, algorithm__iterations=4), tmp_path) as job:
        await job.until(updated(0))
        await resize(job, Layout(tp=2, dp=2), "n0/0", "n0/1", "n1/0", "n1/1")
        await job.until(updated(1))
        await resize(job, Layout(pp=2), "n1/0", "n1/1")
        held = job.gates()
        await job.until(updated(2))
        await resize(job, Layout(tp=1), "n1/1")
        summary = (await job.result())["summary"]
        draws = trained_draws(job.folder.journal)
    assert [held[gpu] for gpu in ("n0/0", "n0/1", "n1/0", "n1/1")] == [False, False, True, True]
    assert draws == expected_draws(iterations=4, prompts=8, group_size=4)
    assert (summary["samples_trained"], summary["lost"], summary["duplicates"]) == (128, 0, 0)
    assert {event.incarnation for event in job.events if event.incarnation} == {1}
