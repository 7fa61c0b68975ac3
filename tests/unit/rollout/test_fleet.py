"""Engines come, leave and stand by beside all other commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.component_bench import NODES, Changes, snapshot
from tests.unit.rollout.fake_engines import (
    FIRST,
    PLENTY,
    SECOND,
    Engines,
    FakeEngine,
    RolloutBench,
    engine_at_work,
    give,
    rollout,
)
from tests.unit.rollout.outcomes import assert_whole_iteration, scale_down
from tidegate.job import Job
from tidegate.runtime.crew import WorkerRefused
from tidegate.types import NO_TOKEN, Grant
from tidegate.v1 import commands_pb2
from tidegate.v1 import workers_pb2 as wire

STANDBY = {"standby": "2,6"}
"""The slots of the rollout's own placement."""


class SlowEngine(FakeEngine):
    """Its engine is built when `may_start` is set. It notes what it is asked to load and whether it stands by."""

    def __init__(self, job: Job, grant: Grant, changes: Changes, *, num_permits: int) -> None:
        super().__init__(job, grant, changes, num_permits=num_permits)
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.is_starting = False
        self.memory_bytes = 1 << 20
        self.loaded: list[int] = []
        self.gone_version: int | None = None
        self.calls: list[str] = []

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        kind = call.WhichOneof("body") or ""
        self.calls.append("stand_by" if call.start_engine.stands_by else kind)
        if kind == "start_engine":
            self.is_starting = True
            self._changes.notify()
            await self.may_start.wait()
        if kind == "load_shards":
            self.loaded.append(call.load_shards.version)
            self._changes.notify()
            await self.may_load.wait()
            if call.load_shards.version == self.gone_version:
                raise WorkerRefused(f"version {self.gone_version} is gone")
        async for reply in super().handle(call):
            if kind == "start_engine":
                reply.started.memory_bytes = self.memory_bytes
            yield reply
        self._changes.notify()


