"""The launcher of a job that the agent starts: `python -m services.node.launch --config PATH --treatment HOW ...`.

It runs the job as `tidegate run` does, without a terminal, and tells how it ended in a file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import structlog

from tidegate.cluster.submissions import Treatment
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.launcher.claim import Start, write_private
from tidegate.launcher.outcome import End
from tidegate.launcher.preflight import Away
from tidegate.launcher.run import EarlierLauncher, NotRecorded, RunRequest, run_job
from tidegate.launcher.services import FORKED
from tidegate.logs import configure_logging
from tidegate.runtime.spawner import Spawner
from tidegate.v1 import control_pb2, events_pb2


class _Unseen:
    """A view that nobody looks at: the job's folder and its Control API have all of it. Notes go to the log."""

    def step(self, what: str) -> None:
        """A step of the start."""

    def plan(self, message: str) -> None:
        """In the launcher's log."""

    def note(self, message: str) -> None:
        structlog.get_logger("launcher").warning("note", message=message)

    def event(self, event: events_pb2.Event) -> None:
        """In the job's event file."""

    def job(self, status: control_pb2.GetJobResponse) -> None:
        """Asked through the job's Control API."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.node.launch", description="The launcher of one job.")
    parser.add_argument("--config", type=Path, required=True, help="the job's resolved config")
    parser.add_argument("--treatment", choices=list(Treatment), required=True, help="of a folder that is there already")
    parser.add_argument("--end", type=Path, required=True, help="the file that tells how it ended")
    parser.add_argument("--begun", type=Path, required=True, help="the file that tells whose submission has the folder")
    parser.add_argument("--submission", required=True, help="the name of this one, for that file")
    parser.add_argument("--command", required=True, help="what a person types to submit the job again")
    args = parser.parse_args()
    spawner = Spawner.forked(FORKED)
    try:
        config = JobConfig.read(args.config)
        configure_logging("launcher", level="WARNING")

        def claimed() -> None:
            write_private(args.begun, args.submission)

        end, message, has_begun = _run(config, Start(args.treatment), args.command, spawner, claimed)
    finally:
        if spawner is not None:
            spawner.close()
    write_private(args.end, json.dumps({"end": end, "message": message, "has_begun": has_begun}))
    return int(end is not End.FINISHED)


def _run(
    config: JobConfig, start: Start, command: str, spawner: Spawner | None, claimed: Callable[[], None]
) -> tuple[End, str, bool]:
    """How it ended, and whether it had begun."""
    request = RunRequest(config, start, f"{command} --resume", f"{command} --force", is_of_cluster=True)
    try:
        outcome = asyncio.run(run_job(request, _Unseen(), spawner, claimed=claimed))
    except (Away, EarlierLauncher) as error:
        return End.INTERRUPTED, str(error), False
    except (ConfigError, NotRecorded) as error:
        return End.FAILED, str(error), True
    return outcome.end, outcome.reason, outcome.has_begun


if __name__ == "__main__":
    raise SystemExit(main())
