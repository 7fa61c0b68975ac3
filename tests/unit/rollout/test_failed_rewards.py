"""The limit on failed rewards: each reward by itself, over all samples that the iteration may still take."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from services.rollout.failed_rewards import FailedRewards, TooManyFailedRewards
from tidegate.candidates import Candidates
from tidegate.config.sections.data import RewardName, RewardSection
from tidegate.v1 import samples_pb2, types_pb2

SCORE = "grading:score"


def rewards(max_failed: float = 0.5) -> list[RewardSection]:
    function = RewardSection(name=RewardName.FUNCTION, path=SCORE, max_failed=max_failed)
    return [RewardSection(name=RewardName.EXACT_MATCH), function]


def group(prompt: int, *, failed: Sequence[int] = (), reward: str = SCORE) -> samples_pb2.SampleGroup:
    """A group of two. `failed` are the draws on which the reward failed."""
    samples = [samples_pb2.Sample(id=types_pb2.SampleId(prompt=prompt, draw=draw)) for draw in range(2)]
    for draw in failed:
        message = f"reward {reward} on sample {prompt}.{draw} raised"
        samples[draw].failures.add(reward=reward, message=message, traceback=f"Traceback of {prompt}.{draw}")
    return samples_pb2.SampleGroup(prompt=prompt, samples=samples)


def counted(candidates: Candidates, *groups: samples_pb2.SampleGroup, max_failed: float = 0.5) -> FailedRewards:
    failures = FailedRewards(rewards(max_failed), candidates, group_size=2)
    for each in groups:
        candidates.add(each.prompt, has_spread=not any(sample.failures for sample in each.samples))
        failures.add(each)
    return failures


def test_the_message_has_the_numbers_the_remedy_and_the_failure_of_the_lowest_prompt_and_draw() -> None:
    failures = counted(Candidates(0, 4), group(3, failed=(0, 1)), group(1, failed=(1,)), group(2, failed=(0, 1)))
    want = (
        f"reward {SCORE} failed on 5 of the iteration's 8 samples, more than rewards.1.max_failed=0.5 allows; "
        f"the first: reward {SCORE} on sample 1.1 raised. Mend the function and resume, or raise the limit "
        "(1 sets none)\nTraceback of 1.1"
    )
    with pytest.raises(TooManyFailedRewards, match=f"^{re.escape(want)}$"):
        failures.check()


@pytest.mark.parametrize(
    ("max_failed", "failed", "is_refused"),
    [
        pytest.param(0.5, 4, False, id="as many as the limit"),
        pytest.param(0.5, 5, True, id="one more than the limit"),
        pytest.param(0.0, 1, True, id="none may fail"),
        pytest.param(1.0, 8, False, id="no limit"),
    ],
)
def test_an_iteration_is_refused_above_the_limit(max_failed: float, failed: int, is_refused: bool) -> None:
    groups = [group(n, failed=range(min(2, max(0, failed - 2 * n)))) for n in range(4)]
    failures = counted(Candidates(0, 4), *groups, max_failed=max_failed)
    if is_refused:
        with pytest.raises(TooManyFailedRewards):
            failures.check()
    else:
        failures.check()


def test_each_reward_has_a_limit_of_its_own() -> None:
    candidates = Candidates(0, 2)
    failures = FailedRewards(rewards(), candidates, group_size=2)
    for each in (group(0, failed=(0, 1)), group(1, failed=(0,), reward="exact_match")):
        candidates.add(each.prompt, has_spread=True)
        failures.add(each)
    failures.check()


def test_an_iteration_that_is_refused_early_would_be_refused_at_its_end_too() -> None:
    """Replaced groups raise the number of samples, so half of the first prompts decides nothing yet."""
    candidates = Candidates(0, 2, max_extra_prompts=2)
    failures = counted(candidates, group(0, failed=(0, 1)), group(1, failed=(0,)))
    failures.check()
    for prompt, failed in ((2, ()), (3, (0, 1))):
        each = group(prompt, failed=failed)
        candidates.add(prompt, has_spread=not failed)
        failures.add(each)
    with pytest.raises(TooManyFailedRewards, match=r"failed on 5 of the iteration's 8 samples"):
        failures.check()


def test_a_group_counts_once() -> None:
    failures = counted(Candidates(0, 4), group(0, failed=(0, 1)))
    assert failures.add(group(0, failed=(0, 1))) == 2
    assert failures.add(group(1, failed=(1,))) == 3
