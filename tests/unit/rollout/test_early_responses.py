"""The rollout tells the inference of responses that end ahead of their groups, and never waits for that."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import Changes, snapshot
from tests.unit.rollout.fake_engines import Engines, RolloutBench, give, rollout
from tests.unit.rollout.outcomes import assert_whole_iteration, groups_on_stream
from tests.watched_samples import WatchedSamples
from tidegate.codec import decode_sample_id
from tidegate.ports.bus import BusUnavailable, SampleStream
from tidegate.v1 import samples_pb2


def watch(of: RolloutBench) -> WatchedSamples:
    assert isinstance(of.samples, WatchedSamples)
    return of.samples


async def test_each_response_but_the_last_of_its_group_is_told_with_its_tokens_alone(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines(), wrap=WatchedSamples, algorithm={"group_size": 3}) as of:
        give(of, of.scale_up(weights=snapshot(2)), of.open_iteration(version=2))
        await of.published("iteration_reported")
        told = watch(of).told
        groups = {group.prompt: group for group in await groups_on_stream(of)}
        assert Counter(each.prompt for each in told) == dict.fromkeys(range(4), 2)
        assert len({decode_sample_id(each.samples[0].id) for each in told}) == len(told)
        for response in told:
            group, (sample,) = groups[response.prompt], response.samples
            want = samples_pb2.Sample(id=sample.id, response_tokens=group.samples[sample.id.draw].response_tokens)
            assert sample == want
            for field in ("job", "incarnation", "iteration", "version", "prompt_tokens"):
                assert getattr(response, field) == getattr(group, field)


async def test_a_response_is_told_before_its_group_is_published(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines(), wrap=WatchedSamples) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        acts = watch(of).acts
        for prompt in range(4):
            assert acts.index(("tell", prompt)) < acts.index(("publish generated", prompt))


async def test_in_reproducible_mode_nothing_is_told(tmp_path: Path) -> None:
    actor = {"learning_rate": 1e-3, "layout": {"dp": 2}, "num_logical_shards": 2}
    async with rollout(tmp_path, Engines(), wrap=WatchedSamples, actor=actor) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await assert_whole_iteration(of)
        assert watch(of).told == []


async def test_an_evaluation_tells_nothing(tmp_path: Path) -> None:
    evaluation: dict[str, Any] = {"every": 1, "num_prompts": 3, "samples_per_prompt": 1, "max_new_tokens": 50}
    async with rollout(tmp_path, Engines(), wrap=WatchedSamples, evaluation=evaluation) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.evaluate())
        await of.published("evaluation_reported")
        assert watch(of).told == []


class Refusing(WatchedSamples):
    """The sample stream, on which no response can be told."""

    async def tell_response(self, response: samples_pb2.SampleGroup) -> None:
        self.told.append(response)
        raise BusUnavailable("not now")


class Silent(WatchedSamples):
    """The sample stream, on which a response that is told gets no answer."""

    async def tell_response(self, response: samples_pb2.SampleGroup) -> None:
        self.told.append(response)
        await asyncio.Event().wait()


@pytest.mark.parametrize(("bus", "want"), [(Refusing, 4), (Silent, 1)])
async def test_a_bus_on_which_nothing_can_be_told_delays_nothing(
    tmp_path: Path, bus: type[WatchedSamples], want: int
) -> None:
    def wrap(samples: SampleStream, changes: Changes) -> SampleStream:
        return bus(samples, changes)

    async with rollout(tmp_path, Engines(), wrap=wrap) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await assert_whole_iteration(of)
        assert len(watch(of).told) == want