class SlowEngines(Engines):
    """`holds` are GPUs whose next worker does not start, `slow_loads` those whose next worker does not load."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: set[str] = set()
        self.slow_loads: set[str] = set()
        self.memory_bytes = 1 << 20
        self.slow: dict[str, SlowEngine] = {}

    def make(self, job: Job, grant: Grant, changes: Changes) -> FakeEngine:
        engine = SlowEngine(job, grant, changes, num_permits=self.num_permits.get(grant.gpu, PLENTY))
        engine.memory_bytes = self.memory_bytes
        if grant.gpu in self.holds:
            engine.may_start.clear()
        if grant.gpu in self.slow_loads:
            engine.may_load.clear()
        self.of[grant.gpu] = self.slow[grant.gpu] = engine
        return engine


async def grow_slowly(of: RolloutBench, engines: SlowEngines) -> commands_pb2.ScaleUpRequest:
    """The first engine is at work, and the second does not get further than its start."""
    first, second = of.grants()
    give(of, of.scale_up([first], weights=snapshot(0)))
    await of.published("layout_committed")
    engines.holds.add(SECOND)
    up = of.scale_up([second], members=[first, second], weights=snapshot(0))
    give(of, up)
    await of.changes.until(lambda: SECOND in engines.slow and engines.slow[SECOND].is_starting)
    return up


async def test_an_engine_that_starts_delays_no_other_command(tmp_path: Path) -> None:
    engines = SlowEngines()
    async with rollout(tmp_path, engines) as of:
        await grow_slowly(of, engines)
        give(of, of.open_iteration())
        await assert_whole_iteration(of)
        lead = give(of, commands_pb2.CloseIterationRequest(header=of.header(), iteration=0))
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
        await of.published("weights_loaded")
        assert engines.slow[SECOND].loaded == []
        engines.slow[SECOND].may_start.set()
        await of.published("layout_committed", count=2)
        assert engines.slow[SECOND].loaded == [1], "it loads the newest version only"


async def test_an_engine_that_comes_loads_the_version_that_came_meanwhile(tmp_path: Path) -> None:
    engines = SlowEngines()
    engines.slow_loads.add(SECOND)
    async with rollout(tmp_path, engines) as of:
        await grow_slowly(of, engines)
        engines.slow[SECOND].may_start.set()
        await of.changes.until(lambda: engines.slow[SECOND].loaded == [0])
        lead = give(of, commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
        await of.published("weights_loaded")
        engines.slow[SECOND].may_load.set()
        await of.published("layout_committed", count=2)
        assert engines.slow[SECOND].loaded == [0, 1]
        engines.num_permits[FIRST] = 0
        lead.take(of.open_iteration(1, version=1))
        await assert_whole_iteration(of, version=1, iteration=1)
        assert engines.slow[SECOND].made


async def test_a_start_that_is_asked_again_goes_on_and_one_that_is_done_is_announced_again(tmp_path: Path) -> None:
    engines = SlowEngines()
    async with rollout(tmp_path, engines) as of:
        up = await grow_slowly(of, engines)
        again = commands_pb2.ScaleUpRequest()
        again.CopyFrom(up)
        again.header.id = "another-attempt"
        give(of, again)
        engines.slow[SECOND].may_start.set()
        await of.published("layout_committed", count=2)
        again.header.id = "a-third"
        give(of, again)
        await of.published("layout_committed", count=3)
        assert of.instances[NODES[1]].started == [of.grants()[1]]
        assert engines.slow[SECOND].calls.count("start_engine") == 1


async def test_an_engine_that_is_still_starting_can_be_released(tmp_path: Path) -> None:
    engines = SlowEngines()
    async with rollout(tmp_path, engines) as of:
        first, second = of.grants()
        await grow_slowly(of, engines)
        give(of, scale_down(of, [second], [first]))
        (released,) = await of.published("gpus_released")
        assert [grant.gpu for grant in released.gpus_released.grants] == [SECOND]
        assert await of.instances[NODES[1]].workers(of.leads[0].tools.job_id) == ()
        give(of, of.open_iteration())
        await assert_whole_iteration(of)
        assert "failed" not in await of.kinds()


@pytest.mark.parametrize("comes_newer", [True, False], ids=["a newer one comes", "no newer one comes"])
async def test_an_engine_whose_version_is_dropped_meanwhile_loads_the_newer_one_or_fails(
    comes_newer: bool, tmp_path: Path
) -> None:
    engines = SlowEngines()
    engines.slow_loads.add(SECOND)
    async with rollout(tmp_path, engines) as of:
        await grow_slowly(of, engines)
        engine = engines.slow[SECOND]
        engine.may_start.set()
        await of.changes.until(lambda: engine.loaded == [0])
        if comes_newer:
            give(of, commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
            await of.published("weights_loaded")
        engine.gone_version = 0
        engine.may_load.set()
        if comes_newer:
            await of.published("layout_committed", count=2)
            assert engine.loaded == [0, 1]
            assert "failed" not in await of.kinds()
        else:
            (failed,) = await of.published("failed")
            assert "version 0 is gone" in failed.failed.message


async def test_a_release_that_its_node_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    async with rollout(tmp_path, SlowEngines()) as of:
        first, second = of.grants()
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        away = of.instances[NODES[1]]
        away.is_silent = True
        with capture_logs() as lines:
            give(of, scale_down(of, [second], [first]), of.open_iteration())
            await of.published("iteration_reported")
            await away.unanswered.until(lambda: away.num_unanswered == 3)
            away.silence = "cannot be reached"
            await away.unanswered.until(lambda: away.num_unanswered == 4)
            away.is_silent = False
            await of.published("gpus_released")
        errors = [line["error"] for line in lines if line["event"] == "stop not answered"]
        assert errors == ["the instance on n1 gave no answer", "the instance on n1 cannot be reached"]
        assert await away.workers(of.leads[0].tools.job_id) == ()
        await of.published("layout_committed", count=2)


async def test_a_new_lead_starts_again_what_the_one_before_had_not_finished(tmp_path: Path) -> None:
    engines = SlowEngines()
    async with rollout(tmp_path, engines) as of:
        up = await grow_slowly(of, engines)
        await of.leads[-1].aclose()
        engines.holds.clear()
        lead = of.new_lead()
        load = commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0))
        load.header.members.extend(up.members[:1])
        lead.take(load)
        again = of.scale_up([of.grants()[1]], members=of.grants(), weights=snapshot(0))
        lead.take(again)
        await of.published("layout_committed", count=2)
        assert len(of.instances[NODES[1]].started) == 2
        assert "failed" not in await of.kinds()


async def test_a_newer_incarnation_does_not_end_a_start_but_its_old_weights(tmp_path: Path) -> None:
    engines = SlowEngines()
    async with rollout(tmp_path, engines) as of:
        await grow_slowly(of, engines)
        lead = give(
            of, commands_pb2.LoadWeightsRequest(header=of.header(incarnation=2), weights=snapshot(0, incarnation=2))
        )
        await of.published("weights_loaded")
        engines.slow[SECOND].may_start.set()
        await of.published("layout_committed", count=2)
        lead.take(of.open_iteration(incarnation=2))
        (report,) = await of.published("iteration_reported")
        assert report.incarnation == 2
        assert engines.slow[SECOND].loaded == [0]


async def test_an_engine_stands_by_on_each_slot_and_a_start_there_is_only_a_load(tmp_path: Path) -> None:
    engines = SlowEngines()
    async with rollout(tmp_path, engines, rollout=STANDBY) as of:
        first, second = of.grants()
        give(of, of.scale_up([first], weights=snapshot(0)))
        await of.changes.until(lambda: SECOND in engines.slow and engines.slow[SECOND].calls == ["stand_by"])
        assert await of.instances[NODES[1]].workers(of.leads[0].tools.job_id) == (Grant(second.gpu, NO_TOKEN),)
        give(of, of.scale_up([second], members=[first, second], weights=snapshot(0)))
        await of.published("layout_committed", count=2)
        assert engines.slow[SECOND].calls == ["stand_by", "start_engine", "load_shards"]
        give(of, scale_down(of, [second], [first]))
        await of.published("gpus_released")
        assert engines.slow[SECOND].calls[-1] == "stand_by"
        assert len(of.instances[NODES[1]].started) == 1, "one process all the time"
        assert await of.instances[NODES[1]].workers(of.leads[0].tools.job_id) == (Grant(second.gpu, NO_TOKEN),)


async def test_a_standby_that_takes_too_much_memory_is_ended_and_its_slot_starts_cold(tmp_path: Path) -> None:
    engines = SlowEngines()
    engines.memory_bytes = 3 << 20
    async with rollout(tmp_path, engines, rollout=STANDBY | {"standby_memory_mib": 2}) as of:
        first, second = of.grants()
        instance = of.instances[NODES[1]]
        give(of, of.scale_up([first], weights=snapshot(0)))
        await of.changes.until(lambda: SECOND in engines.slow and engines.slow[SECOND].calls == ["stand_by"])
        give(of, of.scale_up([second], members=[first, second], weights=snapshot(0)))
        await of.published("layout_committed", count=2)
        assert instance.started == [Grant(second.gpu, NO_TOKEN), second]
        give(of, scale_down(of, [second], [first]))
        await of.published("gpus_released")
        assert await instance.workers(of.leads[0].tools.job_id) == ()


async def test_without_a_slot_to_get_no_engine_stands_by(tmp_path: Path) -> None:
    engines = SlowEngines()
    async with rollout(tmp_path, engines) as of:
        first, second = of.grants()
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        give(of, scale_down(of, [second], [first]), of.open_iteration())
        await assert_whole_iteration(of)
        assert await of.instances[NODES[1]].workers(of.leads[0].tools.job_id) == ()


async def test_prompts_go_to_engines_in_the_order_that_the_policy_gives(tmp_path: Path) -> None:
    engines = SlowEngines()
    engines.num_permits = {FIRST: 0, SECOND: 0}
    async with rollout(tmp_path, engines, rollout={"max_running_requests": 2}) as of:
        (first, _), lead = of.grants(), of.new_lead()
        lead.take(of.scale_up([first], weights=snapshot(0)))
        await of.published("layout_committed")
        for iteration, groups in ((0, [3, 1]), (0, [2, 3]), (1, [1])):
            order = commands_pb2.OrderGroupsRequest(header=of.header(), iteration=iteration, groups=groups)
            lead.check(order)
            lead.take(order)
            if iteration == 0 and groups == [3, 1]:
                lead.take(of.open_iteration())
                await engine_at_work(of, engines, FIRST, num_made=0)
                assert [sample.prompt for sample in engines.of[FIRST].asked] == [3, 3]
        engines.open(FIRST)
        await assert_whole_iteration(of)
        assert [sample.prompt for sample in engines.of[FIRST].asked] == [3, 3, 2, 2, 0, 0, 1, 1]
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
        lead.take(of.open_iteration(1, version=1))
        await of.published("iteration_reported", count=2)
        assert [sample.prompt for sample in engines.of[FIRST].asked[8:10]] == [5, 5]
