"""Runs the commands of people on machines without the jobs' storage: here, as if they were typed here.

Each command is a process of its own, with this machine's operator's credential: what it may do, the schema and
`tidegate.cluster.far_commands` say by its first word. Its output goes back as it comes. The log says who called. The
scheduler's own process touches no file of a command: its storage may hang.

Invariants:
- A caller who may only look changes nothing. [test_command_line: who_may_only_look]
- A command is about the jobs of this cluster, whatever its words are. [test_command_line: of_another_folder]
- When the caller leaves, or this process ends, the command ends. [test_command_line: ends_when_its_caller_leaves]
- What a command printed arrives before its exit code, however slowly it is read. [test_command_line: a_slow_reader]
- There are at most `MOST_COMMANDS` at a time, and `MOST_OF_A_CALLER` of one caller.
  [test_command_line: more_than_there_may_be]
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from tidegate.adapters.grpc_server import Service, caller
from tidegate.certs.identity import BadIdentity, Identity, Party
from tidegate.cluster.far_commands import CHANGING, LOOKING, SUBMIT
from tidegate.job import CALLED_VARIABLE
from tidegate.runtime import dies_with_parent
from tidegate.sizes import size_text
from tidegate.v1 import command_line_pb2, command_line_pb2_grpc

MOST_COMMANDS, MOST_OF_A_CALLER = 32, 8
"""A command has 60 MB."""
MOST_WORDS_BYTES = 100_000
MOST_SUBMISSION_BYTES = 96 * 2**20
"""A job takes a few folders of 16 MiB along."""
_PIECE_BYTES = 64 * 1024
_PIECES_AHEAD = 16
_END_S = 2.0


class TooManyCommands(RuntimeError):
    """Others have to end first."""


class CommandLineServicer(command_line_pb2_grpc.CommandLineServicer):
    """Its commands are about the jobs whose folders are in `output_dir`."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._running: Counter[Identity | None] = Counter()
        """By caller."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()
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
        words, read, told = _checked(request.command, LOOKING | CHANGING), b"", {}
        if words[0] == SUBMIT:
            if (size := request.submission.ByteSize()) > MOST_SUBMISSION_BYTES:
                most = size_text(MOST_SUBMISSION_BYTES)
                raise ValueError(f"the job and its files have {size_text(size)}, and at most {most} travel")
            words += ["--from-afar", "-"]
            told = {"job": request.submission.job}
            read = request.submission.SerializeToString()
        async with contextlib.aclosing(self._run(request.command, words, read, **told)) as pieces:
            async for output in pieces:
                yield command_line_pb2.RunCommandResponse(output=output)

    async def _run(
        self, command: command_line_pb2.CommandWords, words: Sequence[str], read: bytes = b"", **told: str
    ) -> AsyncGenerator[command_line_pb2.CommandOutput, None]:
        """`read`: what the command reads on stdin. `told`: what the log has of it, besides its words."""
        self._log.info("command", caller=str(caller()), words=list(command.words), **told)
        words = [*words, "--output-dir", str(self._output_dir)]
        with self._place():
            async with contextlib.aclosing(_outputs(command, words, read)) as outputs:
                async for output in outputs:
                    yield output

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """TooManyCommands."""
        who = caller()
        if self._running.total() >= MOST_COMMANDS or self._running[who] >= MOST_OF_A_CALLER:
            raise TooManyCommands(
                f"{self._running[who]} commands of {who} run here, and {self._running.total()} in all; at most "
                f"{MOST_OF_A_CALLER} and {MOST_COMMANDS} may: end some, or try again later"
            )
        self._running[who] += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._running[who] -= 1
            if not self._running[who]:
                del self._running[who]
            if not self._running:
                self._is_idle.set()

    def service(self) -> Service:
        return Service(
            command_line_pb2.DESCRIPTOR.services_by_name["CommandLine"],
            partial(command_line_pb2_grpc.add_CommandLineServicer_to_server, self),
            {TooManyCommands: grpc.StatusCode.RESOURCE_EXHAUSTED},
            for_people=True,
        )

    async def aclose(self) -> None:
        """Until no command is left. Their callers have to be gone: a server that stops lets them go."""
        await self._is_idle.wait()


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
    command: command_line_pb2.CommandWords, words: Sequence[str], read: bytes
) -> AsyncGenerator[command_line_pb2.CommandOutput, None]:
    """What the command prints, as it comes, and its exit code."""
    pieces: asyncio.Queue[command_line_pb2.CommandOutput | None] = asyncio.Queue(_PIECES_AHEAD)
    has_left = False

    async def take(stream: asyncio.StreamReader, name: str) -> None:
        # Also when nobody reads it any more: a process that cannot write does not end.
        while piece := await stream.read(_PIECE_BYTES):
            if not has_left:
                output = command_line_pb2.CommandOutput()
                setattr(output, name, piece)
                await pieces.put(output)
        if not has_left:
            await pieces.put(None)

    takers: list[asyncio.Task[None]] = []
    try:
        async with _started(command, words, read) as (process, out):
            assert process.stderr is not None
            takers += [asyncio.create_task(take(*each)) for each in ((out, "out"), (process.stderr, "err"))]
            try:
                num_open = len(takers)
                while num_open:
                    if (piece := await pieces.get()) is None:
                        num_open -= 1
                    else:
                        yield piece
                yield command_line_pb2.CommandOutput(exit_code=await process.wait())
            finally:
                has_left = True
                while not pieces.empty():
                    pieces.get_nowait()
    finally:
        if takers:
            await asyncio.wait(takers, timeout=_END_S)
        for taker in takers:
            taker.cancel()
        await asyncio.gather(*takers, return_exceptions=True)


@contextlib.asynccontextmanager
async def _started(
    command: command_line_pb2.CommandWords, words: Sequence[str], read: bytes
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """The process, and what it prints on stdout, which is a terminal where the person has one. It has ended at the end
    of the block."""
    # A file that is gone with this process, whatever becomes of it.
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC)
    os.pwrite(stdin, read, 0)
    tie = (sys.executable, "-I", "-S", dies_with_parent.__file__, str(os.getpid()))
    start = partial(
        asyncio.create_subprocess_exec,
        *(*tie, sys.executable, "-m", "cli", *words),
        stdin=stdin,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, CALLED_VARIABLE: command.cluster, "TERM": "xterm"},
        start_new_session=True,
    )
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, stdin)
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


class _Terminal(asyncio.StreamReaderProtocol):
    """A terminal that its last process has left is at its end: the kernel calls that an error."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None if isinstance(exc, OSError) and exc.errno == errno.EIO else exc)


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: _Terminal(reader), os.fdopen(fd, "rb", 0))
    return reader, transport


async def _ended(process: asyncio.subprocess.Process) -> None:
    """In order, or else with all that it has started."""
    for end, how in ((os.kill, signal.SIGINT), (os.killpg, signal.SIGKILL)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            end(process.pid, how)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
