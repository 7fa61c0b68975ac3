"""`tidegate demo`: one job under two policies, from the same seed, on modelled slots.

1. `static`: each component keeps its slots. The job is called demo-static.
2. `tide`: slots move between the components while an iteration runs. The job is called demo.
3. `tide` again, in arrival order, for the first iterations alone. The job is called demo-arrival.

The first two train on the same samples in the same order and end with the same weights, so only their time differs. In
arrival order a minibatch takes the groups that are there, so slots wait less. Its samples begin with those of the
others and differ once the weights do. It is compared with the same iterations of the first two, which are in fixed
order: no run shows what arrival order does for `static`. With `--policy` one job alone runs, called demo. Each fresh
start replaces the one before.

Stdout gets the table of each run, the comparison, and as its last line the figures of the job demo as one JSON object.

Invariants:
- The first two runs differ in their policy and their name alone. [test_demo: differ_in_policy_and_name]
- The third differs from the second in its order and its length besides. [test_demo: third_differs_in_order_and_length]
- A resumed demo repeats no run that has finished. [test_demo: repeats_no_finished_run]
- A run that does not finish ends the demo, with its exit code. [test_demo: ends_the_demo]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from cli import jobs
from cli.moves import Moves, moves_of
from cli.rows import Form, Row, table, written
from cli.run_commands import exit_code, print_tables, request_of, run_shown, tell_end
from tidegate.config.base import OUTPUT_DIR
from tidegate.config.files import Sources, load_sources
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.launcher.claim import Start, saved_config
from tidegate.launcher.outcome import End, Outcome

FILES = ("demo.yaml", "demo_paced.yaml")
NAME = "demo"
LEAST_PERCENT = 2.0
"""The share of all slots' time from which a state has a column in the comparison."""
MOST_REASONS = 5
"""The moves of one iteration that the comparison explains."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A run of the demo. `words` are the changes of its config besides the policy."""

    job: str
    policy: str
    words: tuple[str, ...] = ()


ARRIVAL_ITERATIONS = 2
"""Enough to see: the first has the samples of the other runs, the second begins with every component at home."""
COMPARED = (
    Planned("demo-static", "static"),
    Planned(NAME, "tide"),
    Planned(
        "demo-arrival",
        "tide",
        ("algorithm.minibatch_order=arrival", f"algorithm.iterations={ARRIVAL_ITERATIONS}"),
    ),
)
"""The runs in their order."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A finished or ended run with its policy."""

    policy: str
    config: JobConfig
    outcome: Outcome

    @property
    def folder(self) -> JobFolder:
        return JobFolder.of(self.config)

    @property
    def moves(self) -> Moves:
        return moves_of(self.folder)

    @property
    def iterations_s(self) -> float:
        """The seconds of all iterations, without start, warm-up and end."""
        return self.first_s(len(self.outcome.seconds))

    def first_s(self, count: int) -> float:
        """The seconds of the first iterations."""
        return sum(self.outcome.seconds[number] for number in sorted(self.outcome.seconds)[:count])


def demo(args: argparse.Namespace, form: Form) -> int:
    planned = COMPARED if args.policy is None else (Planned(NAME, args.policy),)
    overrides: dict[str, Any] = {"output_dir": args.output_dir}
    if args.seed is not None:
        overrides["seed"] = args.seed
    configs = demo_configs(planned, overrides)
    if args.resume and args.seed is None:
        configs = _with_seed_of_last_start(configs)
    command = ["tidegate", "demo"] + ([] if args.policy is None else ["--policy", args.policy])
    if args.output_dir != OUTPUT_DIR:
        command += ["--output-dir", args.output_dir]

    def run(config: JobConfig, start: Start) -> Outcome:
        return run_shown(request_of(config, start, command, fresh_flags=[]))

    shown = run_all(planned, configs, run, resume=args.resume, is_table=form is Form.TABLE)
    last = summary_row(shown)
    if form is Form.TABLE and len(shown) > 1:
        print("\n".join(comparison(shown)))
    print(written(last, Form.JSON if form is Form.TABLE else form))
    return exit_code(shown[-1].outcome)


