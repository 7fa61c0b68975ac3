"""Engines with real SGLang servers come and go under the lead: what moves keeps its values, and a killed server costs
only what it had not handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.rollout.sglang.start import ENGINE_LOST_STATUS
from tests.integration.rollout.sglang_processes import ServerBench, ordered, server_bench
from tests.unit.rollout.fake_engines import FIRST, SECOND
from tests.unit.rollout.outcomes import all_ids, groups_on_stream, scale_down
from tests.unit.rollout.real_engines import published_weights
from tidegate.codec import decode_sample_id
from tidegate.job import load_job
from tidegate.types import Grant
from tidegate.v1 import samples_pb2, types_pb2

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LONG: dict[str, Any] = {"prompts_per_iteration": 4, "group_size": 2, "max_new_tokens": 64}
BOTH = "2,6"


def weights_of(bench: ServerBench) -> types_pb2.Snapshot:
    """Random weights with which responses practically end at their limit alone."""
    return published_weights(bench.of, 0, never=load_job(bench.of.config).tokenizer.end_ids)


def renewed(grant: Grant, counter: int) -> Grant:
    return replace(grant, token=replace(grant.token, counter=counter))


async def samples_of(bench: ServerBench) -> dict[Any, samples_pb2.Sample]:
    """The responses of the iteration, once it is reported. Each is there once, with values for each token."""
    await bench.of.published("iteration_reported")
    samples = [sample for group in await groups_on_stream(bench.of) for sample in group.samples]
    assert [decode_sample_id(sample.id) for sample in samples] == all_ids(bench.of)  # type: ignore[arg-type] # any bench
    for sample in samples:
        assert len(sample.engine_log_probs) == len(sample.response_tokens)
        assert [(run.version, run.num_tokens) for run in sample.versions] == [(0, len(sample.response_tokens))]
    return {decode_sample_id(sample.id): sample for sample in samples}


def assert_kept(bench: ServerBench, samples: dict[Any, samples_pb2.Sample]) -> list[int]:
    """What was handed over is in the responses with its own values. Returns its lengths."""
    lengths = []
    for _, sample, part in bench.records.handed_over:
        num_tokens = len(part.response_tokens)
        assert samples[sample].response_tokens[:num_tokens] == part.response_tokens
        assert samples[sample].engine_log_probs[:num_tokens] == part.engine_log_probs
        lengths.append(num_tokens)
    return lengths


async def figures(bench: ServerBench, names: Sequence[str]) -> list[float]:
    (*_, last) = [event.progress for event in bench.of.events.all if event.HasField("progress")]
    return [last.metrics[name] for name in names]


async def test_responses_move_to_a_standby_and_back_and_keep_their_values(tmp_path: Path) -> None:
    async with server_bench(tmp_path, standby=BOTH, **LONG) as bench:
        of, weights = bench.of, weights_of(bench)
        first, second = ordered(of.grants())
        lead = of.new_lead()
        lead.take(of.scale_up([first], weights=weights))
        await of.published("layout_committed")
        await bench.until(lambda: (SECOND, "start_engine") in bench.records.calls)
        lead.take(of.scale_up([second], members=[first, second], weights=weights))
        await of.published("layout_committed", count=2)
        servers = {gpu: bench.servers(gpu) for gpu in (FIRST, SECOND)}
        assert all(len(found) == 1 for found in servers.values())

        lead.take(scale_down(of, [second], [first]))
        await of.published("gpus_released")
        lead.take(of.open_iteration())
        holder, other = first, second
        for count, position in enumerate((3, 14, 33), start=1):
            await bench.until_generated(lead, holder, position)
            comes = renewed(other, 10 + count)
            lead.take(of.scale_up([comes], members=[holder, comes], weights=weights))
            await of.published("layout_committed", count=len(_committed(bench)) + 1)
            lead.take(scale_down(of, [holder], [comes]))
            await of.published("gpus_released", count=1 + count)
            holder, other = comes, holder
        lengths = assert_kept(bench, await samples_of(bench))

        assert {gpu: bench.servers(gpu) for gpu in servers} == servers, "no server started or ended on the way"
        assert len({length for length in lengths if length}) >= 3, "they moved at several positions"
        want = [float(sum(length > 0 for length in lengths)), float(sum(lengths)), 0.0]
        assert await figures(bench, ["num_moves", "num_moved_tokens", "num_lost_tokens"]) == want
        assert bench.deaths == {}


def _committed(bench: ServerBench) -> list[Any]:
    return [event for event in bench.of.events.all if event.HasField("layout_committed")]


async def test_a_server_killed_while_its_engine_hands_over_costs_only_its_responses(tmp_path: Path) -> None:
    async with server_bench(tmp_path, **LONG) as bench:
        of = bench.of
        first, second = ordered(of.grants())
        lead = of.new_lead()
        lead.take(of.scale_up(weights=weights_of(bench)))
        await of.published("layout_committed")
        lead.take(of.open_iteration())
        for grant in (first, second):
            await bench.until_generated(lead, grant, 4)
        bench.scheduler(FIRST).suspend()
        lead.take(scale_down(of, [first], [second]))
        await bench.until(lambda: (FIRST, "abort") in bench.records.calls)
        bench.servers(FIRST)[0].kill()
        (released,) = await of.published("gpus_released")
        assert [grant.gpu for grant in released.gpus_released.grants] == [FIRST]
        await samples_of(bench)
        assert bench.records.handed_over == []
        assert bench.deaths == {FIRST: ENGINE_LOST_STATUS}


async def test_a_server_killed_while_it_stands_by_or_comes_costs_the_others_nothing(tmp_path: Path) -> None:
    async with server_bench(tmp_path, standby=BOTH, **LONG) as bench:
        of, weights = bench.of, weights_of(bench)
        first, second = ordered(of.grants())
        lead = of.new_lead()
        lead.take(of.scale_up([first], weights=weights))
        await of.published("layout_committed")
        await bench.until(lambda: bool(bench.servers(SECOND)) and _has_scheduler(bench, SECOND))
        bench.servers(SECOND)[0].kill()
        await bench.until(lambda: not bench.servers(SECOND))

        lead.take(of.scale_up([second], members=[first, second], weights=weights))
        await of.published("layout_committed", count=2)
        lead.take(scale_down(of, [second], [first]))
        await of.published("gpus_released")
        lead.take(of.open_iteration())
        await bench.until_generated(lead, first, 3)
        bench.scheduler(SECOND).suspend()
        loads = bench.records.calls.count((SECOND, "load_shards"))
        comes = renewed(second, 12)
        lead.take(of.scale_up([comes], members=[first, comes], weights=weights))
        await bench.until(lambda: bench.records.calls.count((SECOND, "load_shards")) > loads)
        bench.servers(SECOND)[0].kill()
        (failed,) = await of.published("failed")
        assert not failed.failed.fatal
        assert [grant.gpu for grant in failed.failed.grants] == [SECOND]
        await samples_of(bench)
        assert bench.records.handed_over == []
        assert bench.deaths[SECOND] == ENGINE_LOST_STATUS


def _has_scheduler(bench: ServerBench, gpu: str) -> bool:
    try:
        return bool(bench.scheduler(gpu))
    except StopIteration:
        return False
