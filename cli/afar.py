"""A command whose cluster is called at its machines: the one that keeps the cluster runs it, and this prints what that
one prints.

Invariants:
- The machine that answers first, of those that may keep the cluster, is called. [test_afar: whoever_keeps_it]
- What is printed and the exit code are those of the command there. [test_afar: as_if_it_were_typed_there]
- A job is submitted with the small files of this machine that its config names. [test_afar: travels_with_its_files]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.cluster_access import NoCluster
from cli.contexts import Context
from cli.usage import BAD_USAGE, BadUsage
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.far_commands import LOOKING, SUBMIT, encode_folders
from tidegate.launcher.control import CALL_TIMEOUT_S, FOLLOW_TIMEOUT_S
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.v1 import command_line_pb2, command_line_pb2_grpc

if TYPE_CHECKING:
    from tidegate.cluster.shipping import Files

_FLAG = "--cluster"


def run(args: argparse.Namespace, words: Sequence[str], context: Context) -> int:
    """`words`: those that were typed. The exit code is the command's. NoCluster, BadUsage, ConfigError, PeerRefused,
    PeerUnavailable."""
    request: Any
    command = command_line_pb2.CommandWords(words=_without_context(words), cluster=args.context)
    if sys.stdout.isatty():
        command.columns, command.rows = os.get_terminal_size(sys.stdout.fileno())
    if args.command in LOOKING:
        request = command_line_pb2.RunLookingCommandRequest(command=command)
    else:
        request = command_line_pb2.RunCommandRequest(command=command)
    if args.command == SUBMIT:
        _submit(args, request)
    code = asyncio.run(_run(request, context))
    if code == BAD_USAGE and args.command == SUBMIT:
        print("tidegate: the job was checked there: but for copied files, paths are that machine's", file=sys.stderr)
    return code


def _submit(args: argparse.Namespace, request: command_line_pb2.RunCommandRequest) -> None:
    """Puts the config, with the files that it names, in place of the words that name the config. ConfigError."""
    # Import here: the other commands must not pay for it.
    from tidegate.cluster.shipping import packed
    from tidegate.config.files import load_sources, sources_of

    sourced = load_sources(sources_of(args.config))
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
            config=config.to_json(), folders=encode_folders(folders), typed=shlex.join(typed)
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


async def _run(request: Any, context: Context) -> int:
    assert context.operator is not None
    try:
        tls = Credentials(context.operator)
    except CertsError as error:
        raise BadUsage(f"the context's operator: {error}") from error
    channels = Channels(default_timeout_s=CALL_TIMEOUT_S, tls=tls)
    try:
        peers = {
            name: channels.connect(address, Identity(tls.identity.cluster, Party.NODE, name))
            for name, address in context.keepers.items()
        }
        stub = command_line_pb2_grpc.CommandLineStub(await _keeper(peers))
        is_looking = isinstance(request, command_line_pb2.RunLookingCommandRequest)
        call: Any = stub.RunLookingCommand if is_looking else stub.RunCommand
        return await _print(call(request, timeout=FOLLOW_TIMEOUT_S))
    except PeerRefused as refused:
        if refused.status != "UNIMPLEMENTED":
            raise
        raise NoCluster("the machine that keeps the cluster has another release, which runs no commands") from refused
    finally:
        await channels.close()


async def _keeper(peers: Mapping[str, Any]) -> Any:
    """The channel to the machine that answers. NoCluster: none does."""
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
                    return peers[name]
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    told = "; ".join(f"{name}: {silent[name]}" for name in peers)
    raise NoCluster(f"no machine answers as the keeper of this cluster: {told}. One that stands by takes over in 40 s")


async def _answers(channel: Any) -> None:
    """PeerUnavailable: nobody does there, in a while or at once."""
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)


async def _print(rows: AsyncIterator[Any]) -> int:
    """The exit code, after all output. PeerUnavailable: the keeper has left before that."""
    async for row in rows:
        match row.output.WhichOneof("body"):
            case "out":
                sys.stdout.buffer.write(row.output.out)
                sys.stdout.buffer.flush()
            case "err":
                sys.stderr.buffer.write(row.output.err)
                sys.stderr.buffer.flush()
            case "exit_code":
                code: int = row.output.exit_code
                return code if code >= 0 else 128 - code
    raise NoCluster("the machine that keeps the cluster has ended the command: run it again")
