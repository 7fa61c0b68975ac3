"""The arguments of the commands that move a live job's GPUs by hand: `scale`, `migrate`, `drain`.

Invariant: text that names no layout, no size and no GPU is refused with what would be one.
[test_manual_commands: names_no_gpu]
"""

from __future__ import annotations

import argparse
import re
import reprlib
from collections.abc import Callable
from dataclasses import fields

from cli.manual_moves import Manner
from cli.rows import Form
from cli.scaling import Wish
from cli.usage import BadUsage
from tidegate.config.base import MAX_GPUS
from tidegate.types import Layout, Role

NUMBER = re.compile(r"[0-9]{1,9}")
_GPU = re.compile(r"[a-z0-9-]+/[0-9]+")


def add_commands(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """The commands that move a live job's GPUs by hand."""
    scale = command("scale", "Give a live job's components more or fewer GPUs, or its actor another layout.")
    scale.add_argument("job", metavar="JOB")
    place = scale.add_mutually_exclusive_group()
    place.add_argument("--actor", type=_size, metavar="N", help="the actor on N GPUs, in copies like the present ones")
    place.add_argument("--layout", type=_layout, metavar="AXES", help="the actor in tp=2,dp=2; axes left out are 1")
    scale.add_argument("--rollout", type=_size, metavar="N", help="the rollout on N GPUs, in engines like the present")
    scale.add_argument(
        "--inference", type=_size, metavar="N", help="the inference on N GPUs, in copies like the present"
    )
    help_ = "the actor's, in rank order, such as n0/0,n0/1 (default: its first ones, plus its own, free and other ones)"
    scale.add_argument("--gpus", type=_gpus, default=[], metavar="GPUS", help=help_)
    migrate = command("migrate", "Move replicas of a live job's component to free GPUs: an engine, a copy, a rank.")
    migrate.add_argument("job", metavar="JOB")
    for flag, dest, help_ in (
        ("--from", "leaving", "the GPUs that one component gives up, such as n0/2 or n0/0,n0/1"),
        ("--to", "coming", "as many free GPUs, in the same order"),
    ):
        migrate.add_argument(flag, dest=dest, type=_gpus, required=True, metavar="GPUS", help=help_)
    drain = command(
        "drain", "Take GPUs or nodes away from a live job, or a node from all jobs of the cluster, until --undo."
    )
    drain.add_argument("job", metavar="JOB|NODE", help="a job with targets, or alone a node of the cluster")
    drain.add_argument("targets", nargs="*", metavar="GPU|NODE", help="such as n0/3, or n0 for all its GPUs")
    what = drain.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="give them back to the job")
    what.add_argument("--keep-jobs", action="store_true", help="jobs of the node stay until they end")
    for each in (scale, migrate, drain):
        how = each.add_mutually_exclusive_group()
        how.add_argument("--wait", action="store_true", help="return when the GPUs have moved, or cannot")
        how.add_argument(
            "--dry-run", action="store_true", help="print the transitions with their costs; change nothing"
        )


def manner_of(args: argparse.Namespace) -> Manner:
    return Manner(Form(args.form), is_dry=args.dry_run, waits=args.wait)


def wish_of(args: argparse.Namespace) -> Wish:
    """BadUsage: it names no component, or GPUs for none."""
    sizes = {role: size for role in Role if (size := getattr(args, role.value)) is not None}
    if not sizes and args.layout is None:
        raise BadUsage("scale needs --actor N, --layout AXES, --rollout N or --inference N; several make one move")
    if args.gpus and args.layout is None and Role.ACTOR not in sizes:
        raise BadUsage("--gpus names the actor's GPUs, so give --actor N or --layout AXES too")
    return Wish(sizes, args.layout, tuple(args.gpus))


def _size(text: str) -> int:
    if not (NUMBER.fullmatch(text) and 1 <= int(text) <= MAX_GPUS):
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a number of GPUs from 1 to {MAX_GPUS:,}")
    return int(text)


def _layout(text: str) -> Layout:
    """Reads `tp=2,dp=2`. argparse prints the error for any other text."""
    known, sizes = [field.name for field in fields(Layout)], dict[str, int]()
    wrong = f"{reprlib.repr(text)} is no layout such as tp=2,dp=2, of {', '.join(known)}"
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in known or axis in sizes:
            fault = f"{axis} is named twice" if axis in sizes else f"{reprlib.repr(axis)} is no axis"
            raise argparse.ArgumentTypeError(f"{wrong}: {fault}")
        if not (NUMBER.fullmatch(size) and 1 <= int(size) <= MAX_GPUS):
            fault = f"{axis}={reprlib.repr(size)} is not a whole number from 1 to {MAX_GPUS:,}"
            raise argparse.ArgumentTypeError(f"{wrong}: {fault}")
        sizes[axis] = int(size)
    try:
        return Layout(**sizes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{wrong}: {error}") from error


def _gpus(text: str) -> list[str]:
    """Reads `n0/0,n0/1`. argparse prints the error for any other text."""
    gpus = text.split(",")
    if wrong := [gpu for gpu in gpus if not _GPU.fullmatch(gpu)]:
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(wrong[0])} is no GPU such as n0/0: `tidegate get gpus` lists them"
        )
    return gpus
