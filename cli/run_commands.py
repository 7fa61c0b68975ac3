"""`tidegate run`: the config that it runs, what it shows, and what it prints at the end. `demo` shares the last two.

`run --dry-run` starts nothing. It checks what a start checks and prints the config to stdout.

All output while the job runs goes to stderr. Stdout gets the result: a table of the iterations, a table of the
evaluations if there are any, and as its last line one JSON object (`demo` always, `run` with `-o json`).
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys

from cli import jobs
from cli.config_text import yaml_with_origins
from cli.moves import moves_of
from cli.rows import Form, cut_table, table, written
from cli.views import UnfailingStream, make_view
from tidegate.config.files import Sources, load_sources, sources_of
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.reading.layers import Layer
from tidegate.config.reading.origins import with_origins
from tidegate.config.schedule import lr_summary
from tidegate.job import JobFolder
from tidegate.launcher.claim import CannotStart, Start
from tidegate.launcher.outcome import End, Outcome
from tidegate.launcher.run import RunRequest, check_job, place_of, run_job
from tidegate.logs import configure_logging


def run(args: argparse.Namespace, form: Form) -> int:
    if args.resume and args.force:
        raise CannotStart("--resume needs the files that --force removes: give only one of them")
    sourced = load_sources(_sources(args))
    command = ["tidegate", "run", *args.config]
    if args.output_dir is not None:
        command += ["--output-dir", args.output_dir]
    start = Start.RESUME if args.resume else Start.FORCE if args.force else Start.FRESH
    request = request_of(sourced.config, start, command, fresh_flags=["--force"], notes=sourced.notes)
    try:
        return _dry_run(request, sourced.layer, form) if args.dry_run else _whole_run(request, form)
    except ConfigError as error:
        raise ConfigError(with_origins(str(error), sourced.layer)) from error


def _sources(args: argparse.Namespace) -> Sources:
    options = {} if args.output_dir is None else {"output_dir": args.output_dir}
    return sources_of(args.config, options)


def _dry_run(request: RunRequest, values_set: Layer, form: Form) -> int:
    config = asyncio.run(check_job(request)).config
    for warning in (*request.notes, *config.warnings()):
        print(f"tidegate: {warning}", file=sys.stderr)
    print(f"tidegate: {place_of(config)}", file=sys.stderr)
    print(f"tidegate: {lr_summary(config)}", file=sys.stderr)
    print(config.to_json() if form is Form.JSON else yaml_with_origins(config, values_set))
    return 0


def _whole_run(request: RunRequest, form: Form) -> int:
    outcome = run_shown(request)
    if form is Form.TABLE:
        print_tables(outcome, JobFolder.of(request.config))
    else:
        moves = moves_of(JobFolder.of(request.config)).summary()
        print(written({**jobs.summary_row(outcome), **moves}, form))
    tell_end(request.config.job, outcome)
    return exit_code(outcome)


def exit_code(outcome: Outcome) -> int:
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    return int(outcome.end is not End.FINISHED)


def request_of(
    config: JobConfig, start: Start, command: list[str], *, fresh_flags: list[str], notes: tuple[str, ...] = ()
) -> RunRequest:
    resume_command, fresh_command = shlex.join([*command, "--resume"]), shlex.join([*command, *fresh_flags])
    return RunRequest(config, start, resume_command, fresh_command, notes)


def run_shown(request: RunRequest) -> Outcome:
    # Until the job's own log is open: this command reports an obstacle itself, and no library logs it too.
    configure_logging("launcher", level="CRITICAL")
    with make_view(UnfailingStream(sys.stderr)) as view:
        return asyncio.run(run_job(request, view))


def tell_end(job: str, outcome: Outcome) -> None:
    """Why a job did not finish and how to go on, on stderr: after the tables, where a person reads last."""
    if outcome.end is not End.FINISHED:
        print(f"tidegate: job {job} {outcome.end}: {outcome.reason}", file=UnfailingStream(sys.stderr))


def print_tables(outcome: Outcome, folder: JobFolder) -> None:
    moves = moves_of(folder)
    rows = [
        moves.with_moves(row) for row in jobs.iteration_rows(jobs.JobDescription(outcome.job, outcome, outcome.seconds))
    ]
    if rows:
        rest = f"{folder.command('describe')} lists them"
        print(cut_table(rows, jobs.ITERATION_COLUMNS, rest=rest))
    evaluations = jobs.evaluation_rows(outcome.job.job, outcome.job)
    if evaluations:
        print(f"\n{table(evaluations, jobs.evaluation_columns(evaluations, of_several=False))}")
    if outcome.pace is not None:
        print(f"\n{outcome.pace.text()}")
    if any(row["moves"] for row in rows):
        print(f"\n{moves.line()}; `{folder.command('why')}` explains them")
