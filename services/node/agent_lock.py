"""The lock of a cluster's folder, and the turn to keep the cluster: what an agent has before it begins.

A program that takes the agent's place (`tidegate.runtime.handover`) has both from the one before. So it waits for no
turn, and nobody gets in between.

Invariants:
- Nobody else gets the lock while a program takes the place of another. [test_reload: nobody_gets_in_between]
- A term goes on under the new program. [test_reload: keeps_its_turn]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from services.node.handed import ClusterLeft, Left
from services.node.keeping import LOOK_S, Beats, claimed
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.keepers import KEEPS, Keepers, Term
from tidegate.launcher.lock import RECORD_BYTES, held, machine_number
from tidegate.runtime import handover
from tidegate.runtime.embedded import ServerFailed
from tidegate.runtime.next_program import NO_PROGRAM, NextProgram
from tidegate.runtime.service import stop_signal

GIVE_WAY_S = 3 * LOOK_S
"""A unit starts what has failed again at once. Others look for their turn first."""


class AgentRuns(RuntimeError):
    """Another agent has the folder."""


class AgentLock:
    """The folder's lock, which this process has over all its programs. `left`: by the one before."""

    def __init__(self, root: Path, fd: int, left: Left | None, next_program: NextProgram) -> None:
        self.left = left
        self.next_program = next_program
        self._root = root
        self.number = handover.number_of(os.getpid())
        """How many programs this process had before."""
        self._fd = fd
        self.note(keeps=bool(left and left.cluster))

    def note(self, *, keeps: bool) -> None:
        """`keeps`: this agent keeps the cluster, and does not only wait for that."""
        record = {"pid": os.getpid(), "machine": machine_number(), KEEPS: int(keeps)}
        os.pwrite(self._fd, json.dumps(record).encode().ljust(RECORD_BYTES), 0)

    def leave(self, cluster: ClusterLeft | None = None) -> NoReturn:
        """To the next program. OSError where there is none."""
        left = Left(self._root, self._fd, cluster)
        self.next_program.take(left.to_json(), keeps=left.descriptors)


@contextlib.contextmanager
def locked(
    folder: ClusterFolder, left: Left | None = None, next_program: NextProgram = NO_PROGRAM
) -> Iterator[AgentLock]:
    """AgentRuns. NoHandover: what was left is of another folder."""
    if left is not None:
        if left.root != folder.root:
            raise handover.NoHandover(f"the program before kept {left.root}, and this one was told of {folder.root}")
        yield AgentLock(folder.root, left.lock_fd, left, next_program)
        return
    folder.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_up = AgentRuns(f"a cluster is up in {folder.root.parent}: end it with tidegate down")
    with held(folder.lock, lambda _: is_up) as fd:
        yield AgentLock(folder.root, fd, None, next_program)


@dataclass(slots=True)
class Turn:
    """`shared`: a file that all machines have to see. `term`: this machine's, as its last beat has it. `has_begun`:
    what runs of the cluster here is known, so that it has ended where this process says that its turn is over."""

    shared: Path
    term: Callable[[], Term | None] = lambda: None
    has_begun: bool = False


@contextlib.contextmanager
def in_turn(folder: ClusterFolder, name: str, address: str, cluster: str, lock: AgentLock) -> Iterator[Turn | None]:
    """Once it is this machine's turn to keep the cluster. None: it was asked to end first."""
    keepers = Keepers(folder.keepers)
    before = lock.left.cluster if lock.left else None
    term = before.term if before else asyncio.run(_claimed(keepers, name, address, cluster, lock))
    if term is None:
        yield None
        return
    if before is None:
        # Until the agent has a handler of its own: the term ends in order.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    beats = Beats(keepers, term, goes_on=before is not None)
    turn = Turn(keepers.path(term.number), lambda: beats.term, has_begun=before is None)
    has_failed = False
    try:
        if before is None:
            _remove(folder.servers)
        yield turn
    except ServerFailed:
        has_failed = True
        raise
    finally:
        if turn.has_begun:
            beats.end()
            if has_failed:
                time.sleep(GIVE_WAY_S)


async def _claimed(keepers: Keepers, name: str, address: str, cluster: str, lock: AgentLock) -> Term | None:
    def says(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    stopping, asked = await stop_signal(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(handover.SIGNAL, asked.set)
    handover.ready()
    renewing = asyncio.create_task(_renewed(lock, asked))
    try:
        return await claimed(keepers, stopping, name=name, address=address, cluster=cluster, says=says)
    finally:
        handover.hold()
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


async def _renewed(lock: AgentLock, asked: asyncio.Event) -> None:
    """Takes its program anew, whenever it is asked to."""
    while True:
        await asked.wait()
        asked.clear()
        if fault := await lock.next_program.fault():
            print(fault, file=sys.stderr, flush=True)
        else:
            lock.leave()


def _remove(servers: Path) -> None:
    """OSError where something of an earlier term would be used."""
    aside = servers.with_name(f"{servers.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        servers.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def whose_turn(
    folder: ClusterFolder, lock: AgentLock, name: str | None, address: str, cluster: str
) -> AbstractContextManager[Turn | None]:
    """`name`: of this machine, where several may keep the cluster."""
    return contextlib.nullcontext(Turn(folder.lock)) if name is None else in_turn(folder, name, address, cluster, lock)
