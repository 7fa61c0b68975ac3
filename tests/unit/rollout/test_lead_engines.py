"""The rollout's lead publishes whole groups once, despite lost and new engines and new leads."""

from __future__ import annotations

from pathlib import Path

from tests.component_bench import NODES, snapshot
from tests.unit.rollout.fake_engines import FIRST, PLENTY, SECOND, Engines, engine_at_work, give, rollout
from tests.unit.rollout.outcomes import all_ids, assert_whole_iteration
from tidegate.codec import decode_grants
from tidegate.v1 import commands_pb2


async def test_an_engine_lost_in_the_middle_of_a_call_has_its_requests_made_by_the_others(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[FIRST] = 1
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        lost = await engine_at_work(of, engines, FIRST, num_made=1)
        of.instances[NODES[0]].kill(FIRST)
        await assert_whole_iteration(of)
        assert set(engines.of[SECOND].made) >= set(lost.asked) - set(lost.made)
        assert not set(engines.of[SECOND].made) & set(lost.made), (
            "responses that arrived before the loss are not made again"
        )


async def test_with_every_engine_lost_the_iteration_waits_for_a_new_engine(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 0, SECOND: 0}
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        for gpu, node in ((FIRST, NODES[0]), (SECOND, NODES[1])):
            await engine_at_work(of, engines, gpu, num_made=0)
            of.instances[node].kill(gpu)
        engines.num_permits[SECOND] = PLENTY
        newcomer = of.grants(term=2)[1:]
        give(of, of.scale_up(newcomer, weights=snapshot(0)))
        await assert_whole_iteration(of)


async def test_a_new_engine_takes_part_in_the_running_iteration(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[FIRST] = 0
    async with rollout(tmp_path, engines, rollout={"max_running_requests": 2}) as of:
        first, second = of.grants()
        give(of, of.scale_up([first], weights=snapshot(0)), of.open_iteration())
        held = await engine_at_work(of, engines, FIRST, num_made=0)
        give(of, of.scale_up([second], members=[first, second], weights=snapshot(0)))
        await of.changes.until(lambda: SECOND in engines.of and len(engines.of[SECOND].made) == 6)
        assert len(held.asked) == 2, "an engine holds only a few requests more than it can run"
        engines.open(FIRST)
        await assert_whole_iteration(of)


async def test_a_response_that_an_engine_aborted_is_made_again(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[FIRST] = 0
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        engine = await engine_at_work(of, engines, FIRST, num_made=0)
        engine.aborts_first = True
        engines.open(FIRST)
        await assert_whole_iteration(of)


async def test_a_new_lead_makes_only_what_the_stream_lacks(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 1}
    async with rollout(tmp_path, engines) as of:
        old = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress")
        await old.aclose()
        asked_before = {gpu: len(engine.asked) for gpu, engine in engines.of.items()}
        new = of.new_lead()
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        new.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        new.take(of.open_iteration())
        await assert_whole_iteration(of)
        again = [sample for gpu, engine in engines.of.items() for sample in engine.asked[asked_before[gpu] :]]
        assert sorted(again) == [sample for sample in all_ids(of) if sample.prompt != 0]
        assert all(engine.num_aborts for engine in engines.of.values()), "the old lead's requests were aborted"
        assert of.instances[NODES[0]].started == [of.grants()[0]], "workers outlive their lead"


async def test_a_new_lead_that_finds_all_groups_on_the_stream_reports_at_once(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        old = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        await old.aclose()
        of.new_lead().take(of.open_iteration())
        first, second = await of.published("iteration_reported", count=2)
        assert first.iteration_reported == second.iteration_reported
        assert len(engines.of[FIRST].asked) + len(engines.of[SECOND].asked) == 8


async def test_the_lead_reports_an_engine_whose_node_gives_no_answer_and_the_others_go_on(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        of.instances[NODES[0]].is_silent = True
        give(of, of.open_iteration())
        await assert_whole_iteration(of)
        (failed,) = await of.published("failed")
        assert [grant.gpu for grant in failed.failed.grants] == [FIRST]
        assert engines.of[FIRST].asked == []


async def test_a_start_ends_an_earlier_one_of_its_gpus_that_was_given_up(tmp_path: Path) -> None:
    engines = Engines()
    engines.hang_in_start = {SECOND}
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.changes.until(lambda: SECOND in engines.of)
        given_up, anew = of.grants(), of.grants(term=2)
        engines.hang_in_start = set()
        give(of, of.scale_up(anew[:1], weights=snapshot(0)))
        (committed,) = await of.published("layout_committed")
        assert decode_grants(committed.layout_committed.grants) == anew[:1]
        (failed,) = await of.published("failed")
        assert decode_grants(failed.failed.grants) == given_up[1:]
