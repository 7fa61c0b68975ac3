"""The real scheduler process of a job whose other processes are the caller's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tidegate.certs.job_credentials import issue_job_credentials
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.runtime.service import connect_bus
from tidegate.types import job_id

REPOSITORY = Path(__file__).resolve().parents[1]


@asynccontextmanager
async def scheduler_process(config: JobConfig) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs one replica until the end of the block, and makes the job's streams for it, as a launcher does. Its log is
    `scheduler.jsonl` of the job's first attempt."""
    await (await connect_bus(config, name="launcher", opens_after=0)).close()
    folder = JobFolder.of(config)
    (logs := folder.attempt().logs).mkdir(parents=True, exist_ok=True)
    (memory := Path(config.runtime.host_memory_root)).mkdir(exist_ok=True)
    issue_job_credentials(memory, job_id(config.job))
    folder.config.write_text(config.to_json())
    with (logs / "scheduler.out").open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.scheduler", "--config", str(folder.config)),
            cwd=REPOSITORY,
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
