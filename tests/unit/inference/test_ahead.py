"""The inference's lead scores responses ahead of their groups, and the groups are published as they are without that.

By default it has two copies of one rank each, on FIRST and SECOND.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import JOB, NODES, snapshot
from tests.unit.inference.scoring_bench import FIRST, SECOND, scoring
from tests.watched_samples import ended_response, generated_group
from tidegate.v1 import samples_pb2

ONE_PROMPT: dict[str, Any] = {"prompts_per_iteration": 1, "n_minibatches": 1}


def with_log_probs(prompt: int) -> samples_pb2.SampleGroup:
    group = generated_group(prompt)
    for sample in group.samples:
        sample.old_log_probs.extend([-1.0] * len(sample.response_tokens))
    return group


async def test_a_response_is_scored_before_its_group_which_is_then_published_whole_and_once(tmp_path: Path) -> None:
    async with scoring(tmp_path, algorithm=ONE_PROMPT) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.told(ended_response(0, 0))
        await of.bench.changes.until(lambda: of.scored() == [0])
        assert of.watch.acts == [("tell", 0)]
        await of.generated([0])
        await of.bench.published("iteration_reported")
        assert sorted(of.asked) == [[(0, 0)], [(0, 1)]]
        assert of.watch.prompts("publish scored") == [0]
        assert await of.on_stream() == [with_log_probs(0)]
        assert await of.num_unsettled() == 0


async def test_a_response_with_a_copy_is_not_dealt_again_when_its_group_arrives(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, algorithm=ONE_PROMPT) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.told(ended_response(0, 0))
        await of.until_asked(first=1)
        await of.generated([0])
        await of.until_asked(second=1)
        of.permit(SECOND)
        await of.bench.changes.until(lambda: of.ranks[SECOND].scored == [(0,)])
        assert of.watch.prompts("publish scored") == []
        of.permit(FIRST)
        await of.bench.published("iteration_reported")
        assert of.asked == [[(0, 0)], [(0, 1)]]
        assert await of.on_stream() == [with_log_probs(0)]


async def test_groups_on_the_stream_come_first(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.generated([0, 1])
        await of.until_asked(first=1, second=1)
        await of.generated([2])
        await of.told(ended_response(3, 0))
        of.permit(FIRST, count=1)
        await of.until_asked(first=2)
        assert of.ranks[FIRST].asked == [[(0, 0), (0, 1)], [(2, 0), (2, 1)]]
        of.permit(FIRST, count=1)
        await of.until_asked(first=3)
        assert of.ranks[FIRST].asked[2] == [(3, 0)]
        of.permit()
        await of.generated([3])
        await of.bench.published("iteration_reported")
        assert sorted(group.prompt for group in await of.on_stream()) == [0, 1, 2, 3]


async def test_a_response_with_other_tokens_than_in_its_group_is_scored_again(tmp_path: Path) -> None:
    async with scoring(tmp_path, algorithm=ONE_PROMPT) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.told(ended_response(0, 0, tokens=[9, 9, 9]))
        await of.bench.changes.until(lambda: of.scored() == [0])
        await of.generated([0])
        await of.bench.published("iteration_reported")
        assert sorted(draw for call in of.asked for draw in call) == [(0, 0), (0, 0), (0, 1)]
        assert await of.on_stream() == [with_log_probs(0)]


async def test_responses_of_another_place_or_version_are_dropped(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.generated([2])
        await of.bench.changes.until(lambda: of.watch.prompts("ack") == [2])
        await of.told(
            ended_response(0, 1, incarnation=2),
            ended_response(0, 1, iteration=1),
            ended_response(0, 1, version=1),
            ended_response(4, 1),
            ended_response(2, 1),
            ended_response(1, 0),
        )
        await of.bench.changes.until(lambda: of.scored() == [1, 2])
        await of.generated([0, 1, 3])
        await of.bench.published("iteration_reported")
        assert sorted(draw for call in of.asked for draw in call) == [
            (prompt, d) for prompt in range(4) for d in (0, 1)
        ]


async def test_a_response_that_kills_its_copies_waits_for_its_group_and_puts_nothing_aside(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, algorithm=ONE_PROMPT, runtime={"max_deliveries": 2}) as of:
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.told(ended_response(0, 0))
        await of.until_asked(first=1)
        of.bench.instances[NODES[0]].kill(FIRST)
        await of.until_asked(second=1)
        of.bench.instances[NODES[1]].kill(SECOND)
        lead.take(of.bench.scale_up(of.bench.grants(term=2), weights=snapshot(0)))
        await of.bench.published("layout_committed", count=2)
        await of.told(ended_response(0, 1))
        of.permit()
        await of.generated([0])
        await of.bench.published("iteration_reported")
        assert of.asked == [[(0, 0), (0, 1)]], "the new copies were asked for the whole group alone"
        assert await of.bench.bus.dead_letters.list(JOB) == []
        assert await of.on_stream() == [with_log_probs(0)]


async def test_a_copy_that_dies_leaves_its_responses_to_the_others(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, algorithm=ONE_PROMPT) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.told(ended_response(0, 0))
        await of.until_asked(first=1)
        of.bench.instances[NODES[0]].kill(FIRST)
        await of.until_asked(second=1)
        of.permit()
        await of.bench.changes.until(lambda: of.ranks[SECOND].scored == [(0,)])
        await of.generated([0])
        await of.bench.published("iteration_reported")
        assert of.ranks[SECOND].asked == [[(0, 0)], [(0, 1)]]


async def test_a_group_that_the_actor_filters_is_published_as_it_is_though_it_was_scored_ahead(tmp_path: Path) -> None:
    async with scoring(tmp_path, algorithm=ONE_PROMPT | {"filter_zero_std": True}) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.told(ended_response(0, 0))
        await of.bench.changes.until(lambda: of.scored() == [0])
        await of.generated([0], rewards=(0.5, 0.5))
        await of.bench.published("iteration_reported")
        assert await of.on_stream() == [generated_group(0, rewards=(0.5, 0.5))]
        assert of.scored() == [0]


@pytest.mark.parametrize(("shards", "want"), [(None, 1), (2, 0)], ids=["by default", "in reproducible mode"])
async def test_a_lead_listens_to_responses_but_in_reproducible_mode(
    tmp_path: Path, shards: int | None, want: int
) -> None:
    actor = {"learning_rate": 1e-3, "layout": {"dp": 2}, "num_logical_shards": shards}
    async with scoring(tmp_path, actor=actor) as of:
        await of.generated(range(4))
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("iteration_reported")
        assert of.watch.num_listeners == want


async def test_pictures_show_the_tokens_that_were_scored_ahead_until_their_group_is_ready(tmp_path: Path) -> None:
    scheduler = {"policy": "tide", "decide_every_s": 0.01}
    async with scoring(tmp_path, algorithm=ONE_PROMPT, scheduler=scheduler) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.told(ended_response(0, 1))

        def shown() -> list[int]:
            return [
                each.inferring.num_tokens_ahead
                for each in of.bench.events.all
                if each.WhichOneof("body") == "inferring"
            ]

        await of.bench.changes.until(lambda: 2 in shown())
        await of.generated([0])
        await of.bench.published("iteration_reported")
        assert shown()[-1] == 0
