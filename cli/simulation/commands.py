"""`tidegate simulate` and `calibrate`. Each checks its input, then runs everything, then prints.

Stdout gets the result in the form of `-o`. No command writes anything else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cli.rows import Form, Row, table, written
from cli.simulation import async_report, job_report, replay_report
from cli.simulation.job_files import read_files
from cli.simulation.run_report import (
    ASSUMPTION_COLUMNS,
    SOURCES_LEGEND,
    as_json,
    as_page,
    as_trace,
    assumption_rows,
    missed_fault,
    plain,
)
from simulator import calibration, phase_errors
from simulator.asynchrony.course import MOST_STALENESS, Asynchrony
from simulator.happenings import What
from simulator.job_iterations import SimulatedJob, check_faults
from simulator.job_run import JobRun
from simulator.job_run import simulate_job as simulated_job
from simulator.policies import Contender, contenders_of, requested_policies
from simulator.run import Run
from simulator.run import simulate as simulated
from simulator.scenario import Scenario, ScenarioError, load_scenario
from simulator.summary import Summary, summaries
from simulator.world import Unfinished
from tidegate.config.job_config import ConfigError
from tidegate.config.reading.layers import is_override
from tidegate.recorded import NotRecorded, joined, recorded
from tidegate.timeline_page.page import rendered

DEFAULT_POLICY = "tide"
ASYNC_ITERATIONS = 8
"""With `--staleness` and without `--iterations`. The first ones fill the bound."""


def simulate(args: argparse.Namespace) -> int:
    """ScenarioError for wrong input, ValueError for an iteration that does not end."""
    scenario = _scenario(args.config)
    check_faults(scenario, 1)
    contenders = contenders_of(requested_policies(args) or [_default(scenario)], scenario, args.seed)
    runs = [_simulate(name, contender, args.seed) for name, contender in contenders.items()]
    notes = {name: contender.note for name, contender in contenders.items() if contender.note}
    print(_output(scenario, runs, notes, args))
    return 0


def simulate_job(args: argparse.Namespace) -> int:
    """ScenarioError for wrong input, ValueError for a job that does not end."""
    job_report.check_form(args.form)
    scenario = _scenario(args.config)
    contenders = contenders_of(requested_policies(args) or [_default(scenario)], scenario, args.seed)
    seed = scenario.seed if args.seed is None else args.seed
    runs = [_simulate_job(name, contender, args.iterations, seed) for name, contender in contenders.items()]
    sections = job_report.output(scenario, runs, Form(args.form))
    print(*sections, *(_assumptions(scenario) if args.assumptions and args.form == Form.TABLE else ()), sep="\n\n")
    return 0


def simulate_asynchronously(args: argparse.Namespace) -> int:
    """ScenarioError for wrong input, ValueError for a training that does not end."""
    if not 0 <= args.staleness <= MOST_STALENESS:
        raise ScenarioError(
            f"--staleness {args.staleness} is outside 0 to {MOST_STALENESS} iterations: give 0 for a strict training, "
            "1 for one step off"
        )
    job_report.check_form(args.form)
    names = requested_policies(args) or list(async_report.NAMES)
    async_report.check_names(names)
    scenario = _scenario(args.config)
    if scenario.faults:
        raise ScenarioError("faults are not simulated with --staleness: leave faults out")
    rules = Asynchrony(staleness=args.staleness, on_new_weights=args.on_new_weights)
    seed = scenario.seed if args.seed is None else args.seed
    num_iterations = ASYNC_ITERATIONS if args.iterations is None else args.iterations
    try:
        runs = async_report.simulated(scenario, rules, names, num_iterations=num_iterations, seed=seed)
    except Unfinished as error:
        raise ValueError(f"the training does not end: {error}") from error
    sections = async_report.output(scenario, rules, runs, Form(args.form))
    print(*sections, *(_assumptions(scenario) if args.assumptions and args.form == Form.TABLE else ()), sep="\n\n")
    return 0


def replay(args: argparse.Namespace) -> int:
    """ScenarioError for wrong input."""
    print(replay_report.output(args))
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """ConfigError where `args.folders` have no runs to fit to."""
    try:
        run = joined([recorded(folder) for folder in args.folders])
    except NotRecorded as error:
        raise ConfigError(str(error)) from error
    files = read_files(run.config)
    fitted = calibration.fitted_values(run, files.model, token_cost=files.token_cost)
    phases, unknown = phase_errors.of_run(run), files.unknown
    rows = [asdict(each) for each in fitted]
    match args.form:
        case "json":
            print(json.dumps({"values": rows, "phases": [phase.row() for phase in phases]}))
        case "table":
            print(table([row | {"value": plain(row["value"])} for row in rows], tuple(rows[0])), "", sep="\n")
            print(table([phase.row() for phase in phases], phase_errors.COLUMNS), phase_errors.EXPLANATION, sep="\n")
        case _:
            none = [f"No model is named, so each reshard takes costs.switch.reshard_s: {unknown}"] if unknown else []
            notes = [*none, "Simulated so:", *(f"  {phase.summary()}" for phase in phases), phase_errors.EXPLANATION]
            print(calibration.scenario_text(fitted, notes), end="")
    return 0


def _simulate(name: str, contender: Contender, seed: int | None) -> Run:
    try:
        return simulated(contender.scenario, contender.policy, name=name, seed=seed)
    except Unfinished as error:
        raise ValueError(f"the iteration does not end under {name}: {error}") from error


def _simulate_job(name: str, contender: Contender, num_iterations: int, seed: int) -> JobRun:
    try:
        return simulated_job(SimulatedJob(contender.scenario, num_iterations, seed), contender.policy, name=name)
    except Unfinished as error:
        raise ValueError(f"the job does not end under {name}: {error}") from error


def _default(scenario: Scenario) -> str:
    """The scenario's policy, or `DEFAULT_POLICY` where it names none."""
    named = scenario.scheduler
    return named.policy if "policy" in named.model_fields_set else DEFAULT_POLICY


