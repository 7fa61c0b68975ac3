"""Contexts: names for clusters. `tidegate context add lab --output-dir FOLDER`, and then `--cluster lab` in its place.

A context has the folder of the jobs, and an operator's or a viewer's credential for a machine that is none of the
cluster's. It is a file that a person may write: `~/.config/tidegate/contexts/NAME.yaml`. Who keeps the cluster, and
where that one answers, the folder tells.

A machine that does not have the folder is told the machines that may keep the cluster, and where each answers. Its
commands run there (`cli.afar`).

Invariants:
- What the command line names goes before `TIDEGATE_CLUSTER`. [test_contexts: goes_before_the_variable]
- A context that cannot be used is refused with the remedy. [test_contexts: that_cannot_be_used]
- What cannot be done from afar is refused before anybody is called. [test_contexts: is_done_on_its_machines]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cli.rows import Form, Row, answer_text, show
from cli.usage import BadUsage
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import BadIdentity, Identity, Party
from tidegate.cluster.far_commands import CHANGING, LOOKING
from tidegate.json_text import typed
from tidegate.short_lists import first_few

CLUSTER_VARIABLE = "TIDEGATE_CLUSTER"
"""Names the context for commands that name none."""
_NAMED: ContextVar[Context | None] = ContextVar("the context that the command line names", default=None)
COLUMNS = ("context", "output_dir", "keepers", "operator")
_KEYS = ("output_dir", "keepers", "operator")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
"""A name, or an IPv4 address."""


@dataclass(frozen=True, slots=True)
class Context:
    """`operator`: the folder of the credential. None: a machine of the cluster has its own. `keepers`: where the
    machines that may keep the cluster answer, by their names; then there is no `output_dir`, for it is on those."""

    output_dir: Path | None = None
    operator: Path | None = None
    keepers: Mapping[str, str] = field(default_factory=dict)

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
        if unknown := sorted({*map(str, fields)} - {*_KEYS}):
            raise ValueError(f"it has {', '.join(unknown)}, and only {', '.join(_KEYS)} have a meaning")
        keepers = typed(dict, fields.pop("keepers", {}), "keepers")
        for name, address in keepers.items():
            _check_keeper(typed(str, name, "the name of a keeper"), typed(str, address, f"the address of {name}"))
        if ("output_dir" in fields) is bool(keepers):
            raise ValueError("it has no output_dir" if not keepers else "it has both output_dir and keepers")
        if keepers and "operator" not in fields:
            raise ValueError("it has keepers and no operator: a call from afar needs a credential")
        try:
            folders = {name: Path(typed(str, value, name)).expanduser() for name, value in fields.items()}
        except RuntimeError as error:  # of a home that nobody has
            raise ValueError(str(error)) from error
        if relative := [name for name, folder in folders.items() if not folder.is_absolute()]:
            raise ValueError(f"{relative[0]} is not an absolute path")
        return cls(**folders, keepers=keepers)

    def write(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fields = (("output_dir", self.output_dir), ("keepers", self.keepers), ("operator", self.operator))
        text = {name: str(value) if isinstance(value, Path) else dict(value) for name, value in fields if value}
        path.write_text(yaml.safe_dump(text, sort_keys=False))


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    added = command("context", "Give clusters names: `--cluster NAME` then stands for the folder of its jobs.")
    added.add_argument("verb", choices=["add", "list", "remove"])
    added.add_argument("name", nargs="?", metavar="NAME")
    help_ = "add: an operator's or a viewer's credential, for a machine that is none of the cluster's"
    added.add_argument("--operator", type=Path, metavar="FOLDER", help=help_)
    help_ = (
        "add: in place of --output-dir, where that folder is not there: the name of a machine that may keep the "
        "cluster, and where it answers (`up --command-port`); once for each"
    )
    added.add_argument("--keeper", action="append", default=[], metavar="NAME=HOST:PORT", help=help_)


def add_flag(parser: argparse.ArgumentParser) -> None:
    help_ = f"the cluster of this context, in place of --output-dir (default: as {CLUSTER_VARIABLE} says)"
    parser.add_argument("--cluster", dest="context", metavar="NAME", help=help_)


def settle(args: argparse.Namespace) -> None:
    """Sets `output_dir` to the folder that the command line means, or `far` to the context whose machines are to be
    called. BadUsage."""
    _NAMED.set(None)
    args.far = None
    args.has_output_dir = args.output_dir is not None
    if args.output_dir is None and "context" in args:
        if named := args.context or os.environ.get(CLUSTER_VARIABLE):
            found = _known(named, "" if args.context else f" ({CLUSTER_VARIABLE} names it)")
            _NAMED.set(found)
            args.context = named
            if found.keepers:
                _check_command(args.command, named)
                args.far = found
            else:
                args.output_dir = str(found.output_dir)
    elif "context" in args and args.context:
        raise BadUsage(f"--cluster {args.context} and --output-dir {args.output_dir}: give one of them")
    if args.output_dir is None:
        args.output_dir = args.usual_output_dir


def operator_of(output_dir: Path) -> Path | None:
    """The credential of the context that the command line names, or of one with this folder."""
    if (named := _NAMED.get()) is not None and _has(named, output_dir):
        return named.operator
    for path in _files():
        with suppress(ValueError, OSError):
            found = Context.read(path)
            if found.operator is not None and _has(found, output_dir):
                return found.operator
    return None


def operators() -> list[Path]:
    """The credentials of all contexts that can be read."""
    found = []
    for path in _files():
        with suppress(ValueError, OSError):
            found.append(Context.read(path).operator)
    return [each for each in found if each is not None]


def _has(context: Context, output_dir: Path) -> bool:
    return context.output_dir is not None and context.output_dir.resolve() == output_dir.resolve()


def _check_command(command: str, named: str) -> None:
    """BadUsage: it is not one that the cluster's machines run for others."""
    if command not in LOOKING | CHANGING:
        raise BadUsage(
            f"context {named} has no folder of jobs, and {command} needs one: run it on a machine of the cluster"
        )


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
    keepers = _keepers(args.keeper)
    if keepers and args.has_output_dir:
        raise BadUsage("--output-dir and --keeper: give the folder, or the machines that have it")
    if keepers and args.operator is None:
        raise BadUsage("--keeper needs --operator too: a call from afar needs a credential")
    if not (keepers or output_dir.is_dir()):
        raise BadUsage(
            f"--output-dir {output_dir}: there is no such folder; give that of the cluster's jobs, or --keeper where "
            "this machine does not have it"
        )
    if args.operator is not None:
        _check(args.operator)
    was_there = path.exists()
    new = Context(None if keepers else output_dir, args.operator and args.operator.resolve(), keepers)
    try:
        new.write(path)
    except OSError as error:
        raise BadUsage(f"context {args.name} cannot be written: {error}") from error
    where = f"that {first_few(keepers, most=4)} may keep" if keepers else f"of {output_dir}"
    told = f"--cluster {args.name} stands for the cluster {where}{', in place of another' if was_there else ''}"
    print(answer_text(_row(path), told, form))
    return 0


def _keepers(words: Sequence[str]) -> dict[str, str]:
    """BadUsage."""
    found: dict[str, str] = {}
    for word in words:
        name, _, address = word.partition("=")
        if name in found:
            raise BadUsage(f"--keeper {name} is given twice")
        try:
            _check_keeper(name, address)
        except ValueError as error:
            raise BadUsage(f"--keeper {word}: {error}") from error
        found[name] = address
    return found


def _check_keeper(name: str, address: str) -> None:
    """ValueError."""
    try:
        Identity("any", Party.NODE, name)
    except BadIdentity as error:
        raise ValueError(f"machine {name!r}: {error}") from error
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    if not (_HOST.fullmatch(host) and is_port):
        raise ValueError(f"{name} answers at {address!r}, which is no HOST:PORT, as in a=10.0.0.7:7401")


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
        return {"context": path.stem, "output_dir": f"cannot be used: {error}", "keepers": [], "operator": None}
    folders = {"output_dir": found.output_dir, "operator": found.operator}
    row = {"context": path.stem, "keepers": [f"{name}={address}" for name, address in found.keepers.items()]}
    return row | {name: str(folder) if folder else None for name, folder in folders.items()}
