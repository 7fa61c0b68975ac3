"""What the rollout asks, and what a response is worth: of a built-in task, or of a data set with rewards.

There is the endless list that is trained on, and the list of held-out prompts that versions are evaluated on.

Invariants: a prompt's tokens and a response's reward are functions of the job and of what is on the wire, so that a new
lead asks and judges alike; judging holds up nothing else of the lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from tidegate.config.sections.data import reward_names
from tidegate.config.sections.evaluation import EvaluationSection
from tidegate.data.prompts import DataPrompt, PromptList, PromptReader, evaluation_files, training_files
from tidegate.job import Job
from tidegate.rewards.judge import Answered, Judge
from tidegate.tasks import Prompt, Task


@dataclass(frozen=True, slots=True)
class Judged:
    """Rewards in the order of the responses, and of each response every reward by name, before its weight.

    `num_failed` is how often a reward failed and counted 0.
    """

    rewards: tuple[float, ...]
    by_name: tuple[Mapping[str, float], ...]
    num_failed: int = 0


class Exercises(Protocol):
    """A list of prompts by index, and what decides about answers to them."""

    @property
    def reward_names(self) -> tuple[str, ...]: ...

    @property
    def num_prompts(self) -> int | None:
        """None: the list has no end."""
        ...

    def prompt_tokens(self, prompt: int) -> list[int]: ...

    def row(self, prompt: int) -> int | None:
        """The same for what is asked again in another epoch; None where nothing is."""
        ...

    async def judge(self, prompt: int, names: Sequence[str], responses: Sequence[Sequence[int]]) -> Judged:
        """Responses to one prompt, given as their tokens; `names` tell a person which they are."""
        ...

    def held_out(self) -> Exercises:
        """The prompts of the job's evaluation; judged by what these are judged by, and closed with these.

        It may read files. ValueError when they are no longer what they were when the job started."""
        ...

    def close(self) -> None:
        """Ends what judging started."""
        ...


async def open_exercises(job: Job) -> Exercises:
    """ValueError when the data is no longer what it was when the job started."""
    if job.task is not None:
        return TaskExercises(job, job.task, job.task.prompt)
    return await asyncio.to_thread(_open_data_exercises, job)


class TaskExercises:
    """Of a built-in task."""

    def __init__(self, job: Job, task: Task, ask: Callable[[int], Prompt], *, num_prompts: int | None = None) -> None:
        self._job = job
        self._task = task
        self._ask = ask
        self.num_prompts = num_prompts

    @property
    def reward_names(self) -> tuple[str, ...]:
        assert self._job.config.task is not None
        return (self._job.config.task.name,)

    def prompt_tokens(self, prompt: int) -> list[int]:
        return self._job.tokenizer.encode_prompt(self._ask(prompt).text)

    def row(self, prompt: int) -> None:
        """Of a list without an end, each prompt is asked once."""

    async def judge(self, prompt: int, names: Sequence[str], responses: Sequence[Sequence[int]]) -> Judged:
        # Apart from the loop, which answers the scheduler and keeps the lease: a reward is a program of any length.
        return await asyncio.to_thread(self._judge, prompt, responses)

    def held_out(self) -> TaskExercises:
        evaluation = _evaluation_of(self._job)
        return TaskExercises(self._job, self._task, self._task.held_out, num_prompts=evaluation.num_prompts)

    def close(self) -> None:
        """Nothing was started."""

    def _judge(self, prompt: int, responses: Sequence[Sequence[int]]) -> Judged:
        asked = self._ask(prompt)
        texts = [self._job.tokenizer.decode_response(response) for response in responses]
        rewards = tuple(self._task.reward(asked, text) for text in texts)
        (name,) = self.reward_names
        return Judged(rewards, tuple({name: reward} for reward in rewards))


def _open_data_exercises(job: Job) -> DataExercises:
    """ValueError as `open_exercises`; the processes that judge are started when there is something to judge."""
    config, data = job.config, job.config.data
    assert data is not None, "the config was checked: a job has a task or data"
    reader = PromptReader(data, job.tokenizer)
    prompts = _unchanged(reader, training_files(data), checksum=data.checksum, what=f"data.train={data.train}")
    judge = Judge(
        config.rewards,
        num_workers=config.rollout.num_reward_workers,
        start_timeout_s=config.runtime.command_deadline_s,
    )
    return DataExercises(job, reader, PromptList(prompts, seed=config.seed, shuffle=data.shuffle), judge)


class DataExercises:
    """Of a data set."""

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
        asked = self._prompts.at(prompt)
        answered = [
            Answered(name, asked, self._job.tokenizer.decode_response(response))
            for name, response in zip(names, responses, strict=True)
        ]
        scores = await asyncio.gather(*(self._judge.score(each) for each in answered))
        faults = [fault for score in scores for fault in score.faults]
        for fault in faults:
            self._log.warning("reward counted as 0", fault=fault)
        by_name = tuple(dict(zip(self.reward_names, score.values, strict=True)) for score in scores)
        return Judged(tuple(score.reward for score in scores), by_name, num_failed=len(faults))

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
    assert job.config.evaluation is not None, "a job without the section evaluates nothing"
    return job.config.evaluation


def _unchanged(reader: PromptReader, files: Sequence[Path], *, checksum: str, what: str) -> tuple[DataPrompt, ...]:
    if checksum not in ("", reader.checksum(files)):
        raise ValueError(f"{what} has changed since the job was started: put back what it was")
    # Lengths were checked before the job started, and are those of the same bytes.
    return reader.read(files, max_tokens=None)
