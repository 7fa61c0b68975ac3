"""A command whose cluster is called at its machines: the one that keeps the cluster runs it, and this prints what that
one prints.

Invariants:
- The machine that answers first, of those that may keep the cluster, is called. [test_afar: whoever_keeps_it]
- What is printed and the exit code are those of the command there. [test_afar: as_if_it_were_typed_there]
- A job is submitted with the small files of this machine that its config names. [test_afar: travels_with_its_files]
- What waits or watches goes on with the next keeper. [test_afar: goes_on_with_the_next_keeper]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.cluster_access import NoCluster
from cli.cluster_queue import ANSWER_S, NEXT_KEEPER_S
from cli.contexts import Context
from cli.usage import BAD_USAGE, BadUsage
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.far_commands import KEEPALIVE_S, LOOKING, SUBMIT, encode_folders
from tidegate.launcher.control import CALL_TIMEOUT_S, FOLLOW_TIMEOUT_S
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.short_lists import first_few
from tidegate.v1 import command_line_pb2, command_line_pb2_grpc

if TYPE_CHECKING:
    from tidegate.cluster.shipping import Files

AT_ONCE_S = 5.0
"""For the keeper's scheduler, which may be starting again."""
_FLAG = "--cluster"
_LOOK_AGAIN_S = 0.2
_SERVICE = command_line_pb2.DESCRIPTOR.services_by_name["CommandLine"].full_name
_MOST_KEPT = 2**16


@dataclass
class _Said:
    """What a command has printed: whether anything on stdout, and the last of stderr. `job`: that it submits."""

    job: str = ""
    out: bool = False
    err: bytes = b""


def run(args: argparse.Namespace, words: Sequence[str], context: Context) -> int:
    """`words`: those that were typed. The exit code is the command's. NoCluster, BadUsage, ConfigError, PeerRefused,
    PeerUnavailable."""
    # What gRPC writes of a connection that fails is told in words of ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    tls = _credential(args, context)
    request: Any
    command = command_line_pb2.CommandWords(words=_without_context(words), cluster=args.context)
    if "--" in command.words:
        raise BadUsage("a word -- hides flags: leave it out")
    if sys.stdout is not None and sys.stdout.isatty():  # None: it is closed
        command.columns, command.rows = os.get_terminal_size(sys.stdout.fileno())
    if args.command in LOOKING:
        request = command_line_pb2.RunLookingCommandRequest(command=command)
    else:
        request = command_line_pb2.RunCommandRequest(command=command)
    if args.command == SUBMIT:
        _submit(args, request)
    said = _Said(job=request.submission.job if args.command == SUBMIT else "")
    code = asyncio.run(_run(args, request, context, tls, said))
    if code == BAD_USAGE and args.command == SUBMIT and (mine := _paths_here(request.submission.config, said.err)):
        print(
            f"tidegate: {first_few(mine)}: on this machine, and not where the job reads it; copy it to the one that "
            "keeps the cluster, and name the path there",
            file=sys.stderr,
        )
    return code


def _credential(args: argparse.Namespace, context: Context) -> Credentials:
    """BadUsage where it is none for this command."""
    assert context.operator is not None
    try:
        tls = Credentials(context.operator)
    except CertsError as error:
        raise BadUsage(f"context {args.context}: {error}") from error
    if tls.identity.party is not Party.OPERATOR and args.command not in LOOKING:
        raise BadUsage(
            f"{args.command} needs an operator's credential: that of context {args.context} is of {tls.identity}"
        )
    return tls


def _paths_here(config: str, told: bytes) -> list[str]:
    """The paths of a config that a command has told of, and that are on this machine."""
    found: list[str] = []

    def is_told(path: str) -> bool:
        # And not as the beginning of another one.
        return re.search(re.escape(path.encode()) + rb"(?![\w/.-])", told) is not None

    def look(value: Any) -> None:
        if isinstance(value, str) and value.startswith("/") and is_told(value) and os.path.exists(value):
            found.append(value)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(each)

    look(json.loads(config))
    return list(dict.fromkeys(found))


def _submit(args: argparse.Namespace, request: command_line_pb2.RunCommandRequest) -> None:
    """Puts the config, with the files that it names, in place of the words that name the config. ConfigError."""
    # Import here: the other commands must not pay for it.
    from tidegate.cluster.placement import own_servers_fault
    from tidegate.cluster.shipping import packed
    from tidegate.config.files import load_sources, sources_of
    from tidegate.config.job_config import ConfigError
    from tidegate.config.reading.origins import with_origins

    sourced = load_sources(sources_of(args.config))
    if (fault := own_servers_fault(sourced.config)) is not None:
        raise ConfigError(with_origins(fault, sourced.layer))
    notes, config = list(sourced.notes), sourced.config
    folders: list[Files] = []
    if not args.no_copies:
        config, folders = packed(config, notes=notes)
    for note in notes:
        print(f"tidegate: {note}", file=sys.stderr)
    typed = ["tidegate", SUBMIT, *args.config, _FLAG, args.context, *(["--no-copies"] if args.no_copies else [])]
    flags = {"--resume": args.resume, "--force": args.force, "--no-copies": args.no_copies, "--follow": args.follow}
    words = [SUBMIT, f"--priority={args.priority}", f"-o{args.form}", *(flag for flag, given in flags.items() if given)]
    request.command.words[:] = words
    request.submission.CopyFrom(
        command_line_pb2.FarSubmission(
            config=config.to_json(), folders=encode_folders(folders), typed=shlex.join(typed), job=config.job
        )
    )


