"""`tidegate simulate` and `tidegate plan`: their arguments.

What answers them is the simulator, on which the library may not depend: it is found by its name when one of them is
asked for, as the launcher finds the services.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import cast

COMMANDS = ("simulate", "plan")
_ANSWERS = "simulator.command"

_SIMULATE = "Simulate one iteration under a policy, or under several beside each other."
_PLAN = "Predict a job's iteration under each policy and from several placements; start nothing."


def answer(given: argparse.Namespace) -> int:
    """The exit code; ConfigError for what was given wrong."""
    found = cast("Callable[[argparse.Namespace], int]", getattr(import_module(_ANSWERS), given.command))
    return found(given)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser("simulate", help=_SIMULATE, description=_SIMULATE)
    simulate.add_argument(
        "config",
        nargs="+",
        metavar="SCENARIO | key=value",
        help="a YAML file, and what differs from it, such as costs.trainer.exponent=0.3",
    )
    _add_form(simulate, "table", "json", "html", "perfetto")
    which = simulate.add_mutually_exclusive_group()
    which.add_argument("--policy", metavar="P", help="static, rlinf or dynarl (default: the scenario's)")
    which.add_argument(
        "--compare",
        type=lambda text: text.split(","),
        metavar="P,P,...",
        help="several policies; ratios are to the one named first",
    )
    simulate.add_argument(
        "--seed", type=int, default=None, metavar="S", help="of the lengths (default: the scenario's)"
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


def _add_form(parser: argparse.ArgumentParser, *forms: str) -> None:
    parser.add_argument("-o", dest="form", choices=forms, default="table", help="form of what is printed")
