"""The arguments of `tidegate simulate`, `tidegate plan` and `tidegate calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cli.jobs import job_folder
from cli.usage import Parser, count, seed
from tidegate.config.base import OUTPUT_DIR
from tidegate.config.job_config import ConfigError
from tidegate.config.sections.scheduler import POLICIES
from tidegate.launcher.event_file import BadRecord, read_record
from tidegate.v1 import control_pb2

COMMANDS = ("simulate", "plan", "calibrate")

_SIMULATE = "Simulate one iteration, or a job of several, under one policy, or compare several policies."
_CALIBRATE = "Fit the simulator's costs to what a finished job measured, and print them as a scenario of that job."
_PLAN = "Find a job's best fixed split, and what moving GPUs gains over it and takes. Start nothing."


def answer(args: argparse.Namespace) -> int:
    """Returns the exit code. ConfigError and UnknownJob for wrong arguments."""
    name = args.command
    if name == "simulate" and args.replay is not None:
        if args.iterations is not None:
            raise ConfigError(
                f"--iterations {args.iterations} with --replay {args.replay}: a record has its own iterations; "
                "leave --iterations out"
            )
        name, args.recorded = "replay", _recorded(Path(args.replay))
        if args.staleness is not None:
            raise ConfigError("--staleness with --replay: a record is of a strict job; leave --staleness out")
    elif name == "simulate" and args.staleness is not None:
        name = "simulate_async"
    elif name == "simulate" and args.iterations is not None:
        name = "simulate_job"
    if args.command == "calibrate":
        if twice := sorted({job for job in args.jobs if args.jobs.count(job) > 1}):
            raise ConfigError(f"{', '.join(twice)} is named twice: name each run once, or it counts for several")
        args.folders = [job_folder(Path(args.output_dir), job).root for job in args.jobs]
    # Import here: the simulator takes most of a second to import, and the other commands do not need it.
    from cli.simulation import commands, plan_command

    answers = {
        "simulate": commands.simulate,
        "simulate_job": commands.simulate_job,
        "simulate_async": commands.simulate_asynchronously,
        "replay": commands.replay,
        "plan": plan_command.plan,
        "calibrate": commands.calibrate,
    }
    return answers[name](args)


def _recorded(path: Path) -> tuple[control_pb2.ListEventsResponse, ...]:
    """The events of a record. ConfigError when there are none."""
    path = path / "events.jsonl" if path.is_dir() else path
    try:
        rows = tuple(read_record(path))
    except BadRecord as error:
        raise ConfigError(f"--replay {error}; replay a job's record by the release that wrote it") from error
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror}; name a job's folder, or its events.jsonl") from error
    if not rows:
        raise ConfigError(f"--replay {path} has no events; name a job's folder, or its events.jsonl")
    return rows


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    simulate = commands.add_parser("simulate", help=_SIMULATE, description=_SIMULATE)
    simulate.add_argument(
        "config",
        nargs="*",
        metavar="SCENARIO | key=value",
        help="a YAML file, and changes such as costs.trainer.exponent=0.3",
    )
    simulate.add_argument(
        "--replay",
        metavar="EVENTS",
        help="instead of a scenario: a job's folder or events.jsonl, for its scheduler and the policy to see again",
    )
    _add_form(simulate, "table", "json", "yaml", "html", "perfetto")
    which = simulate.add_mutually_exclusive_group()
    which.add_argument(
        "--policy",
        metavar="P",
        help=f"{_either(POLICIES)}, or a baseline of docs/simulator.md (default: the scenario's policy, or tide)",
    )
    which.add_argument(
        "--compare",
        type=lambda text: text.split(","),
        metavar="P,P,...",
        help="several policies and baselines; ratios are relative to the first",
    )
    simulate.add_argument(
        "--seed", type=seed, default=None, metavar="S", help="the seed of the lengths (default: the scenario's)"
    )
    simulate.add_argument(
        "--iterations",
        type=count,
        default=None,
        metavar="N",
        help="simulate a job of N iterations, whose lengths change as `drift` of the scenario says",
    )
    simulate.add_argument(
        "--staleness",
        type=int,
        default=None,
        metavar="K",
        help="let the rollout run ahead of the trainer, by weights that are at most K iterations old",
    )
    simulate.add_argument(
        "--on-new-weights",
        choices=("ends_old", "keeps_cache", "computes_cache"),
        default="ends_old",
        help="with --staleness: what engines do with running sequences when new weights are there (default: ends_old)",
    )
    simulate.add_argument(
        "--assumptions", action="store_true", help="below the table, list all assumptions with values and sources"
    )
    plan = commands.add_parser("plan", help=_PLAN, description=_PLAN)
    plan.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG | key=value",
        help="as for `run`",
    )
    _add_form(plan, "table", "json", "yaml")
    plan.add_argument(
        "--calibrated",
        metavar="SCENARIO",
        help="a scenario of `calibrate`, whose costs and lengths replace the config's assumptions",
    )
    plan.add_argument(
        "--hardware",
        metavar="GPU",
        help="compute the times for the job's model on this GPU, such as H100, in place of the config's assumptions",
    )
    plan.add_argument(
        "--staleness",
        type=int,
        default=1,
        metavar="K",
        help="iterations by which a compared rollout may run ahead of the trainer (default: 1; 0: none is compared)",
    )
    help_ = "write the keys of the best fixed split to a new file, for `run` and `submit` after CONFIG"
    plan.add_argument("--write", type=Path, metavar="FILE", help=help_)
    calibrate = commands.add_parser("calibrate", help=_CALIBRATE, description=_CALIBRATE)
    calibrate.add_argument(
        "jobs", metavar="JOB", nargs="+", help="a job's name; several runs of one config are fitted together"
    )
    calibrate.add_argument("--output-dir", default=OUTPUT_DIR, help="the folder of the jobs' folders (default: jobs)")
    _add_form(calibrate, "yaml", "table", "json")


def _add_form(parser: argparse.ArgumentParser, *forms: str) -> None:
    """The first form is the default."""
    parser.add_argument("-o", dest="form", choices=forms, default=forms[0], help="form of the output")


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
