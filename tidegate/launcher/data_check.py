"""What is asked of a job's data and rewards before it starts: is each record a prompt that fits, is each reward of use.

Order: the files, the chat template, every record, those of the evaluation, then a reward worker that imports the
functions. Invariants: nothing is written; no function is imported into this process; what was found goes into the
config as a checksum, and a config that has one is held to it.
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
        # Apart from the loop, so that a signal is heard while a large file is read.
        checked, prompts = await asyncio.to_thread(_read, job, config.data)
        await judge.check(prompts)
    except (ValueError, WorkerNotStarted) as error:
        raise ConfigError(str(error)) from error
    finally:
        judge.close()
    return replace(job, config=checked)


def _read(job: Job, data: DataSection) -> tuple[JobConfig, tuple[DataPrompt, ...]]:
    """With all prompts, those of the evaluation too."""
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
            f"{path} has the checksum {checksum}, and {section}.checksum is {known}: give the data that it was taken "
            "of, or leave it empty"
        )
    return checksum
