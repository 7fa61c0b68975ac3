"""Checks a job's data and rewards before the job starts: each record is a prompt that fits, each reward works.

Order:
1. the files;
2. the chat template;
3. every record;
4. the records of the evaluation;
5. a reward worker that imports the functions;
6. the answers that a response must equal, which must be in the tokenizer's vocabulary;
7. each reward, on one response to the first record of the data and of the evaluation.

Invariants:
- A check that fails writes nothing. [test_data: wrong_data_and_rewards]
- The check imports no reward function into this process. [test_data: imports_no_reward_function]
- No reward fails on the right answer to the first record. [test_data: wrong_data_and_rewards]
- The data's checksum goes into the config. A config with a checksum accepts only data with this checksum.
  [test_data: held_to_the_data]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tidegate.config.checks.data import room_for_prompts
from tidegate.config.checks.evaluation import longest_evaluated
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.sections.data import DataSection, RewardName
from tidegate.data.prompts import DataPrompt, PromptReader, evaluation_files, training_files
from tidegate.job import Job
from tidegate.rewards.answers import right_answers
from tidegate.rewards.judge import Judge
from tidegate.rewards.pool import WorkerNotStarted
from tidegate.short_lists import first_lines
from tidegate.tasks.tokenizer import TaskTokenizer

_MAX_FAULTS = 8


async def with_checked_data(job: Job) -> Job:
    """The job, with its data's checksums in the config. ConfigError names the file and line, or the reward."""
    config = job.config
    if config.data is None:
        return job
    judge = Judge(config.rewards, num_workers=1, start_timeout_s=config.runtime.command_deadline_s)
    try:
        # Read in a thread, so that the loop still handles a signal while a large file is read.
        checked, data_sets = await asyncio.to_thread(_read, job, config.data)
        prompts = [prompt for each in data_sets for prompt in each]
        await judge.check(prompts)
        if any(reward.name is RewardName.EXACT_MATCH for reward in config.rewards):
            await asyncio.to_thread(_check_reachable, prompts, job.tokenizer)
        for each in data_sets:
            await judge.check_on_trial(each[0])
    except (ValueError, WorkerNotStarted) as error:
        raise ConfigError(str(error)) from error
    finally:
        judge.close()
    return replace(job, config=checked)


def _read(job: Job, data: DataSection) -> tuple[JobConfig, list[tuple[DataPrompt, ...]]]:
    """Returns the config with checksums, and the prompts of the training data and of the evaluation's."""
    config, reader = job.config, PromptReader(data, job.tokenizer)
    files = training_files(data)
    checksum = _checked_sum(reader, files, known=data.checksum, section="data", path=f"data.train={data.train}")
    data_sets = [reader.read(files, max_tokens=data.max_prompt_tokens or room_for_prompts(config))]
    update: dict[str, object] = {"data": data.model_copy(update={"checksum": checksum})}
    if (evaluation := config.evaluation) is not None:
        files, path = evaluation_files(evaluation), f"evaluation.data={evaluation.data}"
        checksum = _checked_sum(reader, files, known=evaluation.checksum, section="evaluation", path=path)
        data_sets.append(reader.read(files, max_tokens=config.model.max_seq_len - longest_evaluated(config)))
        update["evaluation"] = evaluation.model_copy(update={"checksum": checksum})
    return config.model_copy(update=update), data_sets


def _check_reachable(prompts: Sequence[DataPrompt], tokenizer: TaskTokenizer) -> None:
    """Raise ValueError for prompts whose right answers have no tokens, so that no response can equal one."""
    faults = []
    for prompt in prompts:
        unreachable = []
        for right in right_answers(prompt.answer):
            try:
                tokenizer.encode_response(right)
                break
            except ValueError as error:
                unreachable.append(str(error))
        else:
            faults.append(f"{prompt.where}: no response can equal the answer: {unreachable[0]}")
    if faults:
        raise ValueError(first_lines(faults, most=_MAX_FAULTS))


def _checked_sum(reader: PromptReader, files: Sequence[Path], *, known: str, section: str, path: str) -> str:
    checksum = reader.checksum(files)
    if known not in ("", checksum):
        raise ValueError(
            f"{path} has the checksum {checksum}, but {section}.checksum is {known}: use the data with that checksum, "
            "or leave the key empty"
        )
    return checksum
