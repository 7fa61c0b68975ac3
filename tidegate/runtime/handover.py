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
- No signal of that time is lost, and none ends the process without an orderly end. [test_handover: a_stop_meanwhile]
- A state of another form is refused. [test_handover: of_another_form]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tidegate.json_text import parse_json, typed

FORM = 1
"""Of the state. A program takes the place of one whose form it knows."""
SIGNAL = signal.SIGUSR2
"""Asks an agent to take its program anew."""
VARIABLE = "TIDEGATE_HANDED_OVER"
T = TypeVar("T")
_WAITING = frozenset({signal.SIGTERM, signal.SIGINT, SIGNAL})


class NoHandover(RuntimeError):
    """This program cannot take the place of the one before."""


def check_program(words: Sequence[str]) -> None:
    """OSError where there is no such program."""
    if not os.access(words[0], os.X_OK):
        raise FileNotFoundError(f"there is no program {words[0]}, whose release is to be taken")


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


def takes_programs(pid: int) -> bool:
    """Whether a process has a handler for `SIGNAL`, which would end another one. FileNotFoundError,
    ProcessLookupError: there is no such process."""
    masks = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    caught, blocked = (int(masks[name], 16) for name in ("SigCgt", "SigBlk"))
    return bool(caught & ~blocked & 1 << (SIGNAL - 1))


def hold() -> None:
    """`SIGNAL` waits until `ready`, for a program that has no handler yet. Start no process between the two."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def ready() -> None:
    """Signals come again: their handlers are there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITING)
