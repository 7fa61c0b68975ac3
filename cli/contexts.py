"""Contexts: names for clusters. `tidegate context add lab --output-dir FOLDER`, and then `--cluster lab` in its place.

A context has the folder of the jobs, and an operator's or a viewer's credential for a machine that is none of the
cluster's. It is a file that a person may write: `~/.config/tidegate/contexts/NAME.yaml`. Who keeps the cluster, and
where that one answers, the folder tells.

Invariants:
- What the command line names goes before `TIDEGATE_CLUSTER`. [test_contexts: goes_before_the_variable]
- A context that cannot be used is refused with the remedy. [test_contexts: that_cannot_be_used]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import yaml

from cli.rows import Form, Row, answer_text, show
from cli.usage import BadUsage
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import BadIdentity, Identity, Party
from tidegate.json_text import typed

CLUSTER_VARIABLE = "TIDEGATE_CLUSTER"
"""Names the context for commands that name none."""
_NAMED: ContextVar[Context | None] = ContextVar("the context that the command line names", default=None)
COLUMNS = ("context", "output_dir", "operator")


@dataclass(frozen=True, slots=True)
class Context:
    """`operator`: the folder of the credential. None: a machine of the cluster has its own."""

    output_dir: Path
    operator: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Context:
        """ValueError, OSError."""
        try:
            found = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"it is no YAML ({' '.join(str(error).split())})") from error
        if found is None:
            raise ValueError("it is empty")
        fields = typed(dict, found, "a context")
        if unknown := sorted({*map(str, fields)} - {"output_dir", "operator"}):
            raise ValueError(f"it has {', '.join(unknown)}, and only output_dir and operator have a meaning")
        if "output_dir" not in fields:
            raise ValueError("it has no output_dir")
        try:
            folders = {name: Path(typed(str, value, name)).expanduser() for name, value in fields.items()}
        except RuntimeError as error:  # of a home that nobody has
            raise ValueError(str(error)) from error
        if relative := [name for name, folder in folders.items() if not folder.is_absolute()]:
            raise ValueError(f"{relative[0]} is not an absolute path")
        return cls(**folders)

    def write(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fields = {"output_dir": str(self.output_dir)} | ({"operator": str(self.operator)} if self.operator else {})
        path.write_text(yaml.safe_dump(fields, sort_keys=False))


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    added = command("context", "Give clusters names: `--cluster NAME` then stands for the folder of its jobs.")
    added.add_argument("verb", choices=["add", "list", "remove"])
    added.add_argument("name", nargs="?", metavar="NAME")
    help_ = "add: an operator's or a viewer's credential, for a machine that is none of the cluster's"
    added.add_argument("--operator", type=Path, metavar="FOLDER", help=help_)


def add_flag(parser: argparse.ArgumentParser) -> None:
    help_ = f"the cluster of this context, in place of --output-dir (default: as {CLUSTER_VARIABLE} says)"
    parser.add_argument("--cluster", dest="context", metavar="NAME", help=help_)


def settle(args: argparse.Namespace) -> None:
    """Sets `output_dir` to the folder that the command line means. BadUsage."""
    _NAMED.set(None)
    if args.output_dir is None and "context" in args:
        if named := args.context or os.environ.get(CLUSTER_VARIABLE):
            found = _known(named, "" if args.context else f" ({CLUSTER_VARIABLE} names it)")
            _NAMED.set(found)
            args.output_dir = str(found.output_dir)
    elif "context" in args and args.context:
        raise BadUsage(f"--cluster {args.context} and --output-dir {args.output_dir}: give one of them")
    if args.output_dir is None:
        args.output_dir = args.usual_output_dir


def operator_of(output_dir: Path) -> Path | None:
    """The credential of the context that the command line names, or of one with this folder."""
    if (named := _NAMED.get()) is not None and named.output_dir.resolve() == output_dir.resolve():
        return named.operator
    for path in _files():
        with suppress(ValueError, OSError):
            found = Context.read(path)
            if found.operator is not None and found.output_dir.resolve() == output_dir.resolve():
                return found.operator
    return None


def context(args: argparse.Namespace, output_dir: Path, form: Form) -> int:
    if args.verb == "list":
        rows = [_row(path) for path in _files()]
        show(rows, COLUMNS, form=form, out=sys.stdout, empty=f"no contexts in {_folder()}: tidegate context add NAME")
        return 0
    if args.name is None:
        raise BadUsage(f"context {args.verb} needs a NAME")
    path = _path(args.name)
    if args.verb == "remove":
        try:
            path.unlink()
        except FileNotFoundError:
            raise _unknown(args.name) from None
        except OSError as error:
            raise BadUsage(f"context {args.name} cannot be removed: {error}") from error
        print(answer_text({"context": args.name, "state": "removed"}, f"context {args.name} is removed", form))
        return 0
    if not output_dir.is_dir():
        raise BadUsage(f"--output-dir {output_dir}: there is no such folder; give that of the cluster's jobs")
    if args.operator is not None:
        _check(args.operator)
    new = Context(output_dir, args.operator and args.operator.resolve())
    try:
        new.write(path)
    except OSError as error:
        raise BadUsage(f"context {args.name} cannot be written: {error}") from error
    print(answer_text(_row(path), f"--cluster {args.name} stands for the cluster of {output_dir}", form))
    return 0


def _check(operator: Path) -> None:
    """BadUsage where it is no credential for commands."""
    try:
        who = Credentials(operator).identity
    except CertsError as error:
        raise BadUsage(f"--operator: {error}") from error
    if who.party not in (Party.OPERATOR, Party.VIEWER):
        raise BadUsage(f"--operator {operator} is of {who}: commands need an operator's or a viewer's")


def _folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "tidegate" / "contexts"


def _files() -> list[Path]:
    return sorted(_folder().glob("*.yaml"))


def _path(name: str) -> Path:
    try:
        Identity(name, Party.OPERATOR, "me")
    except BadIdentity:
        raise BadUsage(f"{name!r} is no name of a context: lower-case letters, digits and inner hyphens") from None
    return _folder() / f"{name}.yaml"


def _unknown(name: str, by: str = "") -> BadUsage:
    known = ", ".join(each.stem for each in _files()) or "none"
    return BadUsage(f"there is no context {name}{by}; there: {known}. tidegate context add NAME makes one")


def _known(name: str, by: str) -> Context:
    path = _path(name)
    try:
        return Context.read(path)
    except FileNotFoundError:
        raise _unknown(name, by) from None
    except (ValueError, OSError) as error:
        raise BadUsage(f"context {name}{by} cannot be used: {path}: {error}") from error


def _row(path: Path) -> Row:
    try:
        found = Context.read(path)
    except (ValueError, OSError) as error:
        return {"context": path.stem, "output_dir": f"cannot be used: {error}", "operator": None}
    operator = str(found.operator) if found.operator else None
    return {"context": path.stem, "output_dir": str(found.output_dir), "operator": operator}
