"""The commands about jobs: some ask, some give a live job an order. Each prints and returns the exit code."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from cli import cluster_queue, job_streams, jobs, nodes
from cli import prune as prunes
from cli.doctor import Finding, Health, examine
from cli.job_access import control_of
from cli.moves import MOST_MOVES, MOVE_COLUMNS, moves_of
from cli.rows import Form, Row, answer_text, cut_table, show, written
from cli.selection import Selection
from tidegate.certs.identity import Party
from tidegate.config.base import OUTPUT_DIR
from tidegate.config.files import load_sources, sources_of
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.reading.origins import with_origins
from tidegate.job import JobFolder
from tidegate.json_text import parse_json
from tidegate.launcher.control import NotRunning
from tidegate.runtime.cuda import cuda_fault
from tidegate.v1 import control_pb2


def doctor(words: list[str], output_dir: str | None, form: Form) -> int:
    """Returns 1 when a finding is bad. ConfigError, after the findings, when the job needs what is not here.

    `words` are the config of a job and changes of it: stderr gets the warnings that its start gives. Without them the
    checks are those of a job with default folders.
    """
    if not words:
        return _show_findings(examine(output_dir=Path(output_dir or OUTPUT_DIR)), form)
    sourced = load_sources(sources_of(words, {} if output_dir is None else {"output_dir": output_dir}))
    config = sourced.config
    findings = examine(
        output_dir=Path(config.output_dir),
        host_memory_root=Path(config.runtime.host_memory_root),
        job_credentials=_credentials_of(config),
    )
    code = _show_findings(findings, form)
    for warning in (*sourced.notes, *config.warnings()):
        print(f"tidegate: {warning}", file=sys.stderr)
    if fault := cuda_fault(config.cluster):
        raise ConfigError(with_origins(fault, sourced.layer))
    return code


def _credentials_of(config: JobConfig) -> set[Path]:
    """Those that it names. A job makes its others itself, at each start."""
    found = {Path(config.cluster.machine_credentials)} if config.cluster.machine_credentials else set()
    for party in (Party.SCHEDULER, Party.JOB):
        found |= {*filter(None, (config.servers.nats_credential(party), config.servers.redis_credential(party)))}
    return found


def _show_findings(findings: list[Finding], form: Form) -> int:
    rows = [asdict(finding) for finding in findings]
    show(rows, ("health", "check", "found", "remedy"), form=form, out=sys.stdout, empty="")
    return int(any(finding.health is Health.BAD for finding in findings))


async def get(what: str, names: list[str], output_dir: Path, form: Form) -> int:
    if what == "jobs":
        rows = await _job_rows(names, output_dir)
        show(rows, jobs.JOB_COLUMNS, form=form, out=sys.stdout, empty=f"no jobs in {output_dir}")
        return 0
    if what == "nodes":
        there = await cluster_queue.gpus(output_dir)
        if there.paused:
            print(f"tidegate: {cluster_queue.paused_text(there.paused, output_dir)}", file=sys.stderr)
        rows = nodes.node_rows(there, await cluster_queue.submissions(output_dir), names)
        show(rows, nodes.NODE_COLUMNS, form=form, out=sys.stdout, empty=f"no cluster is up in {output_dir}")
        return 0
    folders = [jobs.job_folder(output_dir, name) for name in names] if names else jobs.job_folders(output_dir)
    rows = []
    if what == "gpus" and (shared := (await cluster_queue.gpus(output_dir)).gpus):
        # The jobs of a cluster have one map, and its scheduler knows it.
        known = await cluster_queue.submissions(output_dir)
        own = {each.job: {*each.gpus} for each in known if each.state != "ended"}
        wanted = {gpu for job in own.keys() & names for gpu in own[job]}
        rows = [row for row in jobs.gpu_status_rows(shared) if not names or row["job"] in names or row["gpu"] in wanted]
        folders = [folder for folder in folders if folder.root.name not in own]
    for folder in folders:
        rows += await _rows_of(what, folder, is_named=bool(names))
    if what == "evaluations":
        columns = jobs.evaluation_columns(rows, of_several=True)
        show(rows, columns, form=form, out=sys.stdout, empty=f"no evaluations in {output_dir}")
        return 0
    columns = jobs.GPU_COLUMNS if what == "gpus" else jobs.DEAD_LETTER_COLUMNS
    show(rows, columns, form=form, out=sys.stdout, empty=f"none: no live job in {output_dir} has any")
    return 0


def prune(args: argparse.Namespace, output_dir: Path, form: Form) -> int:
    """Prints one row for each job with a store, and on stderr the room that it frees, or would free."""
    folders = [jobs.job_folder(output_dir, name) for name in args.jobs] if args.jobs else jobs.job_folders(output_dir)
    answers = [prunes.prune(folder, with_resumable=args.resumable, remove=args.yes) for folder in folders]
    found = [answer for answer in answers if answer is not None]
    rows = [answer.row(is_removed=args.yes) for answer in found]
    show(rows, prunes.COLUMNS, form=form, out=sys.stdout, empty=f"no stores of jobs in {output_dir}")
    chosen = [answer.store_bytes or 0 for answer in found if answer.is_chosen]
    freed = f"{sum(chosen) / 2**20:.1f} MiB in {len(chosen)} store{'' if len(chosen) == 1 else 's'}"
    print(f"freed {freed}" if args.yes else f"would free {freed}; --yes does it", file=sys.stderr)
    return 0


async def describe(job: str, output_dir: Path, form: Form) -> int:
    try:
        folder = jobs.job_folder(output_dir, job)
    except jobs.UnknownJob:
        if not await _described_by_queue(job, output_dir, form):
            raise
        return 0
    found = await jobs.describe(folder)
    moves = moves_of(jobs.job_folder(output_dir, job))
    rows, status = [moves.with_moves(row) for row in jobs.iteration_rows(found)], found.status
    move_rows = [each.row() for each in moves.moves if each.is_move][-MOST_MOVES:]
    evaluations = jobs.evaluation_rows(job, status)
    state, message = found.state, found.message
    if form is not Form.TABLE:
        description = {
            "job": job,
            "state": state,
            "message": message,
            "incarnation": status.incarnation,
            "version": status.version,
            "last_reason": status.last_reason,
            "components": jobs.component_rows(status),
            "drained_gpus": list(status.drained_gpus),
            "iterations": rows,
            "evaluations": evaluations,
            "summary": jobs.summary_row(found.outcome) if found.outcome else None,
            "moves": moves.summary() | {"last": move_rows},
        }
        print(written(description, form))
        return 0
    print(f"job {job}: {state}" + (f" ({message})" if message else ""))
    print(f"iteration {status.iteration} of {status.num_iterations}, incarnation {status.incarnation}")
    if status.last_reason:
        print(f"last decision: {status.last_reason}")
    if status.drained_gpus:
        print(f"drained by hand: {', '.join(status.drained_gpus)}")
    if rows and rows[-1]["lr_progress"] is not None:
        print(jobs.learning_rate_line(rows[-1]))
    for part, columns in (
        (jobs.component_rows(status), jobs.COMPONENT_COLUMNS),
        (rows, jobs.ITERATION_COLUMNS),
        (evaluations, jobs.evaluation_columns(evaluations, of_several=False)),
        (move_rows, MOVE_COLUMNS),
    ):
        if part:
            print(f"\n{cut_table(part, columns, rest='-o json has them')}")
    if move_rows:
        print(f"\n{moves.line()}")
    return 0


async def _described_by_queue(job: str, output_dir: Path, form: Form) -> bool:
    """Whether the queue has a job that has no folder: it waits, or ended before it began."""
    for each in await cluster_queue.submissions(output_dir):
        if each.job == job:
            text = f"job {job}: {each.end or each.state}" + (f" ({each.message})" if each.message else "")
            print(answer_text(cluster_queue.row_of(each), text, form))
            return True
    return False


async def events(job: str, chosen: Selection, output_dir: Path, form: Form, *, follow: bool) -> int:
    folder = jobs.job_folder(output_dir, job)
    async for row in job_streams.chosen_events(folder, chosen, follow=follow):
        if form is Form.TABLE:
            print(jobs.event_line(row))
        else:
            print(_in_stream(MessageToDict(row, preserving_proto_field_name=True), form))
        _flush(follow)
    _say_end(folder, follow)
    return 0


async def logs(args: argparse.Namespace, output_dir: Path, form: Form) -> int:
    folder, follow = jobs.job_folder(output_dir, args.job), args.follow
    lines = job_streams.chosen_logs(folder, Selection.of(args), source=args.source, follow=follow, attempt=args.attempt)
    async for line in lines:
        print(_log_text(line, form))
        _flush(follow)
    _say_end(folder, follow)
    return 0


async def cancel(job: str, reason: str, output_dir: Path, form: Form) -> int:
    found = await cluster_queue.cancelled(output_dir, job, reason)
    if found is None:
        async with control_of(jobs.job_folder(output_dir, job)) as control:
            await control.CancelJob(control_pb2.CancelJobRequest(job=job, reason=reason))
    how = "asked to end; its launcher leaves when it has"
    if found is not None and found.state == "queued":
        how = "taken out of the queue"
    print(answer_text({"job": job, "asked": "cancel"}, f"job {job}: {how}", form))
    return 0


async def settle_dead_letter(verb: str, job: str, letter: int, output_dir: Path, form: Form) -> int:
    async with control_of(jobs.job_folder(output_dir, job)) as control:
        if verb == "replay":
            await control.ReplayDeadLetter(control_pb2.ReplayDeadLetterRequest(job=job, id=letter))
        else:
            await control.DropDeadLetter(control_pb2.DropDeadLetterRequest(job=job, id=letter))
    done = {"replay": "delivered again", "drop": "dropped"}[verb]
    print(
        answer_text({"job": job, "dead_letter": letter, "done": done}, f"job {job}: dead letter {letter} {done}", form)
    )
    return 0


async def _job_rows(names: list[str], output_dir: Path) -> list[Row]:
    """The jobs that have a folder, and those of a cluster that have none: they wait, start, or never began."""
    submitted = {each.job: each for each in await cluster_queue.submissions(output_dir)}
    there = jobs.job_folders(output_dir, is_needed=not submitted)
    has_folder = {folder.root.name for folder in there}
    rows: dict[str, Row] = {
        job: dict.fromkeys(jobs.JOB_COLUMNS) | {"job": job, "state": each.end or each.state, "message": each.message}
        for job, each in submitted.items()
        # A folder that is gone was removed, where the job has finished.
        if (each.state in ("queued", "placed") or (job not in has_folder and each.end != "finished"))
        and (not names or job in names)
    }
    if names:
        there = [jobs.job_folder(output_dir, name) for name in names if name not in rows]
    for folder in there:
        if folder.root.name not in rows:
            rows[folder.root.name] = await jobs.job_row(folder)
    return [rows[job] for job in sorted(rows)]


async def _rows_of(what: str, folder: JobFolder, *, is_named: bool) -> list[Row]:
    try:
        if what == "evaluations":
            return jobs.evaluation_rows(folder.root.name, (await jobs.describe(folder)).status)
        return await (jobs.gpu_rows(folder) if what == "gpus" else jobs.dead_letter_rows(folder))
    except NotRunning:
        # A command about all jobs skips those that do not answer. A job named by the user must answer.
        if is_named:
            raise
        return []


def _log_text(line: str, form: Form) -> str:
    match form:
        case Form.TABLE:
            return jobs.log_line(line)
        case Form.JSON:
            return line
        case Form.YAML:
            with suppress(ValueError):
                return _in_stream(parse_json(line), form)
            return _in_stream(line, form)


def _in_stream(value: Any, form: Form) -> str:
    """One value of several that come one by one: a line of JSON, or a document of YAML."""
    return written(value, form) if form is Form.JSON else f"---\n{written(value, form)}"


def _say_end(folder: JobFolder, follow: bool) -> None:
    """Prints to stderr, because stdout has only the rows."""
    if follow:
        print(job_streams.end_line(folder), file=sys.stderr)


def _flush(follow: bool) -> None:
    if follow:
        sys.stdout.flush()
