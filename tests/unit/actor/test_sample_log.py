"""The samples written for people: their choice, their lines. A failed write neither delays nor ends training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.actor.sample_log import chosen_draws
from tests.component_bench import job_config
from tests.unit.actor.actor_bench import Training, training
from tests.watched_samples import scored_group
from tidegate.job import load_job
from tidegate.ports.bus import Stage
from tidegate.v1 import samples_pb2, types_pb2


def plan(
    *, first_prompt: int = 0, num_prompts: int = 8, group_size: int = 4, extra: int = 0
) -> types_pb2.IterationPlan:
    return types_pb2.IterationPlan(
        first_prompt=first_prompt, num_prompts=num_prompts, group_size=group_size, max_extra_prompts=extra
    )


@pytest.mark.parametrize(
    ("per_iteration", "want"),
    [
        pytest.param(0, {}, id="none"),
        pytest.param(3, {16: 3}, id="less than a group"),
        pytest.param(8, {16: 4, 20: 4}, id="whole groups, far apart"),
        pytest.param(10, {16: 4, 18: 4, 21: 2}, id="a part of the last group"),
        pytest.param(32, dict.fromkeys(range(16, 24), 4), id="as many as there are"),
        pytest.param(1000, dict.fromkeys(range(16, 24), 4), id="more than there are"),
        pytest.param(None, dict.fromkeys(range(16, 24), 4), id="all"),
    ],
)
def test_whole_groups_are_written_evenly_over_the_prompts(per_iteration: int | None, want: dict[int, int]) -> None:
    assert chosen_draws(plan(first_prompt=16), per_iteration) == want


@pytest.mark.parametrize(
    ("per_iteration", "want"), [(8, [0, 4]), (32, [*range(8)]), (37, [*range(10)]), (None, [*range(12)])]
)
def test_prompts_that_replace_others_are_written_only_after_all_others(
    per_iteration: int | None, want: list[int]
) -> None:
    assert list(chosen_draws(plan(extra=4), per_iteration)) == want


@pytest.mark.parametrize("num_prompts", [1, 7, 512])
@pytest.mark.parametrize("group_size", [1, 8])
def test_exactly_the_configured_number_of_samples_is_written_as_far_as_there_are_samples(
    num_prompts: int, group_size: int
) -> None:
    for per_iteration in (0, 1, 31, 32, 5000):
        draws = chosen_draws(plan(num_prompts=num_prompts, group_size=group_size), per_iteration)
        assert sum(draws.values()) == min(per_iteration, num_prompts * group_size)
        assert set(draws) <= set(range(num_prompts))


def written(of: Training, *, incarnation: int = 1, iteration: int = 0) -> list[dict[str, Any]]:
    path = of.bench.folder.samples / f"inc{incarnation:03}-it{iteration:06}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_has_the_texts_the_rewards_by_name_and_the_fate_of_the_sample(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm={"mask_truncated": True}) as of:
        for prompt in range(4):
            group = scored_group(prompt)
            group.samples[1].rewards.update({"exact": 2.0, "brevity": -1.0})
            group.samples[1].failures.add(reward="brevity", message="it raised", traceback="where")
            group.samples[1].finish = samples_pb2.FINISH_REASON_LENGTH
            await of.bench.bus.samples.publish(Stage.SCORED, group)
        of.start()
        await of.report()
        rows = written(of)
        tokenizer = load_job(job_config(tmp_path)).tokenizer
    assert [row["sample"] for row in rows] == [f"1.0.{prompt}.{draw}" for prompt in range(4) for draw in range(2)]
    assert rows[5] == {
        "sample": "1.0.2.1",
        "iteration": 0,
        "version": 0,
        "fate": "trained",
        "reason": None,
        "update": "1.0.1",
        "masked": True,
        "reward": 1.0,
        "rewards": {"brevity": -1.0, "exact": 2.0},
        "failures": {"brevity": "it raised"},
        "advantage": pytest.approx(1.0, abs=1e-5),
        "finish": "length",
        "num_prompt_tokens": 2,
        "num_response_tokens": 2,
        "prompt": tokenizer.decode([3, 4]),
        "response": tokenizer.decode([5, 5]),
    }


async def test_filtered_and_discarded_samples_have_their_fate_and_reason(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm={"filter_zero_std": True}) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.fail_next(1)
        await of.scored([0, 2])
        await of.scored([1, 3], rewards=(1.0, 1.0))
        of.take(of.bench.open_iteration())
        await of.report()
        fates = {row["sample"]: (row["fate"], row["reason"], row["update"]) for row in written(of)}
    assert fates["1.0.0.0"] == ("discarded", "nonfinite_update", "1.0.0")
    assert fates["1.0.1.0"] == fates["1.0.3.1"] == ("filtered", "zero_std", None)
    assert fates["1.0.2.1"] == ("trained", None, "1.0.1")
    assert len(fates) == 8


async def test_only_as_many_samples_are_written_as_the_config_says(tmp_path: Path) -> None:
    async with training(tmp_path, samples={"per_iteration": 3}) as of:
        await of.scored(range(4))
        of.start()
        await of.report()
        assert [row["sample"] for row in written(of)] == ["1.0.0.0", "1.0.0.1", "1.0.2.0"]


async def test_a_folder_that_takes_no_samples_costs_no_update(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.bench.folder.samples.write_text("a file in the place of the folder")
        await of.scored(range(4))
        of.start()
        report = await of.report()
        assert report.trained.num_samples == 8
        assert of.ranks.prompts() == [[0, 1], [2, 3]]


async def test_a_line_that_a_kill_cut_off_does_not_spoil_later_lines(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.bench.folder.samples.mkdir()
        (of.bench.folder.samples / "inc001-it000000.jsonl").write_text('{"sample": "1.0.')
        await of.scored(range(4))
        of.start()
        await of.report()
        lines = (of.bench.folder.samples / "inc001-it000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["sample"] for line in lines][:2] == ["1.0.0.0", "1.0.0.1"]
    assert len(lines) == 8
