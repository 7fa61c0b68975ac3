"""Runs the members of one epoch as processes of this machine, for an example, a test or a first look.

`run` forks the members from the caller, serves their store on loopback, gives them a folder of shared memory, and
waits.

Order:
1. `on_cpu`, before anything imports Megatron.
2. `run`.

Invariants:
- When `run` returns or raises, no member and no folder is left. [test_local: leaves_no_member_and_no_folder]
- The failure of one member ends the others. [test_local: one_failure_ends_the_others]
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
    """A member raised or was killed. Its traceback is on stderr."""


def on_cpu() -> None:
    """Let this process, and those that `run` forks from it, run Megatron without CUDA."""
    # Their warnings name parts that such a machine lacks, and deprecated calls between the two libraries.
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
    """Wait until all members have ended.

    Raises MemberFailed at the first failure. Members that still run are left in `members`.
    """
    poll = select.poll()
    for pidfd in members:
        poll.register(pidfd, select.POLLIN)
    while members:
        for pidfd, _ in poll.poll():
            status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            poll.unregister(pidfd)
            os.close(pidfd)
            me = members.pop(pidfd)
            if status is None or status.si_status:
                raise MemberFailed(
                    f"member {me} ended with status {status and status.si_status}; see its traceback above"
                )
