"""The rows that the commands show of jobs. A live job answers through its Control API, a finished one by its folder.

Invariant: the rows of a live job and of a finished one have the same columns, so that scripts read both alike.
[test_command: jobs_are_listed_in_both_forms]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from cli.job_access import control_of
from cli.queue_files import word_of
from cli.rows import Row, rounded
from cli.views import failure_text
from tidegate.codec import decode_layout
from tidegate.job import CALLED_VARIABLE, JobFolder
from tidegate.json_text import parse_json
from tidegate.launcher.control import NotRunning
from tidegate.launcher.history import History, read_history, with_history
from tidegate.launcher.lock import launcher_pid
from tidegate.launcher.outcome import End, Outcome, role_name, without_phase
from tidegate.types import Token, job_id
from tidegate.v1 import cluster_pb2, control_pb2, events_pb2

PLACES_ENDED = (-3, -4)
"""The values in `Generation.places` of sequences that ended or were cut."""
JOB_COLUMNS = ("job", "state", "iteration", "iterations", "reward", "message")
GPU_COLUMNS = ("gpu", "state", "job", "role", "token", "transition")
DEAD_LETTER_COLUMNS = ("job", "id", "subject", "reason", "size_bytes")
ITERATION_COLUMNS = (
    "iteration",
    "reward_mean",
    "loss",
    "response_tokens_mean",
    "response_tokens_max",
    "samples_trained",
    "samples_filtered",
    "seconds",
    "moves",
    "switch_s",
)
LEARNING_RATE = (
    "lr",
    "lr_progress",
    "lr_budget",
    "lr_nominal",
    "lr_updates",
    "lr_skipped",
    "lr_shortfall",
    "lr_overshoot",
)
"""The figures of an iteration that stand beside the columns of the table."""
EVALUATION_COLUMNS = ("version", "prompts", "samples_per_prompt")
"""The columns before the figures."""
COMPONENT_COLUMNS = ("role", "state", "lead", "layout", "gpus")


class UnknownJob(LookupError):
    """The output folder has no job of this name."""


@dataclass(frozen=True, slots=True)
class JobDescription:
    """A job as `describe` shows it. `outcome` is None while it runs. `seconds` are those of each iteration. `queued`:
    what a cluster has made of a run that was interrupted."""

    status: control_pb2.GetJobResponse
    outcome: Outcome | None
    seconds: Mapping[int, float]
    queued: cluster_pb2.Submission | None = None

    @property
    def state(self) -> str:
        if self.queued is not None and self.queued.state != "running":
            return self.queued.end or self.queued.state
        return self.outcome.end if self.outcome else self.status.phase

    @property
    def message(self) -> str:
        if self.queued is not None:
            return self.queued.message
        return self.outcome.reason if self.outcome else without_phase(self.status.message, self.state)


def job_folder(output_dir: Path, job: str) -> JobFolder:
    """UnknownJob, with the names of the existing jobs."""
    # Another word may be the path of another folder.
    folder, is_here = JobFolder(output_dir.resolve() / job), False
    with suppress(ValueError):
        job_id(job)
        is_here = True
    if not (is_here and folder.config.is_file()):
        if is_here and (queued := word_of(folder)) is not None:
            state = f"is {queued.end or queued.state}" + (f" ({queued.message})" if queued.message else "")
            raise UnknownJob(f"job {job} {state}, and has no folder")
        known = ", ".join(found.root.name for found in job_folders(output_dir)) or "none"
        raise UnknownJob(f"no job {job!r} in {output_dir}; there: {known}{_elsewhere('. ')}")
    return folder


def _elsewhere(before: str) -> str:
    """What a person may type who meant another folder. A command from afar is about the cluster's alone."""
    if CALLED_VARIABLE in os.environ:
        return ""
    return f"{before}--output-dir names another folder, and --cluster a cluster by its name"


def job_folders(output_dir: Path, *, is_needed: bool = True) -> list[JobFolder]:
    """The folders by name. UnknownJob when the output folder does not exist and is needed."""
    if is_needed and not output_dir.is_dir():
        raise UnknownJob(f"there is no folder {output_dir}, so no jobs{_elsewhere(': ')}")
    return [JobFolder(path.parent.resolve()) for path in sorted(output_dir.glob("*/config.json"))]


