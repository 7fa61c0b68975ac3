"""What the rollout asks, and what a response is worth: of a built-in task, or of a data set with rewards.

Invariants: a prompt's tokens and a response's reward are functions of the job and of what is on the wire, so that a new
lead asks and judges alike; judging holds up nothing else of the lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from tidegate.config_data import reward_names
from tidegate.data.prompts import PromptList, PromptReader, training_files
from tidegate.job import Job
from tidegate.rewards.judge import Answered, Judge
from tidegate.tasks import Task
from tidegate.types import SampleId


@dataclass(frozen=True, slots=True)
class Judged:
    """Rewards in the order of the responses, and of each response every reward by name, before its weight.

    `num_failed` is how often a reward failed and counted 0.
    """

    rewards: tuple[float, ...]
    by_name: tuple[Mapping[str, float], ...]
    num_failed: int = 0


class Exercises(Protocol):
    """The endless list of prompts by index."""

    def prompt_tokens(self, prompt: int) -> list[int]: ...

    async def judge(self, prompt: int, samples: Sequence[SampleId], responses: Sequence[Sequence[int]]) -> Judged:
        """Rewards of responses to one prompt, given as their tokens; `samples` name them."""
        ...

    def close(self) -> None:
        """Ends what judging started."""
        ...


async def open_exercises(job: Job) -> Exercises:
    """ValueError when the data is no longer what it was when the job started."""
    if job.task is not None:
        return TaskExercises(job, job.task)
    return await asyncio.to_thread(DataExercises, job)


class TaskExercises:
    """Of a built-in task."""

    def __init__(self, job: Job, task: Task) -> None:
        assert job.config.task is not None, "the task is the config's"
        self._tokenizer = job.tokenizer
        self._task = task
        self._name = job.config.task.name

    def prompt_tokens(self, prompt: int) -> list[int]:
        return self._tokenizer.encode_prompt(self._task.prompt(prompt).text)

    async def judge(self, prompt: int, samples: Sequence[SampleId], responses: Sequence[Sequence[int]]) -> Judged:
        # Apart from the loop, which answers the scheduler and keeps the lease: a reward is a program of any length.
        return await asyncio.to_thread(self._judge, prompt, responses)

    def close(self) -> None:
        """Nothing was started."""

    def _judge(self, prompt: int, responses: Sequence[Sequence[int]]) -> Judged:
        asked = self._task.prompt(prompt)
        texts = [self._tokenizer.decode_response(response) for response in responses]
        rewards = tuple(self._task.reward(asked, text) for text in texts)
        return Judged(rewards, tuple({self._name: reward} for reward in rewards))


class DataExercises:
    """Of a data set; its processes are started when there is something to judge."""

    def __init__(self, job: Job) -> None:
        config, data = job.config, job.config.data
        assert data is not None, "the config was checked: a job has a task or data"
        self._tokenizer = job.tokenizer
        self._reader = PromptReader(data, job.tokenizer)
        files = training_files(data)
        if data.checksum not in ("", self._reader.checksum(files)):
            raise ValueError(f"data.train={data.train} has changed since the job was started: put back what it was")
        # Lengths were checked before the job started, and are those of the same bytes.
        prompts = self._reader.read(files, max_tokens=None)
        self._prompts = PromptList(prompts, seed=config.seed, shuffle=data.shuffle)
        self._judge = Judge(
            config.rewards,
            num_workers=config.rollout.num_reward_workers,
            start_timeout_s=config.runtime.command_deadline_s,
        )
        self._names = reward_names(config.rewards)
        self._log = structlog.get_logger("rewards")

    def prompt_tokens(self, prompt: int) -> list[int]:
        return self._reader.encode(self._prompts.at(prompt))

    async def judge(self, prompt: int, samples: Sequence[SampleId], responses: Sequence[Sequence[int]]) -> Judged:
        asked = self._prompts.at(prompt)
        answered = [
            Answered(str(sample), asked, self._tokenizer.decode_response(response))
            for sample, response in zip(samples, responses, strict=True)
        ]
        scores = await asyncio.gather(*(self._judge.score(each) for each in answered))
        faults = [fault for score in scores for fault in score.faults]
        for fault in faults:
            self._log.warning("reward counted as 0", fault=fault)
        by_name = tuple(dict(zip(self._names, score.values, strict=True)) for score in scores)
        return Judged(tuple(score.reward for score in scores), by_name, num_failed=len(faults))

    def close(self) -> None:
        self._judge.close()
