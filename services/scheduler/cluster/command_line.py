"""Runs the commands of people on machines without the jobs' storage: here, as if they were typed here.

Each command is a process of its own, with this machine's operator's credential: what it may do, the schema and
`tidegate.cluster.far_commands` say by its first word. Its output goes back as it comes. The log says who called.

Invariants:
- A caller who may only look changes nothing. [test_command_line: who_may_only_look]
- A command is about the jobs of this cluster, whatever its words are. [test_command_line: of_another_folder]
- When the caller leaves, or this process ends, the command ends. [test_command_line: ends_when_its_caller_leaves]
- There are at most `MOST_COMMANDS` at a time. [test_command_line: more_than_there_may_be]
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import tempfile
import termios
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from tidegate.adapters.grpc_server import Service, caller
from tidegate.certs.identity import BadIdentity, Identity, Party
from tidegate.cluster.far_commands import CHANGING, LOOKING, SUBMIT, decode_folders
from tidegate.cluster.shipping import unpacked
from tidegate.job import CALLED_VARIABLE
from tidegate.runtime import dies_with_parent
from tidegate.v1 import command_line_pb2, command_line_pb2_grpc

MOST_COMMANDS = 32
"""A command has 60 MB."""
MOST_WORDS_BYTES = 100_000
_PIECE_BYTES = 64 * 1024
_PIECES_AHEAD = 16
_END_S = 2.0


class TooManyCommands(RuntimeError):
    """Others have to end first."""


class CommandLineServicer(command_line_pb2_grpc.CommandLineServicer):
    """Its commands are about the jobs whose folders are in `output_dir`."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._num_running = 0
        self._log = structlog.get_logger("command-line")

    async def RunLookingCommand(
        self, request: command_line_pb2.RunLookingCommandRequest, context: Any
    ) -> AsyncIterator[command_line_pb2.RunLookingCommandResponse]:
        words = _checked(request.command, LOOKING)
        async with contextlib.aclosing(self._run(request.command, words)) as pieces:
            async for output in pieces:
                yield command_line_pb2.RunLookingCommandResponse(output=output)

    async def RunCommand(
        self, request: command_line_pb2.RunCommandRequest, context: Any
    ) -> AsyncIterator[command_line_pb2.RunCommandResponse]:
        words = _checked(request.command, LOOKING | CHANGING)
        with contextlib.ExitStack() as closing:
            if words[0] == SUBMIT:
                words += await asyncio.to_thread(self._submission, request.submission, closing)
            async with contextlib.aclosing(self._run(request.command, words)) as pieces:
                async for output in pieces:
                    yield command_line_pb2.RunCommandResponse(output=output)

    def _submission(self, wanted: command_line_pb2.FarSubmission, closing: contextlib.ExitStack) -> list[str]:
        """The words for a job whose files have travelled here. ValueError, OSError."""
        config = unpacked(wanted.config, decode_folders(wanted.folders), self._output_dir)
        # JSON is YAML, but for what a config's reader makes of its bytes: it is one line.
        file = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-submit-"))) / "job.yaml"
        file.write_text(json.dumps(json.loads(config)))
        return [str(file), f"--typed={wanted.typed}"]

    async def _run(
        self, command: command_line_pb2.CommandWords, words: Sequence[str]
    ) -> AsyncGenerator[command_line_pb2.CommandOutput, None]:
        if self._num_running >= MOST_COMMANDS:
            raise TooManyCommands(f"{MOST_COMMANDS} commands of other machines run here: end some, or try again later")
        self._num_running += 1
        try:
            self._log.info("command", caller=str(caller()), words=list(command.words))
            words = [*words, "--output-dir", str(self._output_dir)]
            async with contextlib.aclosing(_outputs(command, words)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._num_running -= 1


def _checked(command: command_line_pb2.CommandWords, allowed: Collection[str]) -> list[str]:
    """Its words. ValueError: it may not be run here."""
    words = list(command.words)
    if not words or words[0] not in allowed:
        named = repr(words[0]) if words else "nothing"
        raise ValueError(f"{named} cannot be asked of a cluster from afar so: {', '.join(sorted(allowed))} can")
    if "--" in words:
        raise ValueError("a word -- hides flags, and may not be among the words of a command from afar")
    if sum(len(word.encode()) for word in words) > MOST_WORDS_BYTES:
        raise ValueError(f"the words of a command have more than {MOST_WORDS_BYTES:,} bytes")
    with contextlib.suppress(BadIdentity):
        Identity(command.cluster, Party.OPERATOR, "me")
        return words
    raise ValueError(f"{command.cluster!r} is no name of a context")


async def _outputs(
    command: command_line_pb2.CommandWords, words: Sequence[str]
) -> AsyncGenerator[command_line_pb2.CommandOutput, None]:
    """What the command prints, as it comes, and its exit code."""
    pieces: asyncio.Queue[command_line_pb2.CommandOutput | None] = asyncio.Queue(_PIECES_AHEAD)

    async def take(stream: asyncio.StreamReader, name: str) -> None:
        # A terminal whose other side is closed is an error to read.
        with contextlib.suppress(OSError):
            while piece := await stream.read(_PIECE_BYTES):
                output = command_line_pb2.CommandOutput()
                setattr(output, name, piece)
                await pieces.put(output)
        await pieces.put(None)

    async with _started(command, words) as (process, out):
        assert process.stderr is not None
        takers = [asyncio.create_task(take(*each)) for each in ((out, "out"), (process.stderr, "err"))]
        try:
            num_open = len(takers)
            while num_open:
                if (piece := await pieces.get()) is None:
                    num_open -= 1
                else:
                    yield piece
            yield command_line_pb2.CommandOutput(exit_code=await process.wait())
        finally:
            for taker in takers:
                taker.cancel()
            await asyncio.gather(*takers, return_exceptions=True)


@contextlib.asynccontextmanager
async def _started(
    command: command_line_pb2.CommandWords, words: Sequence[str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """The process, and what it prints on stdout, which is a terminal where the person has one. It has ended at the end
    of the block."""
    tie = (sys.executable, "-I", "-S", dies_with_parent.__file__, str(os.getpid()))
    start = partial(
        asyncio.create_subprocess_exec,
        *(*tie, sys.executable, "-m", "cli", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, CALLED_VARIABLE: command.cluster, "TERM": "xterm"},
        start_new_session=True,
    )
    with contextlib.ExitStack() as closing:
        if command.columns and command.rows:
            out, own = _terminal(command.columns, command.rows)
            reader, transport = await _reader(out)
            closing.callback(transport.close)
            try:
                process = await start(stdout=own)
            finally:
                os.close(own)
        else:
            process = await start(stdout=asyncio.subprocess.PIPE)
            assert process.stdout is not None
            reader = process.stdout
        try:
            yield process, reader
        finally:
            await asyncio.shield(_ended(process))


def _terminal(columns: int, rows: int) -> tuple[int, int]:
    """The sides of a new one: for us, and for the command."""
    ours, its = pty.openpty()
    most = 2**16 - 1
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", min(rows, most), min(columns, most), 0, 0))
    # The person's own terminal makes a return of each new line.
    attributes = termios.tcgetattr(its)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(its, termios.TCSANOW, attributes)
    return ours, its


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    return reader, transport


async def _ended(process: asyncio.subprocess.Process) -> None:
    for how in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(how)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()


def command_line(output_dir: Path) -> Service:
    servicer = CommandLineServicer(output_dir)
    return Service(
        command_line_pb2.DESCRIPTOR.services_by_name["CommandLine"],
        partial(command_line_pb2_grpc.add_CommandLineServicer_to_server, servicer),
        {TooManyCommands: grpc.StatusCode.RESOURCE_EXHAUSTED},
    )
