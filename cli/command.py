"""Arguments in, an exit code out: 0 done, 1 failed, 2 bad usage or config, 128 + n stopped by signal n.

Invariant: what a person did wrong is one message on stderr (what, the numbers, the remedy), never a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

from cli import queries
from cli.jobs import UnknownJob
from cli.rows import Form
from cli.simulation import arguments as simulating
from cli.usage import BadUsage, Parser, seed
from tidegate.config.job_config import ConfigError
from tidegate.launcher.control import NotRunning
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.types import Layout

_SCHEMA = "Print the JSON schema of configs, by which editors check and complete them."
FAILED = 1
BAD_USAGE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)


def execute(arguments: Sequence[str] | None = None) -> int:
    """`arguments` are this process's when None."""
    try:
        code = _run(_parsed(_parser(), arguments))
        # Here, where it is told if nobody reads it, or the disk is full: at exit it would be a traceback.
        sys.stdout.flush()
        return code
    except (BadUsage, ConfigError, UnknownJob) as error:
        return _say(error, code=BAD_USAGE)
    except (NotRunning, PeerRefused, PeerUnavailable, ValueError) as error:
        return _say(error, code=FAILED)
    except BrokenPipeError:
        # The reader has seen enough (`| head`): nothing more can be said, at exit neither.
        _drop_output()
        return FAILED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        return _say(f"{error}: not all was written; make room, and do it again", code=FAILED)


def _parsed(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """BadUsage."""
    given, rest = parser.parse_known_args(arguments)
    taken = given.config if "config" in given else None
    if rest and (taken is None or any(word.startswith("-") for word in rest)):
        help_ = f"`{parser.prog} {given.command} --help` says what may be given"
        raise BadUsage(f"{given.command} takes no {' '.join(rest)}; {help_}")
    if taken is not None:
        # argparse takes only the first stretch of them: `run a.yaml --resume seed=1` goes on after the flag.
        taken += rest
    return given


def _run(given: argparse.Namespace) -> int:
    if given.command in simulating.COMMANDS:
        return simulating.answer(given)
    form, output_dir = Form(given.form), Path(given.output_dir or "")
    match given.command:
        case "demo" | "run":
            # Imported here: what runs a job takes a second to import, and asking about one shall not.
            from cli import running

            return running.demo(given, form) if given.command == "demo" else running.run(given, form)
        case "schema":
            print((files("tidegate") / "config.schema.json").read_text(), end="")
            return 0
        case "doctor":
            return queries.doctor(output_dir, form)
        case "get":
            return asyncio.run(queries.get(given.what, given.jobs, output_dir, form))
        case "describe":
            return asyncio.run(queries.describe(given.job, output_dir, form))
        case "events":
            return asyncio.run(queries.events(given.job, output_dir, form, follow=given.follow))
        case "logs":
            logs = queries.logs(given.job, given.source, output_dir, form, follow=given.follow, attempt=given.attempt)
            return asyncio.run(logs)
        case "cancel":
            return asyncio.run(queries.cancel(given.job, given.reason, output_dir, form))
        case "scale":
            return asyncio.run(queries.scale(given.job, given.layout, given.gpus, output_dir, form))
        case "deadletter":
            return asyncio.run(queries.settle_dead_letter(given.verb, given.job, given.id, output_dir, form))
    raise AssertionError(f"argparse let {given.command!r} through")


def _drop_output() -> None:
    """What stdout still holds would fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(error: Exception | str, *, code: int) -> int:
    print(f"tidegate: {error}", file=sys.stderr)
    return code


def _parser() -> Parser:
    parser = Parser(prog="tidegate", description="Runs RL post-training jobs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, told: str, *, output_dir: str | None = "jobs") -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=told, description=told)
        added.add_argument(
            "-o", dest="form", choices=[form.value for form in Form], default="table", help="form of what is printed"
        )
        where = f"where jobs have their folders (default: {output_dir or 'as the config says'})"
        added.add_argument("--output-dir", default=output_dir, help=where)
        return added

    demo = command("demo", "Run the demo job, from nothing to its result.")
    _add_running(demo, command("run", "Run a job.", output_dir=None))
    simulating.add_commands(commands)
    commands.add_parser("schema", help=_SCHEMA, description=_SCHEMA).set_defaults(form="json", output_dir="")
    command("doctor", "Check what this machine has of what a job needs.")
    get = command("get", "List jobs, their evaluations, the GPUs of live jobs, or their dead letters.")
    get.add_argument("what", choices=["jobs", "evaluations", "gpus", "deadletters"])
    get.add_argument("jobs", nargs="*", metavar="JOB", help="only these")
    for name, told in (
        ("describe", "Show a job: its state, components, iterations and evaluations."),
        ("events", "List what happened in a job."),
        ("logs", "Print a job's logs."),
        ("cancel", "End a live job; its checkpoints stay."),
        ("scale", "Move a live job's actor to more, fewer or other GPUs, or into another layout, while it trains."),
    ):
        command(name, told).add_argument("job", metavar="JOB")
    which = commands.choices["logs"].add_mutually_exclusive_group()
    for asked in (commands.choices["events"], which):
        asked.add_argument("--follow", action="store_true", help="go on with what comes")
    which.add_argument("--attempt", type=int, metavar="N", help="of this start of the job, from 1 (default: the last)")
    commands.choices["logs"].add_argument("source", nargs="?", default="", help="scheduler, actor@n0, ...; default all")
    commands.choices["cancel"].add_argument("--reason", default="", help="told to whoever reads the job's end")
    scale = commands.choices["scale"]
    scale.add_argument("--layout", type=_layout, required=True, metavar="AXES", help="such as tp=2,dp=2; the rest is 1")
    scale.add_argument(
        "--gpus",
        type=lambda text: text.split(","),
        default=[],
        metavar="GPUS",
        help="in rank order, such as n0/0,n0/1 (default: those it has, the last left out or free ones added)",
    )
    dead_letter = command("deadletter", "Deliver a dead letter again, or forget it; the job then goes on.")
    dead_letter.add_argument("verb", choices=["replay", "drop"])
    dead_letter.add_argument("job", metavar="JOB")
    dead_letter.add_argument("id", type=int, metavar="ID")
    return parser


def _layout(text: str) -> Layout:
    """`tp=2,dp=2`; argparse tells what is wrong with another."""
    try:
        axes = dict(axis.split("=") for axis in text.split(","))
        return Layout(**{axis: int(size) for axis, size in axes.items()})
    except (TypeError, ValueError) as error:
        known = ", ".join(field.name for field in fields(Layout))
        raise argparse.ArgumentTypeError(f"{text!r} is no layout such as tp=2,dp=2, of {known}: {error}") from error


def _add_running(demo: argparse.ArgumentParser, run: argparse.ArgumentParser) -> None:
    demo.add_argument("--seed", type=seed, default=None, help="repeats exactly (default: 0)")
    run.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG | key=value",
        help="YAML files, later ones over earlier ones, and what differs from them, such as algorithm.group_size=8",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="check all, print the config as it is resolved, start nothing"
    )
    run.add_argument("--force", action="store_true", help="remove what the job left before, and start anew")
    for parser in (demo, run):
        parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
