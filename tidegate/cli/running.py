"""`tidegate demo` and `tidegate run`: the config they run, what they show, what they print at the end.

Everything while the job runs goes to stderr. Stdout gets the result: a table of the iterations, and as its last line
one JSON object (`demo` always, `run` with `-o json`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from importlib.resources import as_file, files
from typing import Any

from tidegate.cli import jobs
from tidegate.cli.rows import Form, table
from tidegate.cli.views import UnfailingStream, make_view
from tidegate.config import JobConfig, load_config
from tidegate.job import JobFolder
from tidegate.launcher.claim import CannotStart, Start, saved_config
from tidegate.launcher.outcome import End, Outcome
from tidegate.launcher.run import Order, run_job
from tidegate.logs import configure_logging


def demo(given: argparse.Namespace, form: Form) -> int:
    """Always in the same folder: each fresh start replaces the one before."""
    overrides: dict[str, Any] = {"output_dir": given.output_dir}
    if given.seed is not None:
        overrides["seed"] = given.seed
    with as_file(files("tidegate") / "demo.yaml") as path:
        config = load_config(path, overrides=overrides)
    if given.resume and given.seed is None:
        config = _with_seed_of_last_start(config)
    command = ["tidegate", "demo"]
    if given.output_dir != "jobs":
        command += ["--output-dir", given.output_dir]
    start = Start.RESUME if given.resume else Start.FORCE
    outcome = _run(_order(config, start, command, anew=[]))
    if form is Form.TABLE:
        _print_iterations(outcome)
    print(json.dumps(outcome.summary()))
    return exit_code(outcome)


def run(given: argparse.Namespace, form: Form) -> int:
    if given.resume and given.force:
        raise CannotStart("--resume goes on with what --force removes: give one of them")
    overrides = {} if given.output_dir is None else {"output_dir": given.output_dir}
    config = load_config(given.config, overrides=overrides)
    command = ["tidegate", "run", str(given.config)]
    if given.output_dir is not None:
        command += ["--output-dir", given.output_dir]
    start = Start.RESUME if given.resume else Start.FORCE if given.force else Start.FRESH
    outcome = _run(_order(config, start, command, anew=["--force"]))
    if form is Form.TABLE:
        _print_iterations(outcome)
    else:
        print(json.dumps(outcome.summary()))
    return exit_code(outcome)


def exit_code(outcome: Outcome) -> int:
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    return int(outcome.end is not End.FINISHED)


def _with_seed_of_last_start(config: JobConfig) -> JobConfig:
    saved = saved_config(JobFolder.of(config))
    return config.model_copy(update={"seed": saved.seed}) if saved else config


def _order(config: JobConfig, start: Start, command: list[str], *, anew: list[str]) -> Order:
    return Order(config, start, shlex.join([*command, "--resume"]), shlex.join([*command, *anew]))


def _run(order: Order) -> Outcome:
    # Until the job's own log is open: what stands in the way is told as this command's message, not by a library.
    configure_logging("launcher", level="CRITICAL")
    stream = UnfailingStream(sys.stderr)
    with make_view(stream) as view:
        outcome = asyncio.run(run_job(order, view))
    if outcome.end is not End.FINISHED:
        print(f"tidegate: job {order.config.job} {outcome.end}: {outcome.reason}", file=stream)
    return outcome


def _print_iterations(outcome: Outcome) -> None:
    rows = jobs.iteration_rows(jobs.Described(outcome.job, outcome))
    if rows:
        print(table(rows, jobs.ITERATION_COLUMNS))
