"""How a process takes a new program and keeps what it has: its children, its locks, its listening sockets.

An agent has started processes that the kernel kills with it. To take a newer release it must not end. So it executes
the new program in its place: pid, children and timers stay, and descriptors that are named here. Threads, other
descriptors and everything in memory are gone. What the new program needs of that is JSON in a file without a name,
whose descriptor is in the environment.

    old program: take_program(words, state, keeps=[...])     new program: state = handed_over(parse)

From the call to `ready`, signals wait that would end a process without handlers.

Invariants:
- Children live on, and die with the process as before. [test_handover: the_services_live_on]
  [test_handover: die_with_it_as_before]
- A signal of that time is carried out afterwards. [test_handover: a_stop_meanwhile]
- A program that does not start is not taken. [test_handover: that_does_not_start]
- A state of another form is refused. [test_handover: left_of_another_form]
"""

from __future__ import annotations

import asyncio
import json
import os
import reprlib
import shlex
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tidegate.json_text import parse_json, typed

FORM = 1
"""Names the shape of the state. A program takes the place of one whose form it knows."""
SIGNAL = signal.SIGUSR2
"""Asks an agent to take its program anew."""
VARIABLE = "TIDEGATE_HANDED_OVER"
ASKS_FORM = ("reload", "--form")
"""The words of `tidegate` that print the form which it reads."""
_ANSWER_S = 30.0
T = TypeVar("T")
_WAITING = frozenset({signal.SIGTERM, signal.SIGINT, SIGNAL})


class NoHandover(RuntimeError):
    """This program cannot take the place of the one before."""


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with these changes. None: without the variable."""
    found = {name: value for name, value in os.environ.items() if name not in changes}
    return found | {name: value for name, value in changes.items() if value is not None}


async def program_fault(program: Sequence[str], env: Mapping[str, str] = os.environ) -> str:
    """Why a program cannot take the place of one of this form. Empty: it can. It is asked: that it starts is half of
    the answer."""
    try:
        asked = await asyncio.create_subprocess_exec(
            *program,
            *ASKS_FORM,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        return f"the program {program[0]} cannot be started: {error.strerror}"
    try:
        said, failed = await asyncio.wait_for(asked.communicate(), _ANSWER_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(asked.pid, signal.SIGKILL)  # a script may wait for another program, which has its output
        await asked.wait()
        return f"the program {shlex.join(program)} has not begun within {_ANSWER_S:g} s"
    if asked.returncode:
        lines = failed.decode(errors="replace").strip().splitlines() or ["no message"]
        return f"the program {shlex.join(program)} does not start, or is of an earlier release: {lines[-1]}"
    form = said.decode(errors="replace").strip()
    if form != str(FORM):
        return (
            f"the program {shlex.join(program)} reads states of form {reprlib.repr(form)}, and this one leaves {FORM}"
        )
    return ""


async def is_last_call(stopping: asyncio.Event) -> bool:
    """Whether nobody has asked this process to stop. From then on signals wait for the next program, but for one that
    another thread takes in the last moment, which is lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITING)
    for _ in range(2):  # what has come is seen in one turn of the loop, and its handler runs in the next
        await asyncio.sleep(0)
    if stopping.is_set():
        ready()
    return not stopping.is_set()


def take_program(
    words: Sequence[str], state: Mapping[str, Any], *, keeps: Iterable[int] = (), env: Mapping[str, str] = os.environ
) -> NoReturn:
    """Becomes the program `words`. `keeps`: descriptors that stay, under their numbers. Nothing of this program is
    closed or ended in order: do that first. Call it on the main thread. OSError."""
    fd = os.memfd_create("tidegate-handover", 0)
    os.write(fd, json.dumps({"form": FORM, **state}).encode())
    kept = [each for each in keeps if each >= 0]
    for each in kept:
        os.set_inheritable(each, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITING)
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execve(words[0], list(words), {**env, VARIABLE: f"{fd}:{number_of(os.getpid()) + 1}"})
    finally:  # it could not
        for each in kept:
            os.set_inheritable(each, False)
        os.close(fd)
        ready()


def is_handed_over() -> bool:
    """Whether this program takes the place of another one."""
    return VARIABLE in os.environ


def handed_over(parse: Callable[[dict[str, Any]], T]) -> T | None:
    """What the program before has left for this one, as `parse` makes it. None: there was none. Whoever calls it has
    it. NoHandover."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    fd = int(text.partition(":")[0])
    os.set_inheritable(fd, False)
    try:
        state = typed(dict, parse_json(os.pread(fd, os.fstat(fd).st_size, 0)), "what was left")
        if (form := state.pop("form")) != FORM:
            raise NoHandover(f"the program before has left a state of form {form}, and this one knows {FORM}")
        return parse(state)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise NoHandover(f"what the program before has left cannot be read: {error!r}") from error
    finally:
        os.close(fd)


def kept(fd: int) -> int:
    """A descriptor that was handed over. The children of this process do not get it."""
    os.set_inheritable(fd, False)
    return fd


def number_of(pid: int) -> int:
    """How many programs a process of this user had before its present one. FileNotFoundError, ProcessLookupError: there
    is no such process."""
    for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, text = variable.partition(b"=")
        if name == VARIABLE.encode():
            return int(text.partition(b":")[2])
    return 0


def program_of(pid: int) -> list[str]:
    """The words of `tidegate` without a command, of a `tidegate agent`. NoHandover: the process is none.
    FileNotFoundError, ProcessLookupError: there is no such process."""
    words = _words_of(pid)
    if "services.node" in words:
        raise NoHandover(f"process {pid} is the agent of a cluster: leave --agent out")
    if not is_agent(words):
        raise NoHandover(f"process {pid} is no agent")
    program = words[: words.index("agent")]
    # A script's first word is the interpreter that its first line names.
    return program[1:] if len(program) > 1 and os.access(program[1], os.X_OK) else program


def takes_programs(pid: int) -> bool:
    """Whether a process is an agent that has a handler for `SIGNAL`, which would end another one. FileNotFoundError,
    ProcessLookupError: there is no such process."""
    masks = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    caught, blocked = (int(masks[name], 16) for name in ("SigCgt", "SigBlk"))
    return bool(caught & ~blocked & 1 << (SIGNAL - 1)) and is_agent(_words_of(pid))


def _words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def is_agent(words: Sequence[str]) -> bool:
    return "services.node" in words or ("agent" in words and any(word.startswith("--listen") for word in words))


def hold() -> None:
    """`SIGNAL` waits until `ready`, for a program that has no handler yet. Start no process between the two."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def ready() -> None:
    """Signals come again: their handlers are there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITING)