async def describe(folder: JobFolder, *, is_whole: bool = True) -> JobDescription:
    """NotRunning when the job was killed, because then nothing knows its state.

    `is_whole`: with all iterations and evaluations, also those that a live job's scheduler does not keep."""
    job = folder.root.name
    if folder.result.exists():
        outcome = Outcome.read(folder.result)
        queued = word_of(folder) if outcome.end is End.INTERRUPTED else None
        return JobDescription(outcome.job, outcome, outcome.seconds, queued)
    async with control_of(folder) as control:
        status = await control.GetJob(control_pb2.GetJobRequest(job=job))
    history = read_history(folder.events) if is_whole else History()
    return JobDescription(with_history(status, history), None, history.seconds)


async def job_row(folder: JobFolder) -> Row:
    job = folder.root.name
    try:
        found = await describe(folder, is_whole=False)
    except NotRunning:
        is_killed = launcher_pid(folder) is None
        state = "killed" if is_killed else "starting"
        message = "its run was killed; start it again with --resume" if is_killed else "its scheduler does not answer"
        if is_killed and (queued := word_of(folder)) is not None and queued.state != "ended":
            message = queued.message or f"the cluster has it as {queued.state}"
        return dict.fromkeys(JOB_COLUMNS) | {"job": job, "state": state, "message": message}
    rows = iteration_rows(found)
    # A job that ended before its scheduler had it has no count of iterations.
    num_iterations = found.status.num_iterations or None
    return {
        "job": job,
        "state": found.state,
        "iteration": found.status.iteration if num_iterations else None,
        "iterations": num_iterations,
        "reward": rows[-1]["reward_mean"] if rows else None,
        "message": found.message.partition("\n")[0],
    }


def iteration_rows(found: JobDescription) -> list[dict[str, Any]]:
    outcome = found.outcome
    rows = outcome.iterations if outcome else found.status.iterations
    return [
        {
            "iteration": row.iteration,
            "reward_mean": _metric(row, "reward_mean"),
            "loss": _metric(row, "loss"),
            "response_tokens_mean": _metric(row, "response_tokens_mean"),
            "response_tokens_max": _metric(row, "response_tokens_max"),
            "samples_generated": row.num_generated,
            "samples_trained": row.num_trained,
            "samples_filtered": row.num_filtered,
            "samples_discarded": row.num_discarded,
            "duplicates": row.num_duplicates,
            "lost": row.num_lost,
            "failed_rewards": _metric(row, "num_failed_rewards"),
            "seconds": _rounded_or_none(found.seconds.get(row.iteration)),
            **{name: _metric(row, name) for name in LEARNING_RATE},
        }
        for row in rows
    ]


def summary_row(outcome: Outcome) -> Row:
    """The figures of a whole run, with rounded means."""
    summary = outcome.summary()
    means = {name: _rounded_or_none(summary[name]) for name in ("reward_first", "reward_last")}
    return {**summary, **means}


def learning_rate_line(row: Row) -> str:
    """The progress of the schedule after the iteration of this row."""
    lr, progress, budget, nominal, updates, skipped, shortfall, beyond = (
        "-" if row[name] is None else f"{row[name]:.9g}" for name in LEARNING_RATE
    )
    return (
        f"learning rate: {lr} in the last update; {progress} of {budget} steps done, {updates} updates for {nominal} "
        f"nominal, {skipped} skipped, {shortfall} steps short, {beyond} beyond the budget"
    )


def evaluation_rows(job: str, status: control_pb2.GetJobResponse) -> list[Row]:
    return [
        {
            "job": job,
            "version": row.version,
            "prompts": row.num_prompts,
            "samples_per_prompt": row.samples_per_prompt,
            **{name: rounded(row.metrics[name]) for name in sorted(row.metrics)},
        }
        for row in status.evaluations
    ]


def evaluation_columns(rows: Sequence[Row], *, of_several: bool) -> tuple[str, ...]:
    """The columns: every figure that a row has, in order of name, because a job names its rewards itself."""
    first = ("job", *EVALUATION_COLUMNS) if of_several else EVALUATION_COLUMNS
    return (*first, *sorted({name for row in rows for name in row} - {"job", *EVALUATION_COLUMNS}))


