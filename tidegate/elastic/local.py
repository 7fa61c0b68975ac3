"""Runs the members of one epoch as processes of this machine, for an example, a test or a first look.

`run` forks them from the caller, serves their store on loopback, gives them a folder of shared memory, and waits.
Order: `on_cpu` before anything imports Megatron, then `run`. Invariants: when `run` returns or raises, no member and no
folder is left; one member's failure ends the others.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tidegate.elastic.epoch.rendezvous import connect_store, listening_socket, serve_store
from tidegate.elastic.epoch.world import Membership, World
from tidegate.megatron import cpu_stand_in

SHARED_MEMORY = Path("/dev/shm")


class MemberFailed(RuntimeError):
    """A member raised or was killed; its traceback went to stderr."""


def on_cpu() -> None:
    """Let this process, and those that `run` forks from it, run Megatron without CUDA."""
    # What they warn of is what is missing on such a machine, and what is deprecated in calls between the two.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    cpu_stand_in.install()


def run(member: Callable[[World, Path], None], num_members: int, *, timeout_s: float = 60.0) -> None:
    """Call `member(world, folder of shared memory)` in each of `num_members` processes on the CPU."""
    server = listening_socket()
    port = server.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir=SHARED_MEMORY))
    members: dict[int, int] = {}
    try:
        for me in range(num_members):
            pid = os.fork()
            if pid == 0:
                server.close()
                _be(member, me, num_members, port, folder, timeout_s)
            members[os.pidfd_open(pid)] = me
        store = serve_store(server.detach(), timeout_s=timeout_s)
        _wait(members)
        del store
    finally:
        for pidfd in members:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            os.close(pidfd)
        shutil.rmtree(folder)


def _be(
    member: Callable[[World, Path], None], me: int, num_members: int, port: int, folder: Path, timeout_s: float
) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        membership = Membership(epoch=1, members=tuple(range(num_members)))
        store = connect_store(port, timeout_s=timeout_s)
        world = World.join(membership, me=me, store=store, device=torch.device("cpu"), timeout_s=timeout_s)
        member(world, folder)
        world.leave()
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's program
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(members: dict[int, int]) -> None:
    """Until all have ended; MemberFailed, with those still running left in `members`, at the first that failed."""
    poll = select.poll()
    for pidfd in members:
        poll.register(pidfd, select.POLLIN)
    while members:
        for pidfd, _ in poll.poll():
            ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            poll.unregister(pidfd)
            os.close(pidfd)
            me = members.pop(pidfd)
            if ended is None or ended.si_status:
                raise MemberFailed(
                    f"member {me} ended with status {ended and ended.si_status}; see its traceback above"
                )
