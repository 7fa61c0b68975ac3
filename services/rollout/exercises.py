"""The prompts of a job, and the rewards of responses to them: of a built-in task, or of a data set.

There are two lists of prompts: an endless one to train on, and a finite one of held-out prompts for evaluations.

Invariants:
- A prompt's tokens and a response's reward depend only on the job and the message, so they are the same for a new lead.
  [test_exercises: every_lead_gets_the_same]
- Computing rewards delays no other work of the lead. [test_lead_rewards: slow_reward_delays_nothing_else]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from tidegate.config.sections.data import reward_names
from tidegate.config.sections.evaluation import EvaluationSection
from tidegate.data.prompts import DataPrompt, PromptList, PromptReader, evaluation_files, training_files
from tidegate.job import Job
from tidegate.rewards.judge import Failure, Judge, PromptResponse
from tidegate.tasks import Prompt, Task


@dataclass(frozen=True, slots=True)
class Judged:
    """The rewards of responses, in their order, and for each response the unweighted rewards by name.

    `failures` are the rewards that failed and count as 0, by the place of the response.
    """

    rewards: tuple[float, ...]
    by_name: tuple[Mapping[str, float], ...]
    failures: Mapping[int, tuple[Failure, ...]] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        return sum(len(failures) for failures in self.failures.values())


class Exercises(Protocol):
    """A list of prompts by index, and the rewards of responses to them."""

    @property
    def reward_names(self) -> tuple[str, ...]: ...

    @property
    def num_prompts(self) -> int | None:
        """None for an endless list."""
        ...

    def prompt_tokens(self, prompt: int) -> list[int]: ...

    def row(self, prompt: int) -> int | None:
        """The number of the prompt's record, the same in every epoch. None where prompts do not repeat."""
        ...

    async def judge(self, prompt: int, names: Sequence[str], responses: Sequence[Sequence[int]]) -> Judged:
        """The rewards of responses to one prompt, given as tokens. `names` identify the responses in messages."""
        ...

    def held_out(self) -> Exercises:
        """The prompts of the job's evaluation. They share the rewards of these exercises and are closed with them.

        It may read files. Raises ValueError when a file has changed since the job started."""
        ...

    def close(self) -> None:
        """End the processes that compute rewards."""
        ...


async def open_exercises(job: Job) -> Exercises:
    """The job's exercises. Raises ValueError when the data has changed since the job started."""
    if job.task is not None:
        return TaskExercises(job, job.task, job.task.prompt)
    return await asyncio.to_thread(_open_data_exercises, job)


class TaskExercises:
    """The exercises of a built-in task. `prompt_at` returns a prompt by index."""

    def __init__(
        self, job: Job, task: Task, prompt_at: Callable[[int], Prompt], *, num_prompts: int | None = None
    ) -> None:
        self._job = job
        self._task = task
        self._prompt_at = prompt_at
        self.num_prompts = num_prompts

    @property
    def reward_names(self) -> tuple[str, ...]:
        assert self._job.config.task is not None
        return (self._job.config.task.name,)

    def prompt_tokens(self, prompt: int) -> list[int]:
        return self._job.tokenizer.encode_prompt(self._prompt_at(prompt).text)

    def row(self, prompt: int) -> None:
        """None: the prompts of an endless list do not repeat."""

    async def judge(self, prompt: int, names: Sequence[str], responses: Sequence[Sequence[int]]) -> Judged:
        # Run it outside the event loop, which answers the scheduler and renews the lease: a reward may take long.
        return await asyncio.to_thread(self._judge, prompt, responses)

    def held_out(self) -> TaskExercises:
        evaluation = _evaluation_of(self._job)
        return TaskExercises(self._job, self._task, self._task.held_out, num_prompts=evaluation.num_prompts)

    def close(self) -> None:
        """There is nothing to end."""

    def _judge(self, prompt: int, responses: Sequence[Sequence[int]]) -> Judged:
        question = self._prompt_at(prompt)
        texts = [self._job.response_text(response) for response in responses]
        rewards = tuple(self._task.reward(question, text) for text in texts)
        (name,) = self.reward_names
        return Judged(rewards, tuple({name: reward} for reward in rewards))


def _open_data_exercises(job: Job) -> DataExercises:
    """Raises as `open_exercises`. The processes that compute rewards start with the first response."""
    config, data = job.config, job.config.data
    assert data is not None, "the config requires a task or data"
    reader = PromptReader(data, job.tokenizer)
    prompts = _unchanged(reader, training_files(data), checksum=data.checksum, what=f"data.train={data.train}")
    judge = Judge(
        config.rewards,
        num_workers=config.rollout.num_reward_workers,
        start_timeout_s=config.runtime.command_deadline_s,
    )
    return DataExercises(job, reader, PromptList(prompts, seed=config.seed, shuffle=data.shuffle), judge)


class DataExercises:
    """The exercises of a data set."""

    def __init__(
        self, job: Job, reader: PromptReader, prompts: PromptList, judge: Judge, *, num_prompts: int | None = None
    ) -> None:
        self._job = job
        self._reader = reader
        self._prompts = prompts
        self._judge = judge
        self.num_prompts = num_prompts
        self._log = structlog.get_logger("rewards")

    @property
    def reward_names(self) -> tuple[str, ...]:
        return reward_names(self._job.config.rewards)

    def prompt_tokens(self, prompt: int) -> list[int]:
        return self._reader.encode(self._prompts.at(prompt))

    def row(self, prompt: int) -> int:
        return self._prompts.row(prompt)

    async def judge(self, prompt: int, names: Sequence[str], responses: Sequence[Sequence[int]]) -> Judged:
        question = self._prompts.at(prompt)
        answered = [
            PromptResponse(name, question, self._job.response_text(response))
            for name, response in zip(names, responses, strict=True)
        ]
        scores = await asyncio.gather(*(self._judge.score(each) for each in answered))
        failures = {place: score.failures for place, score in enumerate(scores) if score.failures}
        for failure in (each for failed in failures.values() for each in failed):
            self._log.warning("reward counted as 0", fault=failure.message, traceback=failure.traceback)
        by_name = tuple(dict(zip(self.reward_names, score.values, strict=True)) for score in scores)
        return Judged(tuple(score.reward for score in scores), by_name, failures)

    def held_out(self) -> DataExercises:
        evaluation = _evaluation_of(self._job)
        files, what = evaluation_files(evaluation), f"evaluation.data={evaluation.data}"
        prompts = _unchanged(self._reader, files, checksum=evaluation.checksum, what=what)
        kept = prompts[: evaluation.num_prompts]
        in_order = PromptList(kept, seed=self._job.config.seed, shuffle=False)
        return DataExercises(self._job, self._reader, in_order, self._judge, num_prompts=len(kept))

    def close(self) -> None:
        self._judge.close()


def _evaluation_of(job: Job) -> EvaluationSection:
    assert job.config.evaluation is not None, "a job without an evaluation section evaluates nothing"
    return job.config.evaluation


def _unchanged(reader: PromptReader, files: Sequence[Path], *, checksum: str, what: str) -> tuple[DataPrompt, ...]:
    if checksum not in ("", reader.checksum(files)):
        raise ValueError(f"{what} has changed since the job started: restore the files as they were")
    # The lengths need no check: they were checked before the job started, on the same bytes.
    return reader.read(files, max_tokens=None)