def demo_configs(planned: Sequence[Planned], overrides: Mapping[str, Any]) -> list[JobConfig]:
    """The config of each run."""
    with ExitStack() as opened:
        paths = [opened.enter_context(as_file(files("tidegate") / name)) for name in FILES]
        return [
            load_sources(
                Sources(
                    paths,
                    options={**overrides, "job": each.job},
                    overrides=[f"scheduler.policy={each.policy}", *each.words],
                )
            ).config
            for each in planned
        ]


def run_all(
    planned: Sequence[Planned],
    configs: Sequence[JobConfig],
    run: Callable[[JobConfig, Start], Outcome],
    *,
    resume: bool = False,
    is_table: bool = True,
) -> list[Shown]:
    """The runs up to the first that does not finish, which is the last one here.

    With `resume` a run counts as it is once it has finished, goes on where it has begun, and else starts. The files of
    a run that is older than the one before it are of an earlier demo.
    """
    shown: list[Shown] = []
    for each, config in zip(planned, configs, strict=True):
        folder = JobFolder.of(config)
        has_begun = resume and (not shown or _is_newer(folder, shown[-1].folder))
        outcome = _finished(folder) if has_begun and len(configs) > 1 else None
        if outcome is None:
            about = f"under {each.policy}, {len(shown) + 1} of {len(configs)}"
            print(f"tidegate: job {config.job} {about}", file=sys.stderr)
            outcome = run(config, Start.RESUME if has_begun else Start.FORCE)
        if is_table:
            print(f"{each.policy}: job {config.job}")
            print_tables(outcome, folder)
            print()
        tell_end(config.job, outcome)
        shown.append(Shown(each.policy, config, outcome))
        if outcome.end is not End.FINISHED:
            break
    return shown


def summary_row(shown: Sequence[Shown]) -> Row:
    """The figures of the demo's own run, with its policy, its moves, and the times of the others. Where it did not come
    to run, those of the last run."""
    of_job = {each.config.job: each for each in shown}
    own, static, arrival = of_job.get(NAME, shown[-1]), of_job.get("demo-static"), of_job.get("demo-arrival")
    moves = own.moves.summary()
    return {
        **jobs.summary_row(own.outcome),
        "policy": own.policy,
        "iterations_s": round(own.iterations_s, 3),
        "moves": moves["moves"],
        "switch_s_median": moves["switch_s_median"],
        "gpu_time_pct": gpu_time_percent(own.outcome),
        "static_wall_s": None if static is None else round(static.outcome.wall_s, 3),
        "static_iterations_s": None if static is None else round(static.iterations_s, 3),
        "arrival_iterations": None if arrival is None else len(arrival.outcome.seconds),
        "arrival_iterations_s": None if arrival is None else round(arrival.iterations_s, 3),
    }


def comparison(shown: Sequence[Shown]) -> list[str]:
    """The runs side by side, what moved in the last iteration of the second one and why, and the ratios of times."""
    percents = [gpu_time_percent(each.outcome) for each in shown]
    states = sorted({state for each in percents for state, share in each.items() if share >= LEAST_PERCENT})
    rows = [_compared(each, percent, states) for each, percent in zip(shown, percents, strict=True)]
    lines = [
        table(rows, tuple(rows[0])),
        "% are of all slots' wall time, with start and warm-up.",
        "",
    ]
    lines += _reasons(shown[1])
    finished = [each for each in shown if each.outcome.end is End.FINISHED and each.iterations_s]
    if len(finished) > 1:
        lines += _ratios(*finished)
    return lines