def _without_context(words: Sequence[str]) -> list[str]:
    """The words without `--cluster NAME`, which argparse takes in a short form too."""
    found, rest = [], iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if not (len(flag) > len("--") and _FLAG.startswith(flag)):
            found.append(word)
        elif not equals:
            next(rest, None)
    return found


async def _run(args: argparse.Namespace, request: Any, context: Context, tls: Credentials, said: _Said) -> int:
    patience_s = NEXT_KEEPER_S if len(context.keepers) > 1 else ANSWER_S
    channels = Channels(default_timeout_s=CALL_TIMEOUT_S, tls=tls, keepalive_s=KEEPALIVE_S)
    peers = {
        name: channels.connect(address, Identity(tls.identity.cluster, Party.NODE, name))
        for name, address in context.keepers.items()
    }
    try:
        within_s = patience_s if args.command == "wait" else AT_ONCE_S
        while True:
            stub = command_line_pb2_grpc.CommandLineStub(await _keeper(peers, within_s))
            is_looking = isinstance(request, command_line_pb2.RunLookingCommandRequest)
            call: Any = stub.RunLookingCommand if is_looking else stub.RunCommand
            with suppress(PeerUnavailable):
                if (code := await _print(call(request, timeout=FOLLOW_TIMEOUT_S), said)) is not None:
                    return code
            request, within_s = _again(args, request, said), patience_s
            print("tidegate: the keeper of the cluster has gone; asking for the next one", file=sys.stderr)
    except asyncio.CancelledError:
        if args.command == SUBMIT and args.follow and said.out:
            again = f"tidegate wait {said.job} {_FLAG} {args.context}"
            print(f"tidegate: job {said.job} goes on; {again} waits for it again", file=sys.stderr)
        raise
    finally:
        await channels.close()


def _again(args: argparse.Namespace, request: Any, said: _Said) -> Any:
    """What to ask the next keeper of a command that the earlier one did not end. NoCluster: nothing that is right."""
    is_followed = args.command == SUBMIT and args.follow
    if args.command == "wait" or getattr(args, "watch", False) or (args.command == "top" and not args.once):
        return request
    if is_followed and isinstance(request, command_line_pb2.RunLookingCommandRequest):
        return request
    gone = "the machine that keeps the cluster has gone, and the command with it"
    if args.command in LOOKING:
        raise NoCluster(f"{gone}: type it again")
    if args.command != SUBMIT or not said.out:
        raise NoCluster(f"{gone}: see what became of it (tidegate get jobs {_FLAG} {args.context})")
    if not is_followed:
        raise NoCluster(f"{gone}: job {said.job} is queued")
    words = command_line_pb2.CommandWords(words=["wait", said.job, f"-o{args.form}"], cluster=args.context)
    return command_line_pb2.RunLookingCommandRequest(command=words)


async def _keeper(peers: Mapping[str, Any], within_s: float) -> Any:
    """The channel to the machine that answers within this time. NoCluster: none does."""
    deadline_s = time.monotonic() + within_s
    while True:
        keeper, silent = await _first(peers)
        if keeper is not None:
            return keeper
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    told = "; ".join(f"{name}: {silent[name]}" for name in peers)
    later = "; one that stands by begins 40 s after a loss" if len(peers) > 1 else ""
    raise NoCluster(f"no machine answers as the keeper of this cluster: {told}{later}")


async def _first(peers: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The channel to the first machine that answers, if one does, and why others do not."""
    waiting = {asyncio.create_task(_answers(channel), name=f"ask {name}"): name for name, channel in peers.items()}
    silent: dict[str, str] = {}
    try:
        while waiting:
            for task in (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]:
                name = waiting.pop(task)
                try:
                    task.result()
                except PeerUnavailable as error:
                    silent[name] = error.reason
                else:
                    return peers[name], silent
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return None, silent


async def _answers(channel: Any) -> None:
    """PeerUnavailable: nobody does there, in a while or at once."""
    wanted = health_pb2.HealthCheckRequest(service=_SERVICE)
    try:
        await health_pb2_grpc.HealthStub(channel).Check(wanted, timeout=CALL_TIMEOUT_S)
    except PeerRefused as refused:
        if refused.status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            return  # the command is refused as well, with what to do
        told = "it answers there, but runs no commands: give the port of its up --command-port"
        raise PeerUnavailable(str(refused), reason=told) from refused


async def _print(rows: AsyncIterator[Any], said: _Said) -> int | None:
    """The exit code, after all output. None: the keeper has ended before. PeerUnavailable."""
    async for row in rows:
        match row.output.WhichOneof("body"):
            case "out":
                said.out = True
                sys.stdout.buffer.write(row.output.out)
                sys.stdout.buffer.flush()
            case "err":
                said.err = (said.err + row.output.err)[-_MOST_KEPT:]
                sys.stderr.buffer.write(row.output.err)
                sys.stderr.buffer.flush()
            case "exit_code":
                code: int = row.output.exit_code
                return code if code >= 0 else 128 - code
    return None
