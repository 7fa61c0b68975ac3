"""A job whose actor is resized while it trains: every sample once, no incarnation spent, ranks become standbys."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.__main__ import main
from tests.e2e.jobs import REPOSITORY, RunningJob, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.codec import decode_layout, encode_layout
from tidegate.launcher.control import control_of
from tidegate.lr.schedule import Decay, LrSchedule
from tidegate.types import Layout
from tidegate.v1 import control_pb2


async def resize(job: RunningJob, layout: Layout, *gpus: str) -> None:
    """Requests a resize and waits for its commit. AssertionError when it fails instead."""
    num_before = len(job.events)
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
        ),
        after=num_before,
    )
    assert ended.WhichOneof("body") == "layout_committed", ended.resize_failed.message


@pytest.mark.long
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
        rates = [json.loads(line)["learning_rate"] for line in job.folder.journal.read_text().splitlines()]
    schedule = LrSchedule(1e-3, budget=8, decay=Decay.COSINE)
    assert rates == [schedule.rate(step) for step in range(8)], "no resize moves the rate of any rank's optimizer"
    assert [held[gpu] for gpu in ("n0/0", "n0/1", "n1/0", "n1/1")] == [False, False, True, True]
    assert draws == expected_draws(iterations=4, prompts=8, group_size=4)
    assert (summary["samples_trained"], summary["lost"], summary["duplicates"]) == (128, 0, 0)
    assert {event.incarnation for event in job.events if event.incarnation} == {1}


@pytest.mark.long
async def test_a_job_that_starts_in_context_parallelism_is_scaled_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = {"actor": "0-1", "rollout": "2-3", "inference": "6-7"}
    changes = {"cluster__component_placement": placement, "actor__layout": {"cp": 2}, "inference__layout": {"cp": 2}}
    async with running(small_job("cut", **changes, actor__standby="4-5", algorithm__iterations=4), tmp_path) as job:

        async def scaled(*arguments: str) -> tuple[int, str]:
            output_dir = str(job.folder.root.parent)
            code = await asyncio.to_thread(main, ["scale", "cut", "--output-dir", output_dir, *arguments])
            said = capsys.readouterr()
            return code, said.out + said.err

        await job.until(updated(0))
        in_force = await scaled("--layout", "cp=2", "--wait")
        moved = await scaled("--layout", "dp=2,cp=2", "--wait")
        impossible = await scaled("--layout", "cp=3", "--wait")
        summary = (await job.result())["summary"]
        draws = trained_draws(job.folder.journal)
    assert in_force[0] == 0
    assert in_force[1].startswith("job cut: is there already: actor cp2 on n0/0, n0/1; rollout ")
    assert moved == (0, "job cut: is there now: actor dp2-cp2 on n0/0, n0/1, n1/0, n1/1\n")
    assert impossible[0] == 2
    assert impossible[1].startswith("tidegate: job cut: layout cp3 does not fit: positions of a row % (2 * cp)")
    assert draws == expected_draws(iterations=4, prompts=8, group_size=4)
    assert (summary["samples_trained"], summary["lost"], summary["duplicates"]) == (128, 0, 0)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_resize_under_a_token_cap_changes_no_weight_of_a_reproducible_job(tmp_path: Path) -> None:
    capped = {"actor__max_tokens_per_microbatch": 192, "actor__num_logical_shards": 4}
    small = {"cluster__component_placement__actor": "0-1", "actor__layout": {"tp": 2}, "actor__standby": "4-5"}
    summaries = []
    for name, changes in (("fixed", {}), ("resized", small)):
        (folder := tmp_path / name).mkdir()
        async with running(small_job("capped", **capped, **changes), folder) as job:
            if changes:
                await job.until(updated(0))
                await resize(job, Layout(tp=2, dp=2), "n0/0", "n0/1", "n1/0", "n1/1")
            summaries.append((await job.result())["summary"])
            assert trained_draws(job.folder.journal) == expected_draws(iterations=3, prompts=8, group_size=4)
    fixed, resized = summaries
    assert (resized["lost"], resized["duplicates"], resized["samples_trained"]) == (0, 0, 96)
    assert resized["weights_checksum"] == fixed["weights_checksum"]


SLOTS = tuple(f"n0/{index}" for index in (0, 1, 2, 3, 8, 9))
SAME_BITS = tuple(Layout(tp=2, pp=pp, dp=dp) for pp, dp in ((1, 1), (1, 2), (2, 1)))
"""Layouts between which a reproducible run's weights do not differ."""
ANY = (*SAME_BITS, *(Layout(pp=pp, dp=dp) for pp in (1, 2) for dp in (1, 2, 3)), Layout(tp=2, dp=3), Layout(dp=6))


def demo(name: str, **actor: Any) -> dict[str, Any]:
    """The demo's job with two more slots for its actor."""
    raw: dict[str, Any] = yaml.safe_load((REPOSITORY / "tidegate" / "demo.yaml").read_text())
    raw["job"] = name
    raw["cluster"]["nodes"] = {"n0": 10}
    raw["actor"] |= {"standby": "8-9", **actor}
    return raw


async def resized_at_random(raw: dict[str, Any], folder: Path, layouts: tuple[Layout, ...]) -> dict[str, Any]:
    """Resizes eighteen times, as an iteration generates and between its updates. A fixed seed draws where to."""
    draw = random.Random(3)
    now = (Layout(tp=2, dp=2), SLOTS[:4])
    iterations, algorithm = raw["algorithm"]["iterations"], raw["algorithm"]
    async with running(raw, folder) as job:
        # In the last iteration the job may end before the resize.
        for iteration in range(iterations - 1):
            for moment in (generating(iteration), updated(iteration)):
                await job.until(moment)
                while (drawn := _drawn(draw, layouts)) == now:
                    pass
                await resize(job, drawn[0], *drawn[1])
                now = drawn
        summary: dict[str, Any] = (await job.result())["summary"]
        want = expected_draws(
            iterations=iterations, prompts=algorithm["prompts_per_iteration"], group_size=algorithm["group_size"]
        )
        assert trained_draws(job.folder.journal) == want
        assert {event.incarnation for event in job.events if event.incarnation} == {1}
    assert (summary["samples_trained"], summary["lost"], summary["duplicates"]) == (want.total(), 0, 0)
    return summary


def _drawn(draw: random.Random, layouts: tuple[Layout, ...]) -> tuple[Layout, tuple[str, ...]]:
    layout = draw.choice(layouts)
    return layout, tuple(draw.sample(SLOTS, layout.num_ranks))


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_demo_learns_through_eighteen_resizes_at_random(tmp_path: Path) -> None:
    summary = await resized_at_random(demo("anywhere"), tmp_path, ANY)
    assert summary["reward_last"] - summary["reward_first"] >= 0.25


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_reproducible_demo_ends_with_the_same_weights_after_eighteen_resizes_at_random(
    tmp_path: Path,
) -> None:
    raw = demo("reproducible", num_logical_shards=4)
    for name in ("resized", "fixed"):
        (tmp_path / name).mkdir()
    found = await resized_at_random(raw, tmp_path / "resized", SAME_BITS)
    async with running(raw, tmp_path / "fixed") as job:
        want = (await job.result())["summary"]
    assert found["weights_checksum"] == want["weights_checksum"]
