"""A sample's reward: the weighted sum of the config's rewards, in their order.

`exact_match` is computed here; `math_verify` and functions run in the pool's processes. A reward that fails on a sample
counts as 0 or raises, as its `on_error` says. In both cases the failure names the reward, the sample and the record. A
reward depends only on the response's text and its record.

Before a job starts, each reward values one response of each data set: the right answer, which no reward may fail on.

Invariants:
- The sum is in the order of the config, so the order of results changes no bit. [test_judge: weighted_sum_of_all]
- A reward that fails on the trial is refused, unless it may fail on all samples. [test_judge: fails_on_the_trial]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate.config.sections.data import OnError, RewardName, RewardSection, reward_names
from tidegate.data.prompts import ARGUMENTS, DataPrompt
from tidegate.rewards.answers import MATH_VERIFY, exact_match, refuse_without_math_verify, right_answers
from tidegate.rewards.pool import FunctionFailed, RewardPool
from tidegate.rewards.worker import FunctionPath
from tidegate.short_lists import first_lines

_MAX_FAULTS = 3


class AnswerReward(Protocol):
    """A reward that is quick enough to be computed here. `answer` is the record's."""

    def __call__(self, *, response: str, answer: Any) -> float: ...


class RewardFailed(ValueError):
    """A reward whose policy is fatal failed on a sample."""


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """A response to a prompt. `sample` is its id."""

    sample: str
    prompt: DataPrompt
    response: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that failed on a sample. `reward` is its name.

    `message` names the reward, the sample and the record. `traceback` is empty where the function raised nothing.
    """

    reward: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """A sample's reward. `values` are the unweighted rewards. Those that failed count as 0."""

    reward: float
    values: tuple[float, ...]
    failures: tuple[Failure, ...] = ()


class Judge:
    """Computes the rewards of one job. `close` it, for it may hold processes."""

    def __init__(self, rewards: Sequence[RewardSection], *, num_workers: int, start_timeout_s: float) -> None:
        self._rewards = tuple(rewards)
        self._names = reward_names(rewards)
        # Import a function that two rewards use only once. It is called for each.
        paths = [path for reward in rewards if isinstance(path := _function_of(reward), FunctionPath)]
        self._functions = tuple(dict.fromkeys(paths))
        self._pool = RewardPool(self._functions, size=num_workers, start_timeout_s=start_timeout_s)

    async def check(self, prompts: Sequence[DataPrompt]) -> None:
        """Check that every reward can be called for every prompt. Raises ValueError or WorkerNotStarted."""
        if any(reward.name is not RewardName.FUNCTION for reward in self._rewards):
            _check_answers(prompts)
        if any(reward.name is RewardName.MATH_VERIFY for reward in self._rewards):
            refuse_without_math_verify()
        if not self._functions:
            return
        for function, signature in zip(self._functions, await self._pool.signatures(), strict=True):
            needed = [name for name in signature.required if name not in ARGUMENTS]
            lacking = [(prompt, name) for prompt in prompts for name in needed if name not in prompt.columns]
            if lacking:
                prompt, name = lacking[0]
                raise ValueError(
                    f"{function.path} needs {name!r}, but {prompt.where} has no such column ({len(lacking)} are "
                    f"missing in all): it may need prompt, response, answer and columns that every record has; the "
                    f"columns are {', '.join(sorted(prompt.columns)) or 'none'}. Give {name!r} a default, or give the "
                    "data the column"
                )

    async def check_on_trial(self, prompt: DataPrompt) -> None:
        """Value one response to the prompt. Raises ValueError or WorkerNotStarted where a reward fails on it."""
        response = trial_response(prompt)
        answered = PromptResponse(f"{response!r:.60} of the trial before the start", prompt, response)
        for number, reward in enumerate(self._rewards):
            result = await self._result(number, answered)
            if isinstance(result, Failure) and reward.max_failed < 1:
                raise ValueError(
                    f"{result.message}; mend it to return a finite number for every text, or set "
                    f"rewards.{number}.max_failed=1 to start all the same"
                )

    async def score(self, answered: PromptResponse) -> Score:
        """The rewards of a response. Raises RewardFailed where a failed reward's policy is fatal."""
        scored = [asyncio.ensure_future(self._allowed(number, answered)) for number in range(len(self._rewards))]
        try:
            results = await asyncio.gather(*scored)
        finally:
            for each in scored:
                each.cancel()
            await asyncio.gather(*scored, return_exceptions=True)
        values = tuple(0.0 if isinstance(result, Failure) else float(result) for result in results)
        total = sum(reward.weight * value for reward, value in zip(self._rewards, values, strict=True))
        return Score(float(total), values, tuple(result for result in results if isinstance(result, Failure)))

    def close(self) -> None:
        self._pool.close()

    async def _allowed(self, number: int, answered: PromptResponse) -> float | Failure:
        """The value, or a failure that counts as 0. Raises RewardFailed for any other failure."""
        result = await self._result(number, answered)
        if isinstance(result, Failure) and self._rewards[number].on_error is OnError.FATAL:
            raise RewardFailed(f"{result.message}; on_error: zero would count it as 0\n{result.traceback}".rstrip())
        return result

    async def _result(self, number: int, answered: PromptResponse) -> float | Failure:
        reward = self._rewards[number]
        computed = _function_of(reward)
        if not isinstance(computed, FunctionPath):
            return computed(response=answered.response, answer=answered.prompt.answer)
        try:
            function = self._functions.index(computed)
            return await self._pool.call(function, _arguments(answered), timeout_s=reward.timeout_s)
        except FunctionFailed as error:
            message = f"reward {reward.label} on sample {answered.sample} ({answered.prompt.where}) {error}"
            return Failure(self._names[number], message, error.traceback)


def trial_response(prompt: DataPrompt) -> str:
    """A response that no reward should fail on: the right answer or, without one, the prompt's own last text."""
    try:
        return right_answers(prompt.answer)[0]
    except ValueError:
        given = prompt.given if isinstance(prompt.given, str) else prompt.given[-1]["content"]
        return given if isinstance(given, str) else ""


def _function_of(reward: RewardSection) -> FunctionPath | AnswerReward:
    """The function that a worker process must import, or one that is called here."""
    match reward.name:
        case RewardName.EXACT_MATCH:
            return exact_match
        case RewardName.MATH_VERIFY:
            return FunctionPath(MATH_VERIFY, "")
        case RewardName.FUNCTION:
            return FunctionPath(reward.path, reward.import_from)


def _arguments(answered: PromptResponse) -> dict[str, Any]:
    prompt = answered.prompt
    return {**prompt.columns, "prompt": prompt.given, "response": answered.response, "answer": prompt.answer}


def _check_answers(prompts: Sequence[DataPrompt]) -> None:
    faults = []
    for prompt in prompts:
        try:
            right_answers(prompt.answer)
        except ValueError as error:
            faults.append(f"{prompt.where}: {error}")
    if faults:
        raise ValueError(first_lines(faults, most=_MAX_FAULTS))
