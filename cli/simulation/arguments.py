"""`tidegate simulate`, `tidegate plan` and `tidegate calibrate`: their arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.jobs import job_folder
from cli.usage import Parser, seed
from tidegate.config.job_config import ConfigError
from tidegate.launcher.event_file import BadRecord, read_record
from tidegate.v1 import control_pb2

COMMANDS = ("simulate", "plan", "calibrate")

_SIMULATE = "Simulate one iteration under a policy, or under several beside each other."
_CALIBRATE = "Fit the simulator's costs to what a finished job measured, and print them as a scenario of that job."
_PLAN = "Predict a job's iteration under each policy and from several placements; start nothing."


def answer(given: argparse.Namespace) -> int:
    """The exit code; ConfigError and UnknownJob for what was given wrong."""
    name = given.command
    if name == "simulate" and given.replay is not None:
        name, given.recorded = "replay", _recorded(Path(given.replay))
    if given.command == "calibrate":
        if twice := sorted({job for job in given.jobs if given.jobs.count(job) > 1}):
            raise ConfigError(f"{', '.join(twice)} is named twice: name each run once, or it counts for several")
        given.folders = [job_folder(Path(given.output_dir), job).root for job in given.jobs]
    # Imported here: the simulator takes most of a second to import, and the other commands do without it.
    from cli.simulation import commands

    answers = {
        "simulate": commands.simulate,
        "replay": commands.replay,
        "plan": commands.plan,
        "calibrate": commands.calibrate,
    }
    return answers[name](given)


def _recorded(path: Path) -> tuple[control_pb2.ListEventsResponse, ...]:
    """ConfigError for what holds no events."""
    path = path / "events.jsonl" if path.is_dir() else path
    try:
        rows = tuple(read_record(path))
    except BadRecord as error:
        raise ConfigError(f"--replay {error}; replay a job's record by the release that wrote it") from error
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror}; name a job's folder, or its events.jsonl") from error
    if not rows:
        raise ConfigError(f"--replay {path} holds no events; name a job's folder, or its events.jsonl")
    return rows


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    simulate = commands.add_parser("simulate", help=_SIMULATE, description=_SIMULATE)
    simulate.add_argument(
        "config",
        nargs="*",
        metavar="SCENARIO | key=value",
        help="a YAML file, and what differs from it, such as costs.trainer.exponent=0.3",
    )
    simulate.add_argument(
        "--replay",
        metavar="EVENTS",
        help="instead of a scenario: a job's folder or events.jsonl, told again to its scheduler and to the policy",
    )
    _add_form(simulate, "table", "json", "html", "perfetto")
    which = simulate.add_mutually_exclusive_group()
    which.add_argument(
        "--policy", metavar="P", help="static, rlinf, dynarl or tide (default: the scenario's, else tide)"
    )
    which.add_argument(
        "--compare",
        type=lambda text: text.split(","),
        metavar="P,P,...",
        help="several policies; ratios are to the one named first",
    )
    simulate.add_argument(
        "--seed", type=seed, default=None, metavar="S", help="of the lengths (default: the scenario's)"
    )
    simulate.add_argument(
        "--assumptions", action="store_true", help="all that is assumed, with values and sources, below the table"
    )
    plan = commands.add_parser("plan", help=_PLAN, description=_PLAN)
    plan.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG | key=value",
        help="as of `run`",
    )
    _add_form(plan, "table", "json")
    plan.add_argument(
        "--calibrated",
        metavar="SCENARIO",
        help="whose costs and lengths stand in place of the config's assumptions, as `calibrate` writes one",
    )
    calibrate = commands.add_parser("calibrate", help=_CALIBRATE, description=_CALIBRATE)
    calibrate.add_argument(
        "jobs", metavar="JOB", nargs="+", help="a job's name; several runs of one config are taken together"
    )
    calibrate.add_argument("--output-dir", default="jobs", help="where jobs have their folders (default: jobs)")
    _add_form(calibrate, "yaml", "table", "json")


def _add_form(parser: argparse.ArgumentParser, *forms: str) -> None:
    """The first is the default."""
    parser.add_argument("-o", dest="form", choices=forms, default=forms[0], help="form of what is printed")
