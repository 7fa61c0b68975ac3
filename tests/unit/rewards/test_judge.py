"""A sample's reward: a weighted sum in the config's order. A failed reward counts as 0 or raises, by its policy."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.unit.rewards import graders
from tidegate.config.sections.data import RewardSection
from tidegate.data.prompts import DataPrompt
from tidegate.rewards.answers import exact_match, math_verify, refuse_without_math_verify
from tidegate.rewards.judge import Failure, Judge, PromptResponse, RewardFailed, Score, trial_response

GRADERS = graders.__name__


@asynccontextmanager
async def judge_of(*rewards: dict[str, Any]) -> AsyncIterator[Judge]:
    judge = Judge([RewardSection(**reward) for reward in rewards], num_workers=2, start_timeout_s=60.0)
    try:
        yield judge
    finally:
        judge.close()


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": "function", "path": f"{GRADERS}:{name}", "timeout_s": 60, **fields}


def answered(response: str, *, answer: Any = None, **columns: Any) -> PromptResponse:
    return PromptResponse("1.0.3.2", DataPrompt("train.jsonl:17", "p", "p", answer, columns), response)


@pytest.mark.parametrize(
    ("response", "answer", "want"),
    [
        pytest.param(" 42\n", "42", 1.0, id="white space around it"),
        pytest.param("42", 42, 1.0, id="a number"),
        pytest.param("4.5", [4, 4.5], 1.0, id="one of several"),
        pytest.param("It is 42", "42", 0.0, id="more than the answer"),
        pytest.param("", "42", 0.0, id="nothing"),
    ],
)
def test_exact_match_accepts_the_answer_and_nothing_else(response: str, answer: Any, want: float) -> None:
    assert exact_match(response=response, answer=answer) == want


@pytest.mark.parametrize(
    ("response", "answer", "want"),
    [
        pytest.param("So it is \\boxed{0.5}", "1/2", 1.0, id="another way to write it"),
        pytest.param("The answer is $\\frac{2}{4}$", "\\frac{1}{2}", 1.0, id="not reduced"),
        pytest.param("The answer is 42.", 42, 1.0, id="a number in a sentence"),
        pytest.param("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0, id="an expression"),
        pytest.param("\\boxed{3}", ["1", "3"], 1.0, id="one of several"),
        pytest.param("\\boxed{0.51}", "1/2", 0.0, id="another number"),
        pytest.param("no idea", "1/2", 0.0, id="no expression"),
    ],
)
def test_math_verify_compares_what_expressions_mean(response: str, answer: Any, want: float) -> None:
    pytest.importorskip("math_verify", reason="what requirements/data.txt lists is not installed")
    assert math_verify(response=response, answer=answer) == want


def test_a_job_does_not_start_without_the_package_that_its_reward_needs() -> None:
    with pytest.raises(ValueError, match=r"needs the math-verify package: install what requirements/data.txt lists"):
        refuse_without_math_verify(lambda name: None)


async def test_math_verify_runs_in_a_worker_process() -> None:
    pytest.importorskip("math_verify", reason="what requirements/data.txt lists is not installed")
    async with judge_of({"name": "math_verify", "timeout_s": 60}) as judge:
        assert await judge.score(answered("\\boxed{0.5}", answer="1/2")) == Score(1.0, (1.0,))
        assert await judge.score(answered("\\boxed{0.6}", answer="1/2")) == Score(0.0, (0.0,))


async def test_a_reward_is_the_weighted_sum_of_all() -> None:
    rewards = [{"name": "exact_match", "weight": 2.0}, function("length", weight=-0.25), function("one_of_many")]
    async with judge_of(*rewards) as judge:
        assert await judge.score(answered("four", answer="four", level=0.5)) == Score(
            2.0 - 0.25 * 4 + 0.5 * 2, (1.0, 4.0, 1.0)
        )
        assert await judge.score(answered("five!", answer="four", level=0.5)) == Score(
            -0.25 * 5 + 0.5 * 2, (0.0, 5.0, 1.0)
        )


async def test_a_failed_reward_counts_as_0_and_names_reward_sample_and_record() -> None:
    async with judge_of({"name": "exact_match"}, function("misbehaving")) as judge:
        score = await judge.score(answered("raise", answer="raise"))
    (failure,) = score.failures
    name, lines = f"{GRADERS}:misbehaving", graders.__file__
    want = rf"reward {name} on sample 1\.0\.3\.2 \(train\.jsonl:17\) raised KeyError: 'no such unit' at {lines}:\d+ in "
    assert re.fullmatch(f"{want}misbehaving", failure.message)
    assert score == Score(1.0, (1.0, 0.0), (Failure(name, failure.message, failure.traceback),))
    first, *_, last = failure.traceback.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'no such unit'")
    assert failure.traceback.count("File ") == 1, "the traceback begins at the user's own line"


async def test_a_reward_past_its_time_limit_counts_as_0_and_names_the_sample() -> None:
    async with judge_of(function("misbehaving", timeout_s=0.2)) as judge:
        score = await judge.score(answered("hang"))
    assert score.reward == 0.0
    assert score.failures[0].message.endswith("on sample 1.0.3.2 (train.jsonl:17) gave no result within 0.2 s")


@pytest.mark.parametrize(
    ("response", "want"), [("raise", "raised KeyError"), ("die", "died of SIGKILL"), ("return None", "is no number")]
)
async def test_a_fatal_failure_raises_and_names_the_sample(response: str, want: str) -> None:
    async with judge_of(function("misbehaving", on_error="fatal")) as judge:
        with pytest.raises(RewardFailed, match=rf"on sample 1\.0\.3\.2 \(train\.jsonl:17\) .*{want}.*on_error: zero"):
            await judge.score(answered(response))


async def test_a_function_that_needs_what_a_record_lacks_is_refused_with_its_place() -> None:
    prompts = [
        DataPrompt("train.jsonl:1", "p", "p", None, {"level": 1}),
        DataPrompt("train.jsonl:2", "p", "p", None, {"depth": 1}),
    ]
    async with judge_of(function("one_of_many")) as judge:
        await judge.check(prompts[:1])
        want = r"graders:one_of_many needs 'level', but train.jsonl:2 has no such column \(1 are missing in all\)"
        with pytest.raises(ValueError, match=want):
            await judge.check(prompts)


async def test_an_answer_that_no_response_can_equal_is_refused_with_its_place() -> None:
    answers: list[Any] = ["a", None, 3, {}, []]
    prompts = [DataPrompt(f"train.jsonl:{n}", "p", "p", answer, {}) for n, answer in enumerate(answers, 1)]
    async with judge_of({"name": "exact_match"}) as judge:
        with pytest.raises(
            ValueError, match=r"train.jsonl:2: the answer is None: it must be a text or a number"
        ) as refused:
            await judge.check(prompts)
    assert [line.partition(":")[2][0] for line in str(refused.value).splitlines()] == ["2", "4", "5"]


TRIALS: dict[str, tuple[DataPrompt, str]] = {
    "the answer": (DataPrompt("d:1", "p", "p", "four", {}), "four"),
    "the first of several answers": (DataPrompt("d:1", "p", "p", [4, "four"], {}), "4"),
    "a prompt without an answer": (DataPrompt("d:1", "say four", "say four", None, {}), "say four"),
    "a chat with an answer that is an object": (
        DataPrompt("d:1", [{"role": "user", "content": "say four"}], "<|user|>say four", {"a": 1}, {}),
        "say four",
    ),
}


@pytest.mark.parametrize("case", TRIALS)
def test_the_trials_response_is_the_answer_or_the_prompts_last_text(case: str) -> None:
    prompt, want = TRIALS[case]
    assert trial_response(prompt) == want


async def test_a_reward_that_fails_on_the_trial_is_refused_unless_it_may_fail_on_all_samples() -> None:
    prompt = DataPrompt("train.jsonl:1", "p", "p", "raise", {})
    want = (
        rf"reward {GRADERS}:misbehaving on sample 'raise' of the trial before the start \(train\.jsonl:1\) raised "
        rf"KeyError: 'no such unit' at {graders.__file__}:\d+ in misbehaving; mend it to return a finite number for "
        r"every text, or set rewards\.1\.max_failed=1"
    )
    async with judge_of({"name": "exact_match"}, function("misbehaving")) as judge:
        with pytest.raises(ValueError, match=want):
            await judge.check_on_trial(prompt)
        await judge.check_on_trial(DataPrompt("train.jsonl:1", "p", "p", "else", {}))
    async with judge_of(function("misbehaving", max_failed=1)) as judge:
        await judge.check_on_trial(prompt)
