"""Sequences move between real engines under the lead, and come out with the bits of those that never moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from services.scheduler.shell.codecs.observed_codec import generation_of
from services.scheduler.state.observed import QUEUED, Generation
from tests.component_bench import NODES
from tests.unit.rollout.fake_engines import FIRST, SECOND
from tests.unit.rollout.outcomes import groups_on_stream, scale_down
from tests.unit.rollout.real_engines import RealBench, RealEngines, published_weights, real_rollout
from tidegate.codec import decode_sample_id
from tidegate.types import Grant
from tidegate.v1 import commands_pb2, samples_pb2
from tidegate.v1 import workers_pb2 as wire

LONG = {"prompts_per_iteration": 4, "group_size": 2, "max_new_tokens": 32}


async def picture_where(of: RealBench, holds: Callable[[Generation], bool]) -> Generation:
    """The first picture of the iteration for which this holds."""

    def found() -> list[Generation]:
        painted = (generation_of(event.generation) for event in of.events.all if event.HasField("generation"))
        return [picture for picture in painted if holds(picture)]

    await of.changes.until(lambda: bool(found()))
    return found()[0]


def is_waiting(engines: RealEngines) -> bool:
    """Whether the first engine has sequences and may not step."""
    return FIRST in engines.of and engines.of[FIRST].is_waiting


async def begin(of: RealBench, grants: Sequence[Grant] | None = None) -> None:
    """Start engines at version 0, and open iteration 0."""
    lead = of.new_lead()
    lead.take(of.scale_up(grants, weights=published_weights(of, 0)))
    await of.published("layout_committed")
    lead.take(of.open_iteration())


async def responses(of: RealBench) -> list[samples_pb2.Sample]:
    """All responses of the iteration, once it is reported."""
    await of.published("iteration_reported")
    return [sample for group in await groups_on_stream(of) for sample in group.samples]


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> list[samples_pb2.Sample]:
    """The responses of an iteration in which nothing moves."""

    async def still() -> list[samples_pb2.Sample]:
        async with real_rollout(tmp_path_factory.mktemp("still"), RealEngines(), algorithm=LONG) as of:
            await begin(of)
            return await responses(of)

    made = asyncio.run(still())
    assert len({len(each.response_tokens) for each in made}) > 1, "the responses have different lengths"
    return made


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 11, 23])
async def test_a_response_has_the_same_bits_wherever_it_moves(
    tmp_path: Path, want: list[samples_pb2.Sample], num_steps: int
) -> None:
    engines = RealEngines(**{FIRST: num_steps, SECOND: num_steps})
    async with real_rollout(tmp_path, engines, algorithm=LONG) as of:
        first, second = of.grants()
        await begin(of)
        await of.changes.until(lambda: all(gpu in engines.of and engines.of[gpu].is_waiting for gpu in (FIRST, SECOND)))
        of.leads[-1].take(scale_down(of, [first], [second]))
        (released,) = await of.published("gpus_released")
        assert [grant.gpu for grant in released.gpus_released.grants] == [FIRST]
        engines.open(SECOND)
        assert await responses(of) == want
        assert max(engines.sent(SECOND).values()) == num_steps


async def test_an_engine_that_leaves_hands_its_unfinished_responses_over_and_the_picture_shows_them(
    tmp_path: Path, want: list[samples_pb2.Sample]
) -> None:
    engines = RealEngines(**{FIRST: 3})
    small = {"max_running_requests": 4}
    async with real_rollout(tmp_path, engines, algorithm=LONG, rollout=small) as of:
        (first, second), lead = of.grants(), None
        await begin(of, [first])
        await of.changes.until(partial(is_waiting, engines))
        lead = of.leads[-1]
        lead.take(scale_down(of, [first]))
        await of.published("gpus_released")
        handed_over = await picture_where(of, lambda picture: not picture.engines and any(picture.lengths))
        assert set(handed_over.places) == {QUEUED}
        assert sorted(handed_over.lengths) == [0, 0, 0, 0, 3, 3, 3, 3], "four ran, one waited, three had no engine"

        lead.take(of.scale_up([second], weights=published_weights(of, 0)))
        assert await responses(of) == want
        assert sorted(engines.sent(SECOND).values()) == [0, 0, 0, 0, 3, 3, 3, 3]
        progress = (await of.published("progress", count=4))[-1].progress
        assert (progress.metrics["num_moves"], progress.metrics["num_moved_tokens"]) == (4.0, 12.0)


async def test_a_new_lead_loads_an_engine_that_the_lead_before_it_put_to_rest(
    tmp_path: Path, want: list[samples_pb2.Sample]
) -> None:
    engines = RealEngines()
    async with real_rollout(tmp_path, engines, algorithm=LONG) as of:
        weights = published_weights(of, 0)
        of.new_lead().take(of.scale_up(weights=weights))
        await of.published("layout_committed")
        rest = wire.StartEngine(config_json=of.config.to_json(), stands_by=True)
        list(engines.of[FIRST].worker.handle(wire.WorkerCall(call_id=1, start_engine=rest)))
        lead = of.new_lead()
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=weights))
        await of.published("weights_loaded")
        lead.take(of.open_iteration())
        assert await responses(of) == want
        assert engines.sent(FIRST)
        assert engines.sent(SECOND)


async def test_a_sequence_moves_again_and_a_death_on_the_way_costs_only_the_tokens_since_the_last_move(
    tmp_path: Path, want: list[samples_pb2.Sample]
) -> None:
    engines = RealEngines(**{FIRST: 4, SECOND: 3})
    async with real_rollout(tmp_path, engines, algorithm=LONG) as of:
        first, second = of.grants()
        await begin(of, [first])
        lead = of.leads[-1]
        await of.changes.until(partial(is_waiting, engines))
        lead.take(of.scale_up([second], members=[first, second], weights=published_weights(of, 0)))
        await of.published("layout_committed", count=2)
        lead.take(scale_down(of, [first], [second]))
        await of.published("gpus_released")
        await of.changes.until(lambda: engines.of[SECOND].is_waiting)
        again = Grant(first.gpu, replace(first.token, counter=9))
        engines.num_steps[FIRST] = 2
        lead.take(of.scale_up([again], members=[second, again], weights=published_weights(of, 0)))
        await of.published("layout_committed", count=4)
        lead.take(scale_down(of, [second], [again]))
        await of.published("gpus_released", count=2)
        await of.changes.until(lambda: engines.of[FIRST].is_waiting)
        moved_twice = engines.sent(FIRST)
        assert max(moved_twice.values()) == 7
        assert min(moved_twice.values()) >= 4, "each moved with what it had at its first move, or more"

        of.instances[NODES[0]].kill(FIRST)
        engines.num_steps[FIRST] = 1_000_000
        last = Grant(first.gpu, replace(first.token, counter=12))
        lead.take(of.scale_up([last], weights=published_weights(of, 0)))
        assert await responses(of) == want
        continued = engines.sent(FIRST)
        assert continued.items() <= moved_twice.items(), "the responses go on from their last move"
        assert continued, "not all were complete when the engine died"


async def test_a_hand_over_in_an_evaluation_changes_no_answer(tmp_path: Path) -> None:
    reports = []
    for num_steps in (1_000_000, 4):
        engines = RealEngines(**{FIRST: num_steps})
        section = {"every": 1, "num_prompts": 4, "samples_per_prompt": 2, "temperature": 1.0}
        async with real_rollout(tmp_path / str(num_steps), engines, algorithm=LONG, evaluation=section) as of:
            first, second = of.grants()
            lead = of.new_lead()
            lead.take(of.scale_up(weights=published_weights(of, 0)))
            await of.published("layout_committed")
            lead.take(of.evaluate(0))
            if num_steps == 4:
                await of.changes.until(partial(is_waiting, engines))
                lead.take(scale_down(of, [first], [second]))
            (event,) = await of.published("evaluation_reported")
            reports.append(event.evaluation_reported)
    assert reports[0] == reports[1]


async def test_a_repeated_release_does_not_disturb_the_one_at_work(
    tmp_path: Path, want: list[samples_pb2.Sample]
) -> None:
    engines = RealEngines(**{FIRST: 2})
    async with real_rollout(tmp_path, engines, algorithm=LONG) as of:
        first, second = of.grants()
        await begin(of)
        await of.changes.until(partial(is_waiting, engines))
        held = {decode_sample_id(each.id) for each in engines.of[FIRST].requests}
        for _ in range(3):
            of.leads[-1].take(scale_down(of, [first], [second]))
        assert await responses(of) == want
        moved = engines.sent(SECOND)
        assert {moved[sample] for sample in held & moved.keys()} == {2}
