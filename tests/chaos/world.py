"""The job under test as it is seen from outside: its folder, its processes, its stores, and the run that goes on now.

Faults get it to strike, and the driver to start and follow runs.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.chaos.moments import Moment
from tests.chaos.record import EventRows
from tests.chaos.stores import Stores
from tests.chaos.variants import Variant
from tests.e2e.jobs import REPOSITORY, RunningJob
from tidegate.config.job_config import parse_config

LAUNCHER = "launcher"
MEMORY = "memory"
"""The folder for the job's host memory, where it is a file system of its own."""
_BEAT_S = 0.1
_COMMAND_TIMEOUT_S = 30.0


class NotThere(RuntimeError):
    """What a fault is to strike does not exist now."""


class BadAnswer(RuntimeError):
    """A person's command ended in a way that is no answer."""


class RunOver(RuntimeError):
    """The job has finished, so that nothing more can happen to it."""


@dataclass
class World:
    """One job, over all its runs."""

    variant: Variant
    name: str
    folder: Path
    stores: Stores | None
    raw: dict[str, Any] = field(init=False)
    job: RunningJob | None = None
    """The run that goes on. None between two runs."""
    at_rest: asyncio.Event = field(default_factory=asyncio.Event)
    """Set between two runs, once the driver has looked at what the first one left."""
    is_over: bool = False
    _printed: asyncio.Task[bytes] | None = None
    remedies: list[Callable[[], None]] = field(default_factory=list)
    """What a person does where a resume is refused because of what was done between two runs."""
    damaged: set[Path] = field(default_factory=set)
    """Files that a fault has damaged, also those that are mended since."""

    def __post_init__(self) -> None:
        urls = {} if self.stores is None else {"servers": self.stores.urls()}
        memory = self.folder / MEMORY
        memory_root = {"runtime__host_memory_root": str(memory)} if memory.is_mount() else {}
        self.raw = self.variant.job(self.name, **memory_root) | {"output_dir": str(self.folder)} | urls
        self.config_path.write_text(yaml.safe_dump(self.raw))
        self.events = EventRows(self.root / "events.jsonl")

    @property
    def root(self) -> Path:
        """The job's folder."""
        return self.folder / self.name

    @property
    def config_path(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    async def start(self, *options: str) -> RunningJob:
        """Starts a run. What it prints comes through a pipe, which no full disk stops."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli", "run", str(self.config_path), *options),
            cwd=REPOSITORY,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self.at_rest.clear()
        self.job = RunningJob(parse_config(self.raw), process)
        assert process.stdout is not None
        self._printed = asyncio.create_task(process.stdout.read())
        return self.job

    async def said(self) -> str:
        """What the run printed, once it is over."""
        assert self._printed is not None
        return (await self._printed).decode(errors="replace")

    def rest(self) -> None:
        """Notes that the run is over, and what it left was looked at."""
        self.job = None
        self.at_rest.set()

    def output_of(self, attempt: int) -> Path:
        return self.folder / f"run{attempt}.out"

    def process(self, name: str) -> psutil.Process:
        """A process of the run by the name that faults use. NotThere."""
        try:
            return self._process(name)
        except (AssertionError, psutil.Error) as error:
            raise NotThere(f"{name}: {error}") from error

    def _process(self, name: str) -> psutil.Process:
        job = self.running()
        if name == LAUNCHER:
            return psutil.Process(job.process.pid)
        kind, _, rest = name.partition(" ")
        if kind == "worker":
            role, _, gpu = rest.rpartition(" ")
            return job.worker(gpu, role=role)
        if kind == "lead":
            node = self.events.lead(rest)
            if node is None:
                raise NotThere(f"nobody leads the {rest}")
            return job.service(f"services.{rest}", node)
        module, _, node = name.partition("@")
        if module == "forkserver":
            return job.service("tidegate.runtime.forkserver", node)
        return job.service(module if module.endswith("-server") else f"services.{module}", node)

    def running(self) -> RunningJob:
        """NotThere between two runs."""
        if self.job is None or self.job.process.returncode is not None:
            raise NotThere("the job does not run now")
        return self.job

    async def until(self, moment: Moment) -> None:
        """RunOver when the job finishes before."""
        await self.until_holds(lambda: moment.is_reached(self.events.rows))
        await asyncio.sleep(moment.delay_s)

    async def until_holds(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self.is_over:
                raise RunOver
            await asyncio.sleep(_BEAT_S)

    async def stop(self, number: signal.Signals) -> str:
        """Ends the run by a signal to its launcher, and waits until the driver has looked at what is left.

        NotThere. RunOver where the job finished before the signal came.
        """
        job = self.running()
        job.process.send_signal(number)
        started_s = time.monotonic()
        await job.process.wait()
        took_s = time.monotonic() - started_s
        await self.at_rest.wait()
        if self.is_over:
            raise RunOver
        return f"{number.name} to the launcher, which ended after {took_s:.1f} s"

    async def command(self, *words: str) -> tuple[int, str]:
        """What a `tidegate` command gave: exit code and text. A negative code: it did not end."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli", *words, "--output-dir", str(self.folder)),
            cwd=REPOSITORY,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            text, _ = await asyncio.wait_for(process.communicate(), _COMMAND_TIMEOUT_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return -1, f"no end within {_COMMAND_TIMEOUT_S:g} s"
        assert process.returncode is not None
        return process.returncode, text.decode(errors="replace")