def component_rows(status: control_pb2.GetJobResponse) -> list[Row]:
    return [
        {
            "role": role_name(component.role),
            "state": component.state,
            "lead": component.lead,
            "layout": str(decode_layout(component.layout)) if component.HasField("layout") else None,
            "gpus": [grant.gpu for grant in component.grants],
        }
        for component in status.components
    ]


async def gpu_rows(folder: JobFolder) -> list[Row]:
    async with control_of(folder) as control:
        answer = await control.ListGpus(control_pb2.ListGpusRequest(job=folder.root.name))
    return gpu_status_rows(answer.gpus)


def gpu_status_rows(gpus: Iterable[control_pb2.GpuStatus]) -> list[Row]:
    return [
        {
            "gpu": gpu.gpu,
            "state": gpu.state,
            "job": gpu.job,
            "role": role_name(gpu.role),
            "token": str(Token(gpu.token.term, gpu.token.counter)),
            "transition": gpu.transition_id,
        }
        for gpu in gpus
    ]


async def dead_letter_rows(folder: JobFolder) -> list[Row]:
    job = folder.root.name
    async with control_of(folder) as control:
        answer = await control.ListDeadLetters(control_pb2.ListDeadLettersRequest(job=job))
    return [
        {
            "job": job,
            "id": letter.id,
            "subject": letter.subject,
            "reason": letter.reason,
            "size_bytes": letter.size_bytes,
        }
        for letter in answer.dead_letters
    ]


def event_line(row: control_pb2.ListEventsResponse) -> str:
    event = row.event
    at = datetime.fromtimestamp(event.occurred_unix_ns / 1e9, tz=UTC)
    what = event.WhichOneof("body") or "nothing"
    place = f"incarnation {event.incarnation} iteration {event.iteration}"
    text = f"{row.stream_sequence:6d}  {at:%H:%M:%S.%f}  {event.source:<14} {what:<20} {place}  {_details(row)}"
    return text.rstrip()


def log_line(line: str) -> str:
    """A JSON line in a form for people. A line that is not JSON stays as it is."""
    try:
        entry = dict(parse_json(line))
    except (ValueError, TypeError):
        return line
    first = [str(entry.pop(key, "")) for key in ("time", "level", "source", "event")]
    return "  ".join([*first, *(f"{key}={value}" for key, value in entry.items())])


def _picture(event: events_pb2.Event) -> str:
    """One line for a picture, which has thousands of sequences."""
    match event.WhichOneof("body"):
        case "generation":
            picture = event.generation
            num_ended = sum(place in PLACES_ENDED for place in picture.places)
            rate = sum(engine.rate_tokens_per_s for engine in picture.engines)
            return f"{num_ended}/{len(picture.places)} responses, {len(picture.engines)} engines at {rate:.0f} tokens/s"
        case "inferring":
            return f"{len(event.inferring.ready)} groups ready{', at work' if event.inferring.is_busy else ''}"
        case _:
            training = event.training
            at = "between two updates" if training.is_at_boundary else "at an update"
            return f"{training.num_minibatches_done} minibatches, {training.num_taken} groups taken, {at}"


def _metric(row: control_pb2.IterationSummary, name: str) -> float | None:
    """A learning rate is exact: it is no mean."""
    value = row.metrics.get(name)
    return value if name in LEARNING_RATE else _rounded_or_none(value)


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def _details(row: control_pb2.ListEventsResponse) -> str:
    event = row.event
    match event.WhichOneof("body"):
        case "progress":
            return f"{event.progress.phase} {event.progress.num_done}/{event.progress.num_total}"
        case "generation" | "inferring" | "training":
            return _picture(event)
        case "failed" | "instance_lost" | "dead_lettered":
            return failure_text(event)
        case "job_submitted":
            return "resumed" if event.job_submitted.resume else ""
        case None:
            return ""
        case body:
            return json.dumps(MessageToDict(getattr(event, body), preserving_proto_field_name=True))[:160]
