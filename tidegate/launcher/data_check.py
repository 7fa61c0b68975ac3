"""What is asked of a job's data and rewards before it starts: is each record a prompt that fits, is each reward of use.

Order: the files, the chat template, every record, then a reward worker that imports the functions. Invariants: nothing
is written; no function is imported into this process; what was found goes into the config as a checksum, and a config
that has one is held to it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tidegate.config import ConfigError
from tidegate.config_data import room_for_prompts
from tidegate.data.prompts import DataPrompt, PromptReader, training_files
from tidegate.job import Job
from tidegate.rewards.judge import Judge
from tidegate.rewards.pool import WorkerNotStarted


async def with_checked_data(job: Job) -> Job:
    """The job, with its data's checksum in the config. ConfigError names the file and line, or the reward."""
    config = job.config
    if config.data is None:
        return job
    judge = Judge(config.rewards, num_workers=1, start_timeout_s=config.runtime.command_deadline_s)
    try:
        # Apart from the loop, so that a signal is heard while a large file is read.
        checksum, prompts = await asyncio.to_thread(_read, job)
        await judge.check(prompts)
    except (ValueError, WorkerNotStarted) as error:
        raise ConfigError(str(error)) from error
    finally:
        judge.close()
    data = config.data.model_copy(update={"checksum": checksum})
    return replace(job, config=config.model_copy(update={"data": data}))


def _read(job: Job) -> tuple[str, tuple[DataPrompt, ...]]:
    data = job.config.data
    assert data is not None
    reader, files = PromptReader(data, job.tokenizer), training_files(data)
    checksum = reader.checksum(files)
    if data.checksum not in ("", checksum):
        raise ValueError(
            f"data.train={data.train} has the checksum {checksum}, and data.checksum is {data.checksum}: give the data "
            "that it was taken of, or leave it empty"
        )
    return checksum, reader.read(files, max_tokens=data.max_prompt_tokens or room_for_prompts(job.config))
