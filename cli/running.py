"""`tidegate demo` and `tidegate run`: the config they run, what they show, what they print at the end.

`run --dry-run` starts nothing: it checks what a start checks and prints the config to stdout.

Everything while the job runs goes to stderr. Stdout gets the result: a table of the iterations, one of the evaluations
where there are any, and as its last line one JSON object (`demo` always, `run` with `-o json`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from importlib.resources import as_file, files
from typing import Any

from cli import jobs
from cli.resolved import resolved_yaml
from cli.rows import Form, table
from cli.views import UnfailingStream, make_view
from tidegate.config.files import Sources, load_sources, sources_of
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.reading.layers import Layer
from tidegate.config.reading.origins import with_origins
from tidegate.config.schedule import lr_summary
from tidegate.job import JobFolder
from tidegate.launcher.claim import CannotStart, Start, saved_config
from tidegate.launcher.outcome import End, Outcome
from tidegate.launcher.run import RunRequest, check_job, run_job
from tidegate.logs import configure_logging


def demo(given: argparse.Namespace, form: Form) -> int:
    """Always in the same folder: each fresh start replaces the one before."""
    overrides: dict[str, Any] = {"output_dir": given.output_dir}
    if given.seed is not None:
        overrides["seed"] = given.seed
    with as_file(files("tidegate") / "demo.yaml") as path:
        config = load_sources(Sources([path], options=overrides)).config
    if given.resume and given.seed is None:
        config = _with_seed_of_last_start(config)
    command = ["tidegate", "demo"]
    if given.output_dir != "jobs":
        command += ["--output-dir", given.output_dir]
    start = Start.RESUME if given.resume else Start.FORCE
    outcome = _run(_request(config, start, command, anew=[]))
    if form is Form.TABLE:
        _print_tables(outcome)
    print(json.dumps(outcome.summary()))
    return exit_code(outcome)


def run(given: argparse.Namespace, form: Form) -> int:
    if given.resume and given.force:
        raise CannotStart("--resume goes on with what --force removes: give one of them")
    sourced = load_sources(_sources(given))
    command = ["tidegate", "run", *given.config]
    if given.output_dir is not None:
        command += ["--output-dir", given.output_dir]
    start = Start.RESUME if given.resume else Start.FORCE if given.force else Start.FRESH
    order = _request(sourced.config, start, command, anew=["--force"], notes=sourced.notes)
    try:
        return _dry_run(order, sourced.layer, form) if given.dry_run else _whole_run(order, form)
    except ConfigError as error:
        raise ConfigError(with_origins(str(error), sourced.layer)) from error


def _sources(given: argparse.Namespace) -> Sources:
    options = {} if given.output_dir is None else {"output_dir": given.output_dir}
    return sources_of(given.config, options)


def _dry_run(order: RunRequest, given: Layer, form: Form) -> int:
    config = asyncio.run(check_job(order)).config
    for warning in (*order.notes, *config.warnings()):
        print(f"tidegate: {warning}", file=sys.stderr)
    print(f"tidegate: {lr_summary(config)}", file=sys.stderr)
    print(config.to_json() if form is Form.JSON else resolved_yaml(config, given))
    return 0


def _whole_run(order: RunRequest, form: Form) -> int:
    outcome = _run(order)
    if form is Form.TABLE:
        _print_tables(outcome)
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


def _request(
    config: JobConfig, start: Start, command: list[str], *, anew: list[str], notes: tuple[str, ...] = ()
) -> RunRequest:
    return RunRequest(config, start, shlex.join([*command, "--resume"]), shlex.join([*command, *anew]), notes)


def _run(order: RunRequest) -> Outcome:
    # Until the job's own log is open: what stands in the way is told as this command's message, not by a library.
    configure_logging("launcher", level="CRITICAL")
    stream = UnfailingStream(sys.stderr)
    with make_view(stream) as view:
        outcome = asyncio.run(run_job(order, view))
    if outcome.end is not End.FINISHED:
        print(f"tidegate: job {order.config.job} {outcome.end}: {outcome.reason}", file=stream)
    return outcome


def _print_tables(outcome: Outcome) -> None:
    rows = jobs.iteration_rows(jobs.Described(outcome.job, outcome))
    if rows:
        print(table(rows, jobs.ITERATION_COLUMNS))
    evaluations = jobs.evaluation_rows(outcome.job.job, outcome.job)
    if evaluations:
        print(f"\n{table(evaluations, jobs.evaluation_columns(evaluations, of_several=False))}")