def _ratios(static: Shown, tide: Shown, arrival: Shown | None = None) -> list[str]:
    checksums = {each.outcome.job.final_checksum for each in (static, tide)}
    same = "the same weights" if len(checksums) == 1 else f"DIFFERENT weights: {', '.join(sorted(checksums))}"
    lines = [
        f"iterations: {static.iterations_s:.1f} s under {static.policy}, {tide.iterations_s:.1f} s under "
        f"{tide.policy} ({tide.iterations_s / static.iterations_s:.2f} of it), with {same}"
    ]
    if arrival is None:
        return lines
    count = len(arrival.outcome.seconds)
    static_s, tide_s = static.first_s(count), tide.first_s(count)
    return [
        *lines,
        f"the first {count} iterations: {static_s:.1f} s under {static.policy} and {tide_s:.1f} s under {tide.policy} "
        f"in fixed order, {arrival.iterations_s:.1f} s under {arrival.policy} in arrival order "
        f"({arrival.iterations_s / static_s:.2f} of {static.policy} in fixed order)",
    ]


def gpu_time_percent(outcome: Outcome) -> dict[str, float]:
    """The share of each state in the time of all slots, start and end of the run included. Empty without a trace."""
    path = Path(outcome.timeline)
    if not outcome.timeline or not path.is_file():
        return {}
    total: dict[str, int] = {}
    for slot in json.loads(path.read_text())["otherData"]["state_ns"].values():
        for state, length_ns in slot.items():
            total[state] = total.get(state, 0) + length_ns
    whole = sum(total.values()) or 1
    return {state: round(100 * length / whole, 2) for state, length in sorted(total.items())}


def _compared(each: Shown, percent: Mapping[str, float], states: Sequence[str]) -> Row:
    moves = each.moves.summary()
    return {
        "policy": each.policy,
        "order": str(each.config.algorithm.minibatch_order),
        "iterations": len(each.outcome.seconds),
        "iterations_s": round(each.iterations_s, 1),
        "wall_s": round(each.outcome.wall_s, 1),
        "moves": moves["moves"],
        "switch_s": round(moves["switch_s"], 1),
        **{f"{state}_%": round(percent.get(state, 0.0), 1) for state in states},
        "other_%": round(sum(share for state, share in percent.items() if state not in states), 1),
    }


def _reasons(last: Shown) -> list[str]:
    of_iterations = [each for each in last.moves.moves if each.is_move and each.iteration is not None]
    if not of_iterations:
        return []
    number = max(each.iteration for each in of_iterations if each.iteration is not None)
    found = [each for each in of_iterations if each.iteration == number]
    lines = [f"moves of iteration {number} under {last.policy}:"]
    lines += [f"  {each}: {_why(last.moves, each.transition)}" for each in found[:MOST_REASONS]]
    if len(found) > MOST_REASONS:
        lines.append(f"  and {len(found) - MOST_REASONS} more: `{last.folder.command('why')}` explains all")
    return [*lines, ""]


def _why(moves: Moves, transition: str) -> str:
    move = moves.of_transition(transition)
    decision = None if move is None else moves.decision_of(move)
    return "" if decision is None else str(decision["reason"])


def _is_newer(folder: JobFolder, before: JobFolder) -> bool:
    """Whether the job of `folder` was started after the one before had ended."""
    return folder.config.is_file() and folder.config.stat().st_mtime_ns >= before.result.stat().st_mtime_ns


def _finished(folder: JobFolder) -> Outcome | None:
    """The outcome of the last start, if it finished."""
    if not folder.result.is_file():
        return None
    outcome = Outcome.read(folder.result)
    return outcome if outcome.end is End.FINISHED else None


def _with_seed_of_last_start(configs: Sequence[JobConfig]) -> list[JobConfig]:
    """The first run begins first, so its folder has the seed of the last start."""
    saved = next((found for found in map(saved_config, map(JobFolder.of, configs)) if found), None)
    return [each.model_copy(update={"seed": saved.seed}) if saved else each for each in configs]
