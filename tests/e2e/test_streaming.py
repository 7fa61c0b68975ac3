"""A whole job that trains minibatches while their groups arrive ends with the weights of one that waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import running, small_job
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.timeline import read_spans
from tidegate.types import GpuId

ONE_GROUP_AT_A_TIME = {
    "cluster__nodes": {"n0": 4},
    "cluster__component_placement": {"actor": "0-1", "rollout": "2", "inference": "3"},
    "actor__layout": {"dp": 2},
    "actor__num_logical_shards": 4,
    "actor__micro_batch_size": 4,
    "algorithm__n_minibatches": 1,
    "rollout__max_running_requests": 4,
}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_streamed_job_has_the_weights_of_one_that_waits_for_whole_minibatches(tmp_path: Path) -> None:
    summaries: list[dict[str, Any]] = []
    num_spans: list[int] = []
    for name, streams in (("streamed", True), ("whole", False)):
        (folder := tmp_path / name).mkdir()
        config = small_job("stream", **ONE_GROUP_AT_A_TIME, actor__streams_minibatches=streams)
        async with running(config, folder) as job:
            summaries.append((await job.result())["summary"])
            assert trained_draws(job.folder.journal) == expected_draws(iterations=3, prompts=8, group_size=4)
            spans = read_spans(job.folder.root / "latest" / "timeline")[GpuId("n0/0")]
            num_spans.append(sum(span.state == "training" and "minibatch" in dict(span.work) for span in spans))
    streamed, whole = summaries
    assert num_spans[0] > num_spans[1], "no minibatch trained in portions"
    assert (streamed["lost"], streamed["duplicates"], streamed["samples_trained"]) == (0, 0, 96)
    assert streamed["weights_checksum"] == whole["weights_checksum"]
