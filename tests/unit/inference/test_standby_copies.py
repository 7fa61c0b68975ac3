"""Copies of the inference that leave stand by, and come back with a weight load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.component_bench import JOB, NODES, snapshot
from tests.unit.inference.scoring_bench import FIRST, ONE_COPY, SECOND, SLOTS, Scoring, scoring
from tidegate.types import NO_TOKEN, GpuId, Grant
from tidegate.v1 import commands_pb2

MOVES: dict[str, Any] = {"scheduler": {"policy": "tide"}}
AT_REST = Grant(GpuId(SECOND), NO_TOKEN)


async def at_work(of: Scoring, **fields: Any) -> None:
    """Both copies hold version 0, and a worker stands by on each other slot."""
    of.new_lead(of.bench.scale_up(weights=snapshot(0), **fields))
    await of.bench.published("layout_committed")
    elsewhere = [gpu for gpu in SLOTS if gpu not in (FIRST, SECOND)]
    await of.bench.changes.until(lambda: all(gpu in of.ranks and of.ranks[gpu].starts for gpu in elsewhere))


def close(of: Scoring) -> commands_pb2.CloseIterationRequest:
    return commands_pb2.CloseIterationRequest(header=of.bench.header(), iteration=0)


async def test_a_copy_that_comes_back_as_it_left_only_loads_weights(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES) as of:
        await at_work(of)
        lead, instance = of.bench.leads[-1], of.bench.instances[NODES[1]]
        num_started = len(instance.started)
        for term in (2, 3):
            lead.take(of.leave(SECOND, term=term - 1))
            *_, released = await of.bench.published("gpus_released", count=term - 1)
            assert released.gpus_released.held_bytes == 7, "what the rank still uses"
            assert AT_REST in await instance.workers(JOB)
            lead.take(of.come(SECOND, term=term, weights=snapshot(0)))
            await of.bench.published("layout_committed", count=2 * term - 1)
        assert len(instance.started) == num_started, "one process all the time"
        world = f"{SECOND}@1.2"
        again = [("at rest", world, False), ("at work", world, False)]
        assert of.ranks[SECOND].starts == [("at work", world, True), *again, *again]
        assert of.ranks[SECOND].loads == [(0, False)], "at rest it has no weights"
        lead.take(of.bench.open_iteration())
        await of.generated(range(4))
        await of.bench.published("iteration_reported")
        assert of.scored() == [0, 1, 2, 3]


async def test_a_copy_on_a_slot_that_it_never_had_starts_with_a_model_that_is_built(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES) as of:
        await at_work(of)
        gpu = GpuId("n1/2")
        assert of.ranks[gpu].starts == [("at rest", f"{gpu}@0.0", True)]
        grant = Grant(gpu, of.bench.grants(term=2)[0].token)
        up = of.bench.scale_up([grant], members=[*of.bench.grants(), grant], weights=snapshot(0))
        of.bench.leads[-1].take(up)
        await of.bench.published("layout_committed", count=2)
        assert of.ranks[gpu].starts[1:] == [("at work", f"{gpu}@0.0", False)]


async def test_on_cuda_a_worker_builds_no_model_on_a_gpu_that_it_never_had(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES, cluster={"device": "cuda"}) as of:
        await at_work(of)
        assert of.ranks["n1/2"].starts == [("at rest", "", False)]


async def test_ranks_of_one_copy_stand_by_in_their_world(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES, **ONE_COPY) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)))
        await of.bench.published("layout_committed")
        lead = of.bench.leads[-1]
        lead.take(of.leave(FIRST, SECOND, transition="suspend"))
        await of.bench.published("gpus_released")
        lead.take(of.bench.scale_up(of.bench.grants(term=2), weights=snapshot(0)))
        await of.bench.published("layout_committed", count=2)
        world = f"{FIRST}@1.1"
        want = [("at work", world, True), ("at rest", world, False), ("at work", world, False)]
        assert [of.ranks[gpu].starts for gpu in (FIRST, SECOND)] == [want, want]


async def test_a_copy_forms_its_world_anew_where_one_of_its_ranks_died_at_rest(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES, **ONE_COPY) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("layout_committed")
        lead = of.bench.leads[-1]
        lead.take(of.leave(FIRST, SECOND, transition="suspend"))
        await of.bench.published("gpus_released")
        of.bench.instances[NODES[1]].kill(SECOND)
        lead.take(of.bench.scale_up(of.bench.grants(term=2), weights=snapshot(0)))
        await of.bench.published("layout_committed", count=2)
        anew = ("at work", f"{FIRST}@2.1", True)
        assert of.ranks[SECOND].starts == [anew]
        assert of.ranks[FIRST].starts[-1] == anew
        await of.generated(range(4))
        await of.bench.published("iteration_reported")
        assert sorted(of.watch.prompts("publish scored")) == [0, 1, 2, 3]


async def test_a_standby_that_died_is_replaced_when_the_iteration_closes(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES) as of:
        await at_work(of)
        lead, instance = of.bench.leads[-1], of.bench.instances[NODES[1]]
        lead.take(of.leave(SECOND))
        await of.bench.published("gpus_released")
        dead = of.ranks[SECOND]
        instance.kill(SECOND)
        lead.take(close(of))
        await of.bench.changes.until(lambda: of.ranks[SECOND] is not dead and bool(of.ranks[SECOND].starts))
        assert of.ranks[SECOND].starts == [("at rest", f"{SECOND}@0.0", True)]
        assert AT_REST in await instance.workers(JOB)


async def test_a_copy_that_hangs_as_it_leaves_does_not_stand_by(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, runtime={"command_deadline_s": 0.2}, **MOVES) as of:
        await of.generated(range(4))
        await at_work(of)
        lead = of.bench.leads[-1]
        lead.take(of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        hung = of.ranks[SECOND]
        lead.take(of.leave(SECOND))
        await of.bench.published("gpus_released")
        assert all(state == "at work" for state, _, _ in hung.starts)
        assert AT_REST not in await of.bench.instances[NODES[1]].workers(JOB)
        of.permit(FIRST)
        await of.bench.published("iteration_reported")
        assert of.scored() == [0, 1, 2, 3]


async def test_a_rank_that_takes_too_much_memory_at_rest_is_ended(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES, inference={"standby_memory_mib": 2}) as of:
        await at_work(of)
        of.ranks[SECOND].memory_bytes = 3 << 20
        of.bench.leads[-1].take(of.leave(SECOND))
        await of.bench.published("gpus_released")
        assert AT_REST not in await of.bench.instances[NODES[1]].workers(JOB)


async def test_ranks_without_a_transition_end_because_something_is_wrong_with_them(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES) as of:
        await at_work(of)
        of.bench.leads[-1].take(of.leave(SECOND, transition=""))
        await of.bench.published("gpus_released")
        assert AT_REST not in await of.bench.instances[NODES[1]].workers(JOB)


async def test_under_a_policy_that_moves_nothing_ranks_end(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)))
        await of.bench.published("layout_committed")
        lead = of.bench.leads[-1]
        lead.take(of.leave(SECOND))
        await of.bench.published("gpus_released")
        lead.take(of.load(1))
        await of.bench.published("weights_loaded")
        assert await of.bench.instances[NODES[1]].workers(JOB) == ()


async def test_a_new_lead_forms_the_world_anew_of_a_copy_whose_ranks_stand_by(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES) as of:
        await at_work(of)
        of.bench.leads[-1].take(of.leave(SECOND))
        await of.bench.published("gpus_released")
        await of.bench.leads[-1].aclose()
        lead = of.new_lead(of.come(SECOND, term=2, weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("layout_committed", count=3)
        assert of.ranks[SECOND].starts[-1] == ("at work", f"{SECOND}@2.2", True)
        lead.take(of.load(0))
        await of.generated(range(4))
        await of.bench.published("iteration_reported")
        assert of.scored() == [0, 1, 2, 3]


async def test_a_start_on_a_slot_whose_standby_is_being_built_waits_for_it(tmp_path: Path) -> None:
    async with scoring(tmp_path, **MOVES) as of:
        first, _ = of.bench.grants()
        of.new_lead(of.bench.scale_up([first], weights=snapshot(0)))
        of.bench.leads[-1].take(of.come(SECOND, weights=snapshot(0)))
        await of.bench.published("layout_committed", count=2)
        started = [grant for grant in of.bench.instances[NODES[1]].started if grant.gpu == SECOND]
        assert len(started) == 1, "one process"
