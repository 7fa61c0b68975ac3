"""`tidegate run` as a separate process, and its traces on the machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.unit.cli.configs import small_file
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder

_GONE_TIMEOUT_S = 20.0


class Launched:
    """A launcher whose job, host memory and servers all lie under `folder`."""

    def __init__(self, folder: Path, *arguments: str, **changes: Any) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "cli", "run", str(small_file(folder, **changes)), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.said = ""

    def until_it_says(self, what: str) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line
            if what in line:
                return
        raise AssertionError(f"it ended without saying {what!r}:\n{self.said}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end. Returns the exit status, negative for a signal."""
        _, rest = self._process.communicate()
        self.said += rest
        return self._process.returncode

    def config(self) -> JobConfig:
        return JobConfig.from_json((self.folder / "jobs" / "small" / "config.json").read_text())

    def job_folder(self) -> JobFolder:
        return JobFolder.of(self.config())


def processes_of(folder: Path) -> dict[int, str]:
    """Command lines, by pid, of all processes but this one that name the folder, work in it or write to it."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            places = [command, process.cwd(), *(opened.path for opened in process.open_files())]
            if process.pid != os.getpid() and any(str(folder) in place for place in places):
                found[process.pid] = command
    return found


def wait_until_gone(pids: list[int]) -> None:
    """Returns when all of them are dead. Fails when one is not in time."""
    for pid in pids:
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                assert select.select([pidfd], [], [], _GONE_TIMEOUT_S)[0], f"pid {pid} outlived its launcher"
            finally:
                os.close(pidfd)


def assert_nothing_is_left(launched: Launched) -> None:
    """Checks that it left no process, and so no port, no host memory, no endpoint."""
    assert processes_of(launched.folder) == {}
    assert list((launched.folder / "memory").iterdir()) == []
    assert not launched.job_folder().endpoint.exists()
