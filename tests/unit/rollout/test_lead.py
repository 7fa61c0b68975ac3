"""The rollout's lead over fake engines publishes whole groups once, each from its iteration's version."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.shell.codecs.observed_codec import generation_of
from tests.component_bench import JOB, NODES, Changes, snapshot
from tests.unit.rollout.fake_engines import FIRST, SECOND, Engines, engine_at_work, give, rollout
from tests.unit.rollout.held_publishing import HeldPublishing
from tests.unit.rollout.outcomes import all_ids, assert_whole_iteration, groups_on_stream
from tidegate.codec import fate_of
from tidegate.ports.bus import SampleStream
from tidegate.v1 import commands_pb2


async def test_every_group_is_published_whole_and_once_by_all_engines_together(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await assert_whole_iteration(of)
        assert sorted(engines.of[FIRST].made + engines.of[SECOND].made) == all_ids(of)
        assert len(engines.of[FIRST].made) == len(engines.of[SECOND].made)
        progress = await of.published("progress", count=4)
        assert [(each.progress.num_done, each.progress.num_total) for each in progress] == [
            (n, 4) for n in (1, 2, 3, 4)
        ]


async def test_pictures_show_every_sequence_from_the_first_picture_to_the_last(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 0}
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        give(of, of.open_iteration())
        await engine_at_work(of, engines, FIRST, num_made=1)
        for engine in (engines.of[FIRST], engines.of[SECOND]):
            for _ in range(len(all_ids(of))):
                engine.permits.release()
        await of.published("iteration_reported")

        await of.published("generation", count=2)
        pictures = [generation_of(each.generation) for each in of.events.all if each.HasField("generation")]
        kinds = await of.kinds()

    assert {each.num_groups for each in pictures} == {of.config.algorithm.prompts_per_iteration}
    assert pictures[0].num_unfinished > 0
    assert [engine.gpus for engine in pictures[0].engines] == [(FIRST,), (SECOND,)]
    assert (pictures[-1].num_unfinished, pictures[-1].num_submitted) == (0, 0)
    assert min(pictures[-1].lengths) > 0
    assert kinds.index("iteration_reported") > max(index for index, kind in enumerate(kinds) if kind == "generation")


async def test_the_layout_is_announced_with_its_transition_and_every_member(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        request = of.scale_up(weights=snapshot(0))
        give(of, request)
        (committed,) = await of.published("layout_committed")
        assert await of.kinds() == ["gpus_acquired", "layout_committed"]
        assert committed.transition_id == "start"
        assert list(committed.layout_committed.grants) == list(request.members)
        assert list(committed.grants) == list(request.members)


async def test_the_iteration_does_not_end_while_a_group_is_being_published(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[SECOND] = 3
    held: list[HeldPublishing] = []

    def wrap(samples: SampleStream, changes: Changes) -> SampleStream:
        held.append(HeldPublishing(samples, changes, prompt=2))
        return held[0]

    async with rollout(tmp_path, engines, wrap=wrap) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.changes.until(lambda: held[0].is_holding)
        engines.open(SECOND)
        await of.published("progress", count=3)
        assert "iteration_reported" not in await of.kinds()
        held[0].let_go.set()
        await assert_whole_iteration(of)


async def test_an_engine_generates_only_once_it_holds_the_version_of_the_iteration(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration(1, version=1))
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
        (loaded_event,) = await of.published("weights_loaded")
        assert loaded_event.weights_loaded.checksum == snapshot(1).checksum
        await assert_whole_iteration(of, version=1, iteration=1)


async def test_a_newer_incarnation_ends_running_requests_and_makes_all_responses_anew(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 1}
    async with rollout(tmp_path, engines) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress")
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(incarnation=2), weights=snapshot(0, incarnation=2)))
        lead.take(of.open_iteration(incarnation=2))
        (report,) = await of.published("iteration_reported")
        assert report.incarnation == 2
        assert report.iteration_reported.generated == fate_of(all_ids(of, incarnation=2))
        assert len(await groups_on_stream(of, incarnation=1)) == 1


async def test_a_refused_request_fails_the_component_with_the_engines_message(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        engines.of[FIRST].refusal = "the prompt is longer than max_seq_len=80"
        give(of, of.open_iteration())
        (failed,) = await of.published("failed")
        assert "longer than max_seq_len=80" in failed.failed.message


async def test_weights_that_are_not_the_published_ones_fail_the_component(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        engines.of[SECOND].lies_about_weights = True
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
        with pytest.raises(AssertionError, match="n1/2 loaded version 1 with checksum of something else"):
            await of.published("weights_loaded")


@pytest.mark.parametrize(("kl_coefficient", "want"), [(0.0, ()), (0.1, (0,))], ids=["without KL", "with KL"])
async def test_closing_an_iteration_frees_older_versions_but_not_the_reference(
    tmp_path: Path, kl_coefficient: float, want: tuple[int, ...]
) -> None:
    async with rollout(tmp_path, Engines(), algorithm={"kl_coefficient": kl_coefficient}) as of:
        lead = give(of, of.scale_up(weights=snapshot(1)), of.open_iteration(1, version=1))
        lead.take(commands_pb2.CloseIterationRequest(header=of.header(), iteration=1))
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(2)))
        await of.published("weights_loaded")
        assert [instance.drops for instance in of.instances.values()] == [[(1, want)], [(1, want)]]


async def test_released_engines_are_reported_with_the_memory_that_stays_held(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        up = of.scale_up(weights=snapshot(0))
        lead = give(of, up)
        down = commands_pb2.ScaleDownRequest(header=of.header(transition="stop"), grants=up.grants)
        lead.take(down)
        (released,) = await of.published("gpus_released")
        assert (released.transition_id, released.gpus_released.held_bytes) == ("stop", 0)
        assert list(released.gpus_released.grants) == list(up.grants)
        assert await of.instances[NODES[0]].workers(JOB) == ()
