"""Checks a job's data and rewards before the job starts: each record is a prompt that fits, each reward works.

Order:
1. the files;
2. the chat template;
3. every record;
4. the records of the evaluation;
5. a reward worker that imports the functions.

Invariants:
- A check that fails writes nothing. [test_data: wrong_data_and_rewards]
- The check imports no reward function into this process. [test_data: imports_no_reward_function]
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
from tidegate.config.sections.data import DataSection
from tidegate.data.prompts import DataPrompt, PromptReader, evaluation_files, training_files
from tidegate.job import Job
from tidegate.rewards.judge import Judge
from tidegate.rewards.pool import WorkerNotStarted


async def with_checked_data(job: Job) -> Job:
    """The job, with its data's checksums in the config. ConfigError names the file and line, or the reward."""
    config = job.config
    if config.data is None:
        return job
    judge = Judge(config.rewards, num_workers=1, start_timeout_s=config.runtime.command_deadline_s)
    try:
        # Read in a thread, so that the loop still handles a signal while a large file is read.
        checked, prompts = await asyncio.to_thread(_read, job, config.data)
        await judge.check(prompts)
    except (ValueError, WorkerNotStarted) as error:
        raise ConfigError(str(error)) from error
    finally:
        judge.close()
    return replace(job, config=checked)


def _read(job: Job, data: DataSection) -> tuple[JobConfig, tuple[DataPrompt, ...]]:
    """Returns the config with checksums and all prompts, the evaluation's included."""
    config, reader = job.config, PromptReader(data, job.tokenizer)
    files = training_files(data)
    checksum = _checked_sum(reader, files, known=data.checksum, section="data", path=f"data.train={data.train}")
    prompts = reader.read(files, max_tokens=data.max_prompt_tokens or room_for_prompts(config))
    update: dict[str, object] = {"data": data.model_copy(update={"checksum": checksum})}
    if (evaluation := config.evaluation) is not None:
        files, path = evaluation_files(evaluation), f"evaluation.data={evaluation.data}"
        checksum = _checked_sum(reader, files, known=evaluation.checksum, section="evaluation", path=path)
        prompts += reader.read(files, max_tokens=config.model.max_seq_len - longest_evaluated(config))
        update["evaluation"] = evaluation.model_copy(update={"checksum": checksum})
    return config.model_copy(update=update), prompts


def _checked_sum(reader: PromptReader, files: Sequence[Path], *, known: str, section: str, path: str) -> str:
    checksum = reader.checksum(files)
    if known not in ("", checksum):
        raise ValueError(
            f"{path} has the checksum {checksum}, but {section}.checksum is {known}: use the data with that checksum, "
            "or leave the key empty"
        )
    return checksum
