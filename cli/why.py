"""`tidegate why JOB`: why GPUs moved, or did not. A decision's inputs, the alternatives with their forecasts, the
choice, and what came of it.

The actual end of an iteration is the time at which the actor had reported it. A forecast and an actual end are times of
one clock, the store's.

Invariant: a question that names nothing of the job is bad usage, and the message names what there is.
[test_why: names_nothing_of_the_job]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cli.moves import Move, Moves, moves_of
from cli.rows import Form, table, written
from cli.usage import BadUsage
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.moves_log import Line
from tidegate.short_lists import first_few

MOST_SHOWN = 5
"""The decisions that `why JOB` shows, the last ones: a screen has room for them."""


@dataclass(frozen=True, slots=True)
class Question:
    gpu: str | None = None
    transition: str | None = None
    iteration: int | None = None


def why(folder: JobFolder, question: Question, form: Form) -> int:
    """BadUsage: the question names nothing of the job."""
    found = moves_of(folder)
    job = folder.root.name
    if not found.decisions:
        print(written([], form) if form is not Form.TABLE else f"job {job}: no decision is on record yet")
        return 0
    rows = [answer(line, found) for line in _chosen(folder, found, question)]
    print(written(rows, form) if form is not Form.TABLE else "\n\n".join(map(_text, rows)))
    return 0


def answer(line: Line, found: Moves) -> dict[str, Any]:
    """A decision and what came of it."""
    planned = [found.of_transition(each["transition"]) for each in line["planned"]]
    return {
        "at": datetime.fromtimestamp(line["at_ms"] / 1000, tz=UTC).isoformat(timespec="milliseconds"),
        "incarnation": line["incarnation"],
        "iteration": line["iteration"],
        "situation": line.get("situation"),
        "alternatives": line.get("alternatives", []),
        "choice": line["reason"],
        "placement": line["placement"],
        "moves": [_move(each) for each in planned if each is not None],
        "outcome": _outcome(line, found),
    }


def _chosen(folder: JobFolder, found: Moves, question: Question) -> Sequence[Line]:
    if question.transition is not None:
        return [_of_transition(found, question.transition)]
    lines = found.decisions
    if question.iteration is not None:
        lines = tuple(line for line in lines if line["iteration"] == question.iteration)
        if not lines:
            known = sorted({line["iteration"] for line in found.decisions if line["iteration"] is not None})
            there = f"{known[0]} to {known[-1]}" if known else "none"
            raise BadUsage(f"no decision of iteration {question.iteration} is on record; there are iterations {there}")
    if question.gpu is not None:
        gpu = _gpu(folder, question.gpu)
        lines = tuple(
            line for line in lines if any(gpu in [*each["comes"], *each["leaves"]] for each in line["planned"])
        )
        if not lines:
            raise BadUsage(f"no decision on record moved GPU {gpu}; `tidegate timeline` shows what it did")
    if question == Question():
        # What a policy decided says more than the starts and stops around its iterations.
        lines = tuple(line for line in lines if line["iteration"] is not None and line["planned"]) or lines
    return lines[-MOST_SHOWN:]


def _of_transition(found: Moves, name: str) -> Line:
    move = found.of_transition(name)
    line = found.decision_of(move) if move is not None else None
    if line is None:
        known = first_few(reversed([each.transition for each in found.moves])) or "none"
        raise BadUsage(f"no transition {name!r} is on record; the last ones: {known}")
    return line


def _gpu(folder: JobFolder, name: str) -> str:
    gpus = [str(gpu) for gpu in JobConfig.read(folder.config).cluster.gpus()]
    chosen = [gpu for gpu in gpus if name in (gpu, gpu.rpartition("/")[2])]
    if len(chosen) != 1:
        fault = "is on several nodes" if chosen else "is not one of the job's"
        raise BadUsage(f"GPU {name!r} {fault}; name one of {first_few(chosen or gpus, most=8)}")
    return chosen[0]


def _move(move: Move) -> dict[str, Any]:
    """A move, with the seconds from the decision to each of its steps."""
    steps = [
        {"s": round((at_ms - move.at_ms) / 1000, 3), **{state: len(gpus) for state, gpus in states.items()}}
        for at_ms, states in move.steps
    ]
    return {**move.row(), "layout": move.layout, "reason": move.reason, "steps": steps}


def _outcome(line: Line, found: Moves) -> dict[str, Any] | None:
    """None while the iteration runs, and where nothing was forecast."""
    forecast_ms, reported_ms = line.get("forecast_end_ms"), found.reported_ms(line)
    if forecast_ms is None or reported_ms is None or reported_ms < line["at_ms"]:
        return None
    others = [each["end_s"] for each in line.get("alternatives", []) if not each["is_chosen"]]
    forecast_s, actual_s = (forecast_ms - line["at_ms"]) / 1000, (reported_ms - line["at_ms"]) / 1000
    return {
        "forecast_s": round(forecast_s, 3),
        "actual_s": round(actual_s, 3),
        "late_s": round(actual_s - forecast_s, 3),
        "best_other_s": min(others) if others else None,
        "gain_forecast_s": round(min(others) - forecast_s, 3) if others else None,
        "gain_actual_s": round(min(others) - actual_s, 3) if others else None,
    }


def _text(row: dict[str, Any]) -> str:
    where = "" if row["iteration"] is None else f"iteration {row['iteration']}: "
    lines = [f"{row['at']}  {where}{row['choice']}"]
    if (seen := row["situation"]) is not None:
        gpus = ", ".join(f"{name} {count}" for name, count in seen["gpus"].items() if count)
        lines.append(
            f"  saw: {seen['unfinished']} of {seen['sequences']} sequences unfinished, {seen['groups_ready']} of "
            f"{seen['groups']} groups ready, {seen['minibatches_done']} of {seen['minibatches']} minibatches done, "
            f"{seen['rollout_tokens_per_s']:.0f} tokens/s; GPUs: {gpus}"
        )
    if row["alternatives"]:
        shown = [{**each, "is_chosen": "chosen" if each["is_chosen"] else ""} for each in row["alternatives"]]
        weighed = table(
            [{"weighed": each["what"], "end s": each["end_s"], " ": each["is_chosen"]} for each in shown],
            ("weighed", "end s", " "),
        )
        lines += [f"  {each}" for each in weighed.splitlines()]
    for move in row["moves"]:
        took = "is open" if move["seconds"] is None else f"{move['outcome']} in {move['seconds']:.2f} s"
        steps = ", ".join(f"{'/'.join(k for k in step if k != 's')} at {step['s']:.2f} s" for step in move["steps"])
        changed = [*(f"+{gpu}" for gpu in move["comes"]), *(f"-{gpu}" for gpu in move["leaves"])]
        moved = first_few(changed, most=8) or f"to {move['layout']}"
        lines.append(f"  move {move['transition']}: {move['role']} {move['change']} {moved}: {took}")
        if steps:
            lines.append(f"    {steps}")
    if row["outcome"] is not None:
        lines.append(f"  {_outcome_text(row['outcome'])}")
    return "\n".join(lines)


def _outcome_text(outcome: dict[str, Any]) -> str:
    ended = f"the iteration ended {outcome['actual_s']:.1f} s later"
    text = f"what came of it: {ended}, forecast {outcome['forecast_s']:.1f} s"
    if outcome["best_other_s"] is None:
        return text
    return (
        f"{text}; the best other way was forecast to take {outcome['best_other_s']:.1f} s: it gained "
        f"{outcome['gain_actual_s']:.1f} s, forecast {outcome['gain_forecast_s']:.1f} s"
    )
