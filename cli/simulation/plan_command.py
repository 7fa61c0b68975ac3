"""`tidegate plan`: checks its input, simulates, prints. It starts nothing and reads only the named files."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from cli.new_file import refuse_existing, write_new
from cli.rows import Form, table, written
from cli.simulation import plan_answers, plan_report
from cli.simulation.job_files import JobFiles, read_files
from cli.simulation.run_report import ASSUMPTION_COLUMNS, plain
from simulator.job_scenario import PredictionBasis, basis_of_calibration, basis_of_config, with_config_keys
from simulator.physics.hardware import GpuName
from simulator.planning.ahead import staleness_fault
from simulator.planning.hardware import basis_of_hardware, gpu_named, memory_of_job, notes
from simulator.planning.needs import Need, needs_of, spare_slots
from simulator.planning.plan import JobPlan, plan_of
from simulator.scenario import ScenarioError, is_scenario, load_scenario
from tidegate.config.files import SourcedConfig, load_sources, sources_of
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.reading.layers import is_override
from tidegate.config.reading.origins import with_origins

_LARGE = 1024
"""Responses of an iteration. The plan of a smaller job takes less time than processes take to start."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The basis of the forecast, the files of the job, and the GPU that `--hardware` names."""

    basis: PredictionBasis
    files: JobFiles
    gpu: GpuName | None


def plan(args: argparse.Namespace) -> int:
    """ConfigError, BadUsage for wrong input."""
    gpu = _checked(args)
    if args.write is not None:
        refuse_existing(args.write)
    sourced = load_sources(sources_of(args.config))
    files = read_files(sourced.config)
    known, answers = _answered(sourced, files, gpu, args)
    if args.write is not None:
        head = f"# The best fixed split of job {sourced.config.job}, by tidegate plan.\n"
        write_new(args.write, head + plan_answers.keys_text(answers) + "\n")
    needs = _needs(sourced.config, known, answers)
    physics = plan_answers.Physics(known.basis, gpu, tuple(notes(sourced.config)) if gpu else ())
    if args.form != Form.TABLE:
        own = plan_report.as_json(sourced.config, sourced.layer, answers.found, known.basis)
        more = plan_answers.as_json(answers, needs, physics, spare=spare_slots(sourced.config))
        print(written(own | more, Form(args.form)))
        return 0
    print(*_sections(sourced, known, answers, needs, physics), sep="\n\n")
    return 0


def _checked(args: argparse.Namespace) -> GpuName | None:
    """The named GPU. ConfigError for words that make no plan, before any file but those is read."""
    if fault := staleness_fault(args.staleness):
        raise ConfigError(fault)
    for word in args.config:
        if not is_override(word) and is_scenario(Path(word)):
            raise ConfigError(f"{word} is a scenario and not a job's config: run `tidegate simulate {word}`")
    if args.hardware is not None and args.calibrated is not None:
        raise ConfigError(
            f"--hardware {args.hardware} computes the times that --calibrated {args.calibrated} has measured: leave "
            "one of the two out"
        )
    return None if args.hardware is None else gpu_named(args.hardware)


def _answered(
    sourced: SourcedConfig, files: JobFiles, gpu: GpuName | None, args: argparse.Namespace
) -> tuple[_Known, JobPlan]:
    """ConfigError that names the keys of the config, or of the calibrated scenario."""
    config = sourced.config
    if args.calibrated is not None:
        basis = basis_of_calibration(load_scenario(Path(args.calibrated)))
        try:
            return _Known(basis, files, gpu), _planned(config, basis, args.staleness)
        except ScenarioError as error:
            faults = "; ".join(str(error).splitlines())
            raise ConfigError(f"{args.calibrated} does not fit job {config.job}: {faults}") from error
    try:
        basis = _basis(config, files, gpu)
        return _Known(basis, files, gpu), _planned(config, basis, args.staleness)
    except ScenarioError as error:
        raise ConfigError(with_origins(with_config_keys(str(error)), sourced.layer)) from error


def _planned(config: JobConfig, basis: PredictionBasis, staleness: int) -> JobPlan:
    """The plan; that of a large job in as many processes as there are CPUs. A person at a terminal sees its steps:
    64 GPUs take minutes.

    ConfigError, ScenarioError: as `plan_of`.
    """
    is_seen = sys.stderr.isatty()

    def told(step: str) -> None:
        if is_seen:
            print(f"simulating {step} ...", file=sys.stderr, flush=True)

    if config.algorithm.prompts_per_iteration * config.algorithm.group_size < _LARGE:
        return plan_of(config, basis, staleness=staleness, told=told)
    # New interpreters: a fork would inherit whatever threads and locks this process has.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        return plan_of(config, basis, staleness=staleness, mapped=pool.map, told=told)


def _basis(config: JobConfig, files: JobFiles, gpu: GpuName | None) -> PredictionBasis:
    """ConfigError: `--hardware` without a shape. ScenarioError: as `basis_of_config` and `basis_of_hardware`."""
    if gpu is None:
        return basis_of_config(
            config,
            files.model,
            unknown=files.unknown,
            prompt_tokens=files.prompt_tokens,
            token_cost=files.token_cost,
        )
    if files.shape is None:
        raise ConfigError(f"--hardware {gpu} needs the shape of the job's model, and it is not known: {files.unknown}")
    return basis_of_hardware(config, files.shape, gpu, prompt_tokens=files.prompt_tokens)


def _needs(config: JobConfig, known: _Known, answers: JobPlan) -> list[Need]:
    shape, layout = known.files.shape, answers.best.config.actor.layout.layout()
    memory = memory_of_job(config, shape, known.gpu or GpuName.H100, known.files.prompt_tokens) if shape else None
    return needs_of(config, memory, layout, unknown=known.files.unknown, is_gpu_named=known.gpu is not None)


def _sections(
    sourced: SourcedConfig, known: _Known, answers: JobPlan, needs: list[Need], physics: plan_answers.Physics
) -> list[str]:
    found = answers.found
    sections = [
        table(plan_report.rows(found), plan_report.ROW_COLUMNS),
        "\n".join(plan_report.advice(found)),
        *plan_answers.sections(answers, needs, spare=spare_slots(sourced.config)),
    ]
    if slower := plan_report.slower_rows(found):
        head = "Policies that are slower than static as configured, and why: seconds that a GPU spends on average:"
        note = plan_report.cost_of_moves_note(known.basis)
        sections.append(f"{head}\n{table(slower, plan_report.SLOWER_COLUMNS)}\n{note}")
    rows = list(plan_report.assumptions(sourced.config, sourced.layer, known.basis))
    listed = table([{**row, "value": plain(row["value"])} for row in rows], ASSUMPTION_COLUMNS)
    more = [plan_report.DEFAULT_NOTE] if any(row["source"] == plan_report.DEFAULT for row in rows) else []
    return [*sections, "\n".join([*physics.lines(), listed, *more])]
