"""What a job's log of decisions and moves says: moves with their times, decisions with what came of them.

Times in the log are the store's clock, in Unix milliseconds.

Invariant: a line of another form is left out; it makes no command fail. [test_moves: of_another_form_is_left_out]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cli.rows import Row
from tidegate.job import JobFolder
from tidegate.moves_log import Line, read_moves
from tidegate.short_lists import counted

MOVE_COLUMNS = ("transition", "iteration", "role", "change", "comes", "leaves", "outcome", "seconds")
MOST_MOVES = 6
"""The moves that a person is shown, the last ones."""
JOB_ENDED = "cut by the job's end"
"""The outcome of a move that the job's end cut short, such as one that was on its way home: nothing failed."""
_CHANGES = ("resize", "suspend", "resume", "replace")
"""The kinds of parts that move GPUs while a job runs. Its stops are no moves, and its starts in an iteration alone are:
a component comes back."""


@dataclass
class Move:
    """A transition. `steps` are its states in order, by the time at which the scheduler saw them."""

    transition: str
    role: str
    change: str
    comes: list[str]
    leaves: list[str]
    layout: str | None
    reason: str
    iteration: int | None
    """None: no iteration was open."""
    at_ms: int
    counts_in: int | None
    """The iteration in whose row it stands: the open one, or the one that was open last."""
    steps: list[tuple[int, dict[str, list[str]]]] = field(default_factory=list)
    outcome: str = "open"
    ended_ms: int | None = None

    @property
    def seconds(self) -> float | None:
        """From the decision to the end of the transition. None while it is open."""
        return None if self.ended_ms is None else (self.ended_ms - self.at_ms) / 1000

    @property
    def is_move(self) -> bool:
        return self.change in _CHANGES or (self.change == "start" and self.iteration is not None)

    @property
    def gpus(self) -> list[str]:
        return [*self.comes, *self.leaves]

    def row(self) -> Row:
        return {
            "transition": self.transition,
            "iteration": self.iteration,
            "role": self.role,
            "change": self.change,
            "comes": self.comes,
            "leaves": self.leaves,
            "outcome": self.outcome,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
        }

    def __str__(self) -> str:
        parts = [f"+{','.join(self.comes)}" if self.comes else "", f"-{','.join(self.leaves)}" if self.leaves else ""]
        took = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        return f"{self.role} {self.change} {' '.join(filter(None, parts))} {self.outcome}{took}".replace("  ", " ")


@dataclass(frozen=True)
class Moves:
    """All that the log has of a job."""

    moves: tuple[Move, ...] = ()
    decisions: tuple[Line, ...] = ()
    iterations: dict[tuple[int, int], tuple[int | None, int | None]] = field(default_factory=dict)
    """When each (incarnation, iteration) opened, and when the actor reported it."""

    def of_transition(self, name: str) -> Move | None:
        """By its whole id, or by the part after the last slash."""
        found = [each for each in self.moves if each.transition == name or each.transition.rpartition("/")[2] == name]
        return found[-1] if found else None

    def decision_of(self, move: Move) -> Line | None:
        for line in self.decisions:
            if any(each["transition"] == move.transition for each in line["planned"]):
                return line
        return None

    def reported_ms(self, decision: Line) -> int | None:
        return self.iterations.get((decision["incarnation"], decision["iteration"]), (None, None))[1]

    def with_moves(self, iteration: Row) -> dict[str, Any]:
        """The row of an iteration, with its moves and the seconds of its switches."""
        summary = self.summary(iteration["iteration"])
        return {**iteration, "moves": summary["moves"], "switch_s": summary["switch_s"]}

    def line(self) -> str:
        """The summary for a person."""
        summary = self.summary()
        mid = summary["switch_s_median"]
        text = f"{counted(summary['moves'], 'move')} in {summary['switch_s']:.1f} s of switches"
        return text if mid is None else f"{text}, median {mid:.2f} s"

    def summary(self, iteration: int | None = None) -> dict[str, Any]:
        """How often GPUs moved, and how long that took: in the whole run, or from the opening of an iteration to that
        of the next."""
        of_run = [each for each in self.moves if each.is_move and each.outcome == "committed"]
        ended = [each for each in of_run if iteration is None or each.counts_in == iteration]
        seconds = [each.seconds for each in ended if each.seconds is not None]
        return {
            "moves": len(ended),
            "switch_s": round(sum(seconds), 3),
            "switch_s_median": round(median(seconds), 3) if seconds else None,
        }


def moves_of(folder: JobFolder) -> Moves:
    return of_lines(read_moves(folder.moves))


def of_lines(lines: Sequence[Line]) -> Moves:
    moves: dict[str, Move] = {}
    decisions: list[Line] = []
    iterations: dict[tuple[int, int], tuple[int | None, int | None]] = {}
    # Lines are in order of time, so the last opened iteration is the last key.
    for line in lines:
        try:
            _take(line, moves, decisions, iterations)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # of another release: the others still explain
    return Moves(tuple(moves.values()), tuple(decisions), iterations)


def _take(
    line: Line,
    moves: dict[str, Move],
    decisions: list[Line],
    iterations: dict[tuple[int, int], tuple[int | None, int | None]],
) -> None:
    at_ms = int(line["at_ms"])
    match line["kind"]:
        case "decision":
            opened_last = next(reversed(iterations))[1] if iterations else None
            found = {each["transition"]: _planned(each, line, at_ms, opened_last) for each in line["planned"]}
            moves |= {name: each for name, each in found.items() if name not in moves}
            decisions.append(line)
        case "step" if line["transition"] in moves:
            moves[line["transition"]].steps.append((at_ms, dict(line["states"])))
        case "closed" if line["transition"] in moves:
            cut = line.get("job_ends", False) and line["outcome"] != "committed"
            moves[line["transition"]].outcome = JOB_ENDED if cut else str(line["outcome"])
            moves[line["transition"]].ended_ms = at_ms
        case "opened" | "reported" as kind:
            key = (int(line["incarnation"]), int(line["iteration"]))
            opened, reported = iterations.get(key, (None, None))
            iterations[key] = (at_ms, reported) if kind == "opened" else (opened, at_ms)


def _planned(each: Line, line: Line, at_ms: int, opened_last: int | None) -> Move:
    return Move(
        transition=str(each["transition"]),
        role=str(each["role"]),
        change=str(each["change"]),
        comes=list(each["comes"]),
        leaves=list(each["leaves"]),
        layout=each["layout"],
        reason=str(each["reason"]),
        iteration=line["iteration"],
        at_ms=at_ms,
        counts_in=opened_last if line["iteration"] is None else line["iteration"],
    )
