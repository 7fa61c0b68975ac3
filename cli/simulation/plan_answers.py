"""The answers of `tidegate plan` for people and programs: the best split, the gain over it, asynchrony, needs.

Invariant: the table and the JSON value have the same figures. [test_plan_answers: the_same_figures]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any

import yaml

from cli.rows import table
from simulator.best_split import BestSplit
from simulator.job_scenario import PredictionBasis
from simulator.physics.hardware import GpuName
from simulator.planning.ahead import NUM_TIMED, Ahead
from simulator.planning.gains import AROUND, CaseGain, Gains
from simulator.planning.needs import Need
from simulator.planning.plan import JobPlan

CASE_COLUMNS = ("case", "trainer", "decode", "spread", "moves", "split", "split_s", "tide_s", "gain")
WAY_COLUMNS = ("way", "gpus", "tokens_per_s", "times_tide")
NEED_COLUMNS = ("need", "of", "gb", "note")
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Physics:
    """Where the times of a plan come from. `notes`: what a reader has to know of it."""

    basis: PredictionBasis
    gpu: GpuName | None
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        if self.gpu is not None:
            return f"computed for the job's model on {self.gpu} (physics.law=roofline)"
        if self.basis.is_calibrated:
            return "the calibrated scenario"
        return "assumptions.costs of the config"

    def lines(self) -> Iterator[str]:
        yield f"Times: {self.source}."
        yield from (f"  {note}" for note in self.notes)

    def row(self) -> dict[str, Any]:
        gpu = None if self.gpu is None else self.gpu.value
        return {"law": self.basis.physics.law.value, "hardware": gpu, "source": self.source, "notes": [*self.notes]}


def as_json(answers: JobPlan, needs: Sequence[Need], physics: Physics, *, spare: int) -> dict[str, Any]:
    return {
        "best_split": {
            **_sizes(answers.split),
            "order": answers.split.order.value,
            "searched_s": round(answers.split.seconds, 3),
            "keys": answers.best.keys(),
        },
        "gain": _gain(answers.gains),
        "asynchrony": {
            "staleness": answers.ahead.staleness,
            "refused": answers.ahead.refused,
            "ways": [_way_row(answers.ahead, at) for at in range(len(answers.ahead.ways))],
        },
        "needs": [asdict(need) for need in needs],
        "spare_slots": {"needed": 0, "in_no_placement": spare},
        "physics": physics.row(),
        "searched": _searched(answers),
    }


def sections(answers: JobPlan, needs: Sequence[Need], *, spare: int) -> Iterator[str]:
    yield _split_section(answers)
    yield _gain_section(answers.gains)
    yield _ahead_section(answers.ahead)
    yield _needs_section(needs, spare)


def keys_text(answers: JobPlan) -> str:
    """The keys of the best fixed split, as a config has them."""
    return yaml.safe_dump(answers.best.keys(), default_flow_style=None, sort_keys=False, width=120).rstrip()


def _split_section(answers: JobPlan) -> str:
    return f"The best fixed split: {answers.split}; in the config:\n{indent(keys_text(answers), '  ')}"


def _gain_section(gains: Gains) -> str:
    head = "Moving GPUs (tide) over the best fixed split, which is tuned anew in each case of physics"
    if gains.refused:
        return f"{head}: not known, {gains.refused}"
    low, high = gains.range
    rows = [_case_row(each) for each in gains.cases]
    found = f"{gains.median:.2f} times as fast in the median, {low:.2f} to {high:.2f}"
    note = (
        "trainer, decode: factors of the rates; spread: of the lengths', with the same mean before the cut; moves: of "
        "their time; noise: a tenth between engines, steps and portions"
    )
    return f"{head}: {found}\n{table(rows, CASE_COLUMNS)}\n{note}"


def _ahead_section(ahead: Ahead) -> str:
    head = f"A rollout that runs ahead by staleness {ahead.staleness}, each way with its own tuned split"
    if ahead.refused:
        return f"{head}: not compared, {ahead.refused}"
    rows = [_way_row(ahead, at) | {"gpus": "/".join(map(str, way.gpus))} for at, way in enumerate(ahead.ways)]
    _, _, *asynchronous = ahead.ways
    fastest = max(asynchronous, key=lambda way: way.tokens_per_s)
    gain = ahead.gain(fastest)
    word = "gains more than" if gain > 1 else "gains no more than"
    told = f"{fastest.name} {word} strict tide: {gain:.2f} times its tokens a second"
    note = (
        f"gpus: actor/rollout/inference. {NUM_TIMED} iterations of the same lengths, only as assumed. A job of this "
        "release has strict iterations."
    )
    return f"{head}: {told}\n{table(rows, WAY_COLUMNS)}\n{note}"


def _needs_section(needs: Sequence[Need], spare: int) -> str:
    rows = [{"need": each.what, "of": each.of, "gb": _gigabytes(each.size_bytes), "note": each.note} for each in needs]
    slots = f"spare slots: none needed, for a move takes the GPU of another component; {spare} GPUs are in no placement"
    return f"What moving GPUs takes:\n{table(rows, NEED_COLUMNS)}\n{slots}"


def _gigabytes(size_bytes: float | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / _GB:.3g}"


def _gain(gains: Gains) -> dict[str, Any]:
    if gains.refused:
        return {"policy": "tide", "refused": gains.refused, "median": None, "low": None, "high": None, "cases": []}
    low, high = gains.range
    figures = {"median": round(gains.median, 4), "low": round(low, 4), "high": round(high, 4)}
    return {"policy": "tide", "refused": "", **figures, "cases": [_case_row(each) for each in gains.cases]}


def _case_row(each: CaseGain) -> dict[str, Any]:
    case, sizes = each.case, _sizes(each.split)
    return {
        "case": case.name,
        "trainer": case.trainer,
        "decode": case.decode,
        "spread": case.spread,
        "moves": case.moves,
        "split": "/".join(map(str, sizes.values())),
        "split_s": round(each.split_s, 2),
        "tide_s": round(each.moving_s, 2),
        "gain": round(each.gain, 4),
    }


def _way_row(ahead: Ahead, at: int) -> dict[str, Any]:
    way = ahead.ways[at]
    strict = " (strict)" if at < len(ahead.ways) - len(ahead.ways[2:]) else ""
    own = {"way": f"{way.name}{strict}", "gpus": list(way.gpus)}
    return own | {"tokens_per_s": round(way.tokens_per_s, 1), "times_tide": round(ahead.gain(way), 4)}


def _sizes(split: BestSplit) -> dict[str, int]:
    placed = split.scenario.placement()
    return {"actor": len(placed.actor), "rollout": len(placed.rollout), "inference": len(placed.inference)}


def _searched(answers: JobPlan) -> dict[str, Any]:
    return {
        "best_split_runs": answers.split.num_runs,
        "best_split_seeds": list(answers.split.seeds),
        "runs_around_by_case": {each.case.name: each.split.num_runs for each in answers.gains.cases[1:]},
        "seeds_around": AROUND.num_seeds,
        "timed_iterations": {"gain": 1, "asynchrony": NUM_TIMED},
    }
