"""Rewards that are slow or fail while the rollout's lead generates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from services.rollout.lead import RolloutLead
from tests.component_bench import snapshot, task_of
from tests.unit.rollout.fake_engines import FIRST, SECOND, Engines, RolloutBench, give, rollout
from tests.unit.rollout.fake_tasks import HeldRewards
from tests.unit.rollout.outcomes import assert_whole_iteration, groups_on_stream
from tidegate.config.sections.data import DataSection, RewardName, RewardSection
from tidegate.v1 import commands_pb2


async def test_a_slow_reward_delays_nothing_else_of_the_lead(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        lead = of.new_lead()
        rewards = HeldRewards(task_of(lead.job), of.changes)
        lead.job = replace(lead.job, task=rewards)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.changes.until(lambda: rewards.is_asked)
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        await of.published("weights_loaded")
        rewards.let_go.set()
        await assert_whole_iteration(of)


def on_data(of: RolloutBench, folder: Path, answers: str) -> RolloutLead:
    """A new lead of a job on four records, whose reward raises where a letter of `answers` is an x."""
    (folder / "grading.py").write_text(
        "def score(answer):\n    if answer == 'x':\n        raise KeyError('units')\n    return 1.0\n"
    )
    rows = [{"prompt": "count from 4 :", "answer": letter} for letter in answers]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = RewardSection(name=RewardName.FUNCTION, path="grading.py:score", import_from=str(folder), timeout_s=60)
    data = DataSection(train=str(folder / "train.jsonl"), answer_key="answer", shuffle=False)
    config = of.config.model_copy(update={"task": None, "data": data, "rewards": (reward,)})
    lead = of.new_lead()
    lead.job = replace(lead.job, task=None, config=config)
    return lead


async def test_a_reward_that_fails_on_too_many_samples_ends_the_job_with_its_first_traceback(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        on_data(of, tmp_path, "axxx")
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        (event,) = await of.published("failed")
        assert event.failed.fatal
        first, *lines = event.failed.message.splitlines()
        want = (
            "reward grading.py:score failed on 6 of the iteration's 8 samples, more than rewards.0.max_failed=0.5 all"
        )
        assert first.startswith(f"iteration 0: {want}ows; the first: reward grading.py:score on sample 1.0.1.0 (")
        assert f"raised KeyError: 'units' at {tmp_path}/grading.py:3 in score" in first
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == "KeyError: 'units'"
        assert "iteration_reported" not in await of.kinds()


async def test_failures_within_the_limit_are_on_the_stream_with_their_samples(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        on_data(of, tmp_path, "axax")
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        assert [[len(sample.failures) for sample in group.samples] for group in groups] == [[0, 0], [1, 1]] * 2
        failure = groups[1].samples[1].failures[0]
        assert failure.reward == "grading.py:score"
        assert failure.message.startswith(
            f"reward grading.py:score on sample 1.0.1.1 ({tmp_path}/train.jsonl:2) raised"
        )
        assert groups[1].samples[1].reward == 0.0
        assert (await of.published("progress", count=4))[-1].progress.metrics["num_failed_rewards"] == 4.0


async def test_a_new_lead_counts_the_failures_that_an_earlier_lead_published(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 1}
    async with rollout(tmp_path, engines) as of:
        old = on_data(of, tmp_path, "xxxa")
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress")
        await old.aclose()
        new = on_data(of, tmp_path, "xxxa")
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        new.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        new.take(of.open_iteration())
        (event,) = await of.published("failed")
        assert "the first: reward grading.py:score on sample 1.0.0.0" in event.failed.message