def _scenario(words: Sequence[str]) -> Scenario:
    paths = [word for word in words if not is_override(word)]
    if len(paths) != 1:
        count = f"{len(paths)} scenarios ({', '.join(paths)})" if paths else "no scenario"
        raise ScenarioError(f"{count}: name one YAML file, then changes as key=value")
    return load_scenario(Path(paths[0]), [word for word in words if is_override(word)])


def _output(scenario: Scenario, runs: Sequence[Run], notes: Mapping[str, str], args: argparse.Namespace) -> str:
    """`notes`: by policy, what a reader has to know besides its figures."""
    match args.form:
        case Form.JSON | Form.YAML:
            return written(as_json(scenario, runs) | {"notes": dict(notes)}, Form(args.form))
        case "html":
            return rendered(as_page(scenario, runs))
        case "perfetto":
            return json.dumps(as_trace(runs))
    return "\n\n".join(_sections(scenario, runs, notes, with_assumptions=args.assumptions))


def _sections(
    scenario: Scenario, runs: Sequence[Run], notes: Mapping[str, str], *, with_assumptions: bool
) -> list[str]:
    rows = [_table_row(summary) for summary in summaries(runs)]
    bound_s = runs[0].bound.bound_s
    meaning = f"no schedule ends before {bound_s:.1f} s: lengths known, moves free, GPUs fractional"
    bound = f"{scenario.name}, seed {runs[0].seed}: {meaning}"
    told = [f"{name}: {note}" for name, note in notes.items()]
    sections = [table(rows, tuple(rows[0])), "\n".join([bound, *told, *_missed_faults(runs)])]
    if not with_assumptions:
        return sections
    return [*sections, *_assumptions(scenario)]


def _missed_faults(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        for each in run.history:
            if each.what is What.FAULT_MISSED:
                yield missed_fault(run.policy, each)


def _assumptions(scenario: Scenario) -> tuple[str, str]:
    return _assumptions_table(assumption_rows(scenario)), SOURCES_LEGEND


def _assumptions_table(rows: Iterable[Row]) -> str:
    return table([{**row, "value": plain(row["value"])} for row in rows], ASSUMPTION_COLUMNS)


def _table_row(summary: Summary) -> Row:
    """A narrow row: states are shares of GPU time in per cent."""
    return {
        "policy": summary.policy,
        "seconds": round(summary.iteration_s, 1),
        "speedup": f"{summary.speedup:.3f}",
        "over_bound_%": round(summary.over_bound_percent, 1),
        **{f"{state}_%": round(share, 1) for state, share in summary.state_percent.items()},
        "moves": summary.num_moves,
        "lost_samples": summary.num_lost,
    }
