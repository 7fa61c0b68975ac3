"""Moves of a live job's GPUs by hand: `scale` (in `scaling`), `migrate` and `drain`. With `--dry-run` they print the
transitions that they would make; with `--wait` they follow the job's events to the end of these transitions.

Invariants:
- A request that can never be granted is bad usage, in the scheduler's words.
  [test_manual_commands: refused_in_the_schedulers_words]
- A dry run waits for nothing and says that nothing changed. [test_manual_commands: dry_run_prints]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import jobs
from cli.job_access import control_of
from cli.manual_waits import Goal, Place, held_of, until_applied, until_given_back, until_reached
from cli.rows import Form, Row, answer_text, table, written
from cli.usage import BadUsage
from tidegate.codec import decode_layout
from tidegate.job import JobFolder
from tidegate.launcher.outcome import role_name
from tidegate.ports.rpc import PeerRefused
from tidegate.short_lists import counted, first_few
from tidegate.v1 import control_pb2, control_pb2_grpc

_IMPOSSIBLE = "MoveRefused"
"""The scheduler's name for the refusal of what can never be."""
STEP_COLUMNS = ("step", "role", "change", "leaves", "comes", "waits_for", "layout", "seconds")


@dataclass(frozen=True, slots=True)
class Manner:
    """How a command asks. `is_dry`: only for the plan. `waits`: it ends with the move."""

    form: Form
    is_dry: bool = False
    waits: bool = False


@asynccontextmanager
async def control_of_job(
    output_dir: Path, job: str
) -> AsyncIterator[tuple[JobFolder, control_pb2_grpc.ControlAsyncStub]]:
    """The job's Control API. BadUsage where it refuses what can never be."""
    folder = jobs.job_folder(output_dir, job)
    try:
        async with control_of(folder) as control:
            yield folder, control
    except PeerRefused as refused:
        if refused.error == _IMPOSSIBLE:
            reason = refused.reason.replace("tidegate drain JOB", folder.command("drain"))
            raise BadUsage(f"job {job}: {reason}") from refused
        raise


async def migrate(job: str, leaving: list[str], coming: list[str], output_dir: Path, manner: Manner) -> int:
    """BadUsage: the GPUs are no whole copies, or not free. NotMoved: the component did not get there."""
    request = control_pb2.MigrateGpusRequest(job=job, leaving=leaving, coming=coming, dry_run=manner.is_dry)
    async with control_of_job(output_dir, job) as (folder, control):
        move = (await control.MigrateGpus(request)).move
    return await asked("migrate", folder, move, manner)


async def drain(job: str, targets: list[str], output_dir: Path, manner: Manner, *, undo: bool) -> int:
    """BadUsage: a component would have no copy. NotMoved: the GPUs were not given back."""
    request = control_pb2.DrainGpusRequest(job=job, targets=targets, undo=undo, dry_run=manner.is_dry)
    async with control_of_job(output_dir, job) as (folder, control):
        move = (await control.DrainGpus(request)).move
    if manner.is_dry or undo:
        return await asked("drain", folder, move, manner, what=_undone(move) if undo else "")
    leaving = {gpu for step in move.steps for gpu in step.leaves}
    goal = Goal(drained=frozenset(move.drained_gpus))
    if manner.waits:
        await until_given_back(folder, goal, sequence=move.stream_sequence)
        held = []
    else:
        await until_applied(folder, move.stream_sequence)
        held = sorted(leaving) or await held_of(folder, goal.drained)
    is_over = not held
    how = "nobody has them" if is_over else f"{first_few(held, most=8)} are given back as soon as they can be"
    text = f"job {job}: drained by hand: {', '.join(move.drained_gpus)}; {how}; --undo gives them back to the job"
    print(answer_text(_row("drain", folder, move, "drained" if is_over else "accepted"), text, manner.form))
    return 0


def _undone(move: control_pb2.ManualMove) -> str:
    left = ", ".join(move.drained_gpus) or "none"
    return f"the GPUs are the job's again; still drained by hand: {left}"


async def asked(
    command: str, folder: JobFolder, move: control_pb2.ManualMove, manner: Manner, *, what: str = ""
) -> int:
    """Print what was asked for, or its plan, and wait for its end where the person does. `what`: in place of where the
    components are to be."""
    job = folder.root.name
    if manner.is_dry:
        print(_plan_text(_row(command, folder, move, "planned"), manner.form))
        return 0
    goal = Goal(places=tuple(map(Place.of, move.places)))
    moving = {role_name(step.role) for step in move.steps}
    shown = [place for place in goal.places if place.role in moving] or list(goal.places)
    places = "; ".join(f"{place.role} {place}" for place in shown)
    if not move.steps:
        await until_applied(folder, move.stream_sequence)
        state, text = "in force", f"is there already: {places}"
    elif manner.waits:
        await until_reached(folder, goal, sequence=move.stream_sequence)
        state, text = "committed", f"is there now: {places}"
    else:
        await until_applied(folder, move.stream_sequence)
        state, text = "accepted", f"moves to {places}; its events show when it is there"
    print(answer_text(_row(command, folder, move, state), f"job {job}: {what or text}", manner.form))
    return 0


def _row(command: str, folder: JobFolder, move: control_pb2.ManualMove, state: str) -> dict[str, Any]:
    places = [Place.of(place) for place in move.places]
    return {
        "job": folder.root.name,
        "asked": command,
        "state": state,
        "places": {place.role: {"layout": str(place.layout), "gpus": list(place.gpus)} for place in places},
        "steps": [_step_row(number, step) for number, step in enumerate(move.steps, 1)],
        "drained_gpus": list(move.drained_gpus),
    }


def _step_row(number: int, step: control_pb2.PlannedStep) -> Row:
    before = [step.old_layout] if step.HasField("old_layout") else []
    after = [step.new_layout] if step.HasField("new_layout") else []
    layouts = [str(decode_layout(each)) for each in (*before, *after)]
    return {
        "step": number,
        "role": role_name(step.role),
        "change": step.change,
        "leaves": list(step.leaves),
        "comes": list(step.comes),
        "waits_for": list(step.waits_for),
        "layout": " -> ".join(dict.fromkeys(layouts)),
        "seconds": round(step.estimated_s, 3) if step.HasField("estimated_s") else None,
    }


def _plan_text(row: dict[str, Any], form: Form) -> str:
    if form is not Form.TABLE:
        return written(row, form)
    if not row["steps"]:
        return f"job {row['job']}: nothing would move, and nothing was changed"
    total_s = sum(step["seconds"] or 0.0 for step in row["steps"])
    lists = ("leaves", "comes", "waits_for")
    steps = table([{**step, **{name: step[name] or None for name in lists}} for step in row["steps"]], STEP_COLUMNS)
    lasts = f"about {total_s:.1f} s one after the other, by the costs that policies plan with"
    return f"{steps}\n\n{counted(len(row['steps']), 'transition')}, {lasts}; nothing was changed"
