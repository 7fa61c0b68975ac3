"""A component over real gRPC: a command takes effect once, and a refusal says why in words."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import JOB, NODES, snapshot
from tests.unit.runtime.diary import LEAD_TTL_MS, ROLE, WatchedStore, no_gates
from tests.unit.runtime.served_component import served
from tidegate.adapters.cell_store import COUNTS_PER_TERM
from tidegate.ownership.adoption import adopt
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.types import CommandId, instance_id
from tidegate.v1 import commands_pb2


async def test_a_command_sent_again_gets_the_stored_answer_and_is_worked_on_once(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        request = of.load(1)
        want = commands_pb2.CommandResult(accepted=True)
        assert [await of.send(request) for _ in range(3)] == [want] * 3
        assert await of.send(of.load(2)) == want
        await of.until("supersede", "load 1", "load 2")
        stored = await of.hosted.store.recall(JOB, CommandId(request.header.id))
        assert stored == want.SerializeToString()


async def test_a_command_whose_caller_dies_while_it_is_stored_is_worked_on_without_a_repeat(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        of.log.may_answer.clear()
        calling = asyncio.create_task(of.send(of.load(1)))
        await of.log.written.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        # The server hears of the end of one call before it takes the next one on the connection.
        assert not (await of.send(of.load(2, lead_epoch=9))).accepted
        of.log.may_answer.set()
        await of.until("supersede", "load 1")


async def test_a_command_whose_storing_has_an_unknown_outcome_is_worked_on_once_when_it_comes_again(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as of:
        request = of.load(1)
        of.log.loses_answers = True
        with pytest.raises(PeerUnavailable, match="the answer is lost"):
            await of.send(request)
        of.log.loses_answers = False
        assert [(await of.send(request)).accepted for _ in range(2)] == [True, True]
        assert (await of.send(of.load(2))).accepted
        await of.until("supersede", "load 1", "load 2")


async def test_the_first_after_a_failover_of_the_store_is_taken_once_it_is_adopted(tmp_path: Path) -> None:
    async with served(tmp_path, beat_s=1000) as of:
        hosted = of.hosted
        hosted.server.restart()
        sending = asyncio.create_task(of.send(of.load(1, term=2)))
        await hosted.refused()
        await adopt(WatchedStore(hosted.server, hosted.bench.changes), hosted.bench.bus.term, no_gates)
        assert (await sending).accepted
        await of.until("supersede", "load 1")
        await hosted.bench.published("instance_joined", count=2)


async def test_a_command_that_was_decided_before_a_failover_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, beat_s=1000) as of:
        hosted = of.hosted
        before, repeated = of.load(2), of.load(1)
        await of.send(repeated)
        await of.until("supersede", "load 1")
        hosted.server.restart()
        with pytest.raises(PeerRefused, match="the store is not open under"):
            await of.send(before)
        await adopt(WatchedStore(hosted.server, hosted.bench.changes), hosted.bench.bus.term, no_gates)
        assert (await of.send(of.load(3, term=2))).accepted
        assert await of.send(before) == commands_pb2.CommandResult(
            accepted=False, message="the command is for term 1 of the store, which is under 2 now"
        )
        assert (await of.send(repeated)).accepted, "it has been taken"
        await of.until("supersede", "load 1", "load 3")


async def test_a_command_sent_again_brings_the_present_addresses(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        request = of.load(1)
        await of.send(request)
        await of.until("load 1")
        (address, *_) = request.header.instances
        for boot, endpoint in ((address.boot + 2, "127.0.0.1:2"), (address.boot + 1, "127.0.0.1:1")):
            address.boot, address.endpoint = boot, endpoint
            await of.send(request)
        assert of.lead.crew.endpoint(NODES[0]) == "127.0.0.1:2", "of the newest start"


async def test_a_command_sent_twice_at_once_is_worked_on_once(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        request = of.load(1)
        answers = await asyncio.gather(*(of.send(request) for _ in range(8)))
        assert all(answer.accepted for answer in answers)
        await of.send(of.load(2))
        await of.until("supersede", "load 1", "load 2")


async def test_a_repeat_gets_the_stored_answer_also_when_the_lead_is_another_by_now(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        request = of.load(1)
        await of.send(request)
        await of.until("load 1")
        other = await of.hosted.other_client()
        of.hosted.server.pass_ms(LEAD_TTL_MS)
        await other.campaign(JOB, ROLE, instance=instance_id(ROLE, NODES[1]), endpoint="at-n1", ttl_ms=10**6)
        await of.hosted.next_beat()
        assert (await of.send(request)).accepted
        assert not (await of.send(of.load(2))).accepted
        assert [line for line in of.lead.diary if line != "supersede"] == ["load 1"]


async def test_all_commands_of_an_iteration_are_taken(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        bench = of.hosted.bench
        of.lead.may_end.set()
        up = bench.scale_up()
        assert (await of.stub.ScaleUp(up)).result.accepted
        assert (await of.stub.OpenIteration(bench.open_iteration())).result.accepted
        close = commands_pb2.CloseIterationRequest(header=bench.header(), iteration=0)
        assert (await of.stub.CloseIteration(close)).result.accepted
        down = commands_pb2.ScaleDownRequest(header=bench.header(), grants=up.grants)
        assert (await of.stub.ScaleDown(down)).result.accepted
        await bench.published("gpus_released")
        assert [line for line in of.lead.diary if line != "supersede"] == [
            "scale up in 1",
            "begin 0",
            "end 0",
            "close 0",
        ]


@pytest.mark.parametrize(
    ("header", "want"),
    [
        ({"lead_epoch": 9}, f"the command is for epoch 9, inference@n0 leads under {COUNTS_PER_TERM + 1}"),
        ({"job": "another"}, "is for job 'another', this instance works for 'bench'"),
        ({"incarnation": 2}, "is of incarnation 2, the component is at 3"),
    ],
    ids=["a wrong epoch", "another job", "an older incarnation"],
)
async def test_a_refused_command_gets_the_reason_and_may_come_again(
    tmp_path: Path, header: dict[str, Any], want: str
) -> None:
    async with served(tmp_path) as of:
        await of.send(of.load(1, incarnation=3))
        await of.until("load 1")
        request = of.load(2, **{"incarnation": 3, **header})
        answer = await of.send(request)
        assert not answer.accepted
        assert want in answer.message
        assert await of.hosted.store.recall(JOB, CommandId(request.header.id)) is None
        request.header.CopyFrom(of.load(2, incarnation=3, id=request.header.id).header)
        assert (await of.send(request)).accepted
        await of.until("load 1", "load 2")


async def test_a_component_that_cannot_move_while_it_works_refuses_migrate(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        up = of.hosted.bench.scale_up()
        request = commands_pb2.MigrateRequest(header=up.header, members=up.members, layout=up.layout)
        answer = (await of.stub.Migrate(request)).result
        assert (answer.accepted, "only an actor moves while it works" in answer.message) == (False, True)
        assert of.lead.diary == []


async def test_a_component_that_does_not_generate_refuses_to_evaluate(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        answer = (await of.stub.Evaluate(of.hosted.bench.evaluate())).result
        assert (answer.accepted, "only a rollout evaluates" in answer.message) == (False, True)
        assert of.lead.diary == []


async def test_a_component_that_does_not_train_refuses_to_hold(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        request = commands_pb2.HoldTrainingRequest(header=of.hosted.bench.header(), holds=True)
        answer = (await of.stub.HoldTraining(request)).result
        assert (answer.accepted, "only an actor trains" in answer.message) == (False, True)
        assert of.lead.diary == []


async def test_a_component_without_an_order_of_groups_refuses_one(tmp_path: Path) -> None:
    async with served(tmp_path) as of:
        order = commands_pb2.OrderGroupsRequest(header=of.hosted.bench.header(), groups=[1, 0])
        answer = (await of.stub.OrderGroups(order)).result
        assert (answer.accepted, "only a rollout orders its groups" in answer.message) == (False, True)
        assert of.lead.diary == []


@pytest.mark.parametrize(
    ("method", "request_of", "want"),
    [
        ("LoadWeights", lambda of: commands_pb2.LoadWeightsRequest(weights=snapshot(1)), "LoadWeightsRequest.header"),
        (
            "LoadWeights",
            lambda of: commands_pb2.LoadWeightsRequest(header=of.hosted.bench.header()),
            "LoadWeightsRequest.weights",
        ),
        ("LoadWeights", lambda of: of.load(1, id=""), "CommandHeader.id"),
        ("LoadWeights", lambda of: of.load(1, lead_epoch=0), "CommandHeader.lead_epoch"),
        ("LoadWeights", lambda of: of.load(1, term=0), "CommandHeader.term"),
        ("ScaleUp", lambda of: commands_pb2.ScaleUpRequest(header=of.hosted.bench.header()), "ScaleUpRequest.grants"),
        (
            "ScaleDown",
            lambda of: commands_pb2.ScaleDownRequest(header=of.hosted.bench.header()),
            "ScaleDownRequest.grants",
        ),
        (
            "OpenIteration",
            lambda of: commands_pb2.OpenIterationRequest(header=of.hosted.bench.header()),
            "OpenIterationRequest.plan",
        ),
    ],
    ids=[
        "no header",
        "no weights",
        "no id",
        "no epoch",
        "no term",
        "no GPUs to acquire",
        "no GPUs to release",
        "no plan",
    ],
)
async def test_a_command_that_lacks_a_field_is_refused_by_its_name(
    tmp_path: Path, method: str, request_of: Any, want: str
) -> None:
    async with served(tmp_path) as of:
        with pytest.raises(PeerRefused, match=f"{want} is missing") as refused:
            await getattr(of.stub, method)(request_of(of))
        assert (refused.value.status, refused.value.error) == ("INVALID_ARGUMENT", "WireError")
        assert of.lead.diary == []
