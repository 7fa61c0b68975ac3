"""Machines with a systemd of their own: containers on this machine's files, whose changes stay in memory.

They need root and `systemd-nspawn`. The repository and its environment are the same in all of them.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import REPOSITORY
from tests.two_machines import are_possible, sh

MARKS = [
    pytest.mark.hosts,
    pytest.mark.skipif(shutil.which("systemd-nspawn") is None, reason="it needs systemd-nspawn (systemd-container)"),
    pytest.mark.skipif(
        REPOSITORY.is_relative_to("/tmp"), reason="a container has a /tmp of its own, without this folder"
    ),
]

USER_CAN_READ = " ".join(
    # The interpreter, and this repository's environment, may be in a home that only root can read.
    sorted({str(parent) for path in (Path(sys.executable).resolve(), REPOSITORY) for parent in path.parents})
)


ADDRESSES = {"a": "10.78.0.11", "b": "10.78.0.12", "c": "10.78.0.13"}
"""The addresses of the machines of `networked`."""
NAMESPACE, HERE = "tidegate-d", "10.78.0.1"
"""Their network: a bridge in a namespace of its own, where no rule of this machine's firewall is."""


class Container:
    """A machine with systemd."""

    def __init__(self, nspawn: subprocess.Popen[bytes]) -> None:
        self._nspawn = nspawn
        self.leader, self._pidfd = 0, -1
        """The container's systemd, by its pid here."""

    def boot(self) -> None:
        """Until systemd there has started all units."""
        while not self.leader:
            assert self._nspawn.poll() is None, "systemd-nspawn has ended"
            time.sleep(0.05)
            self.leader = self._init()
        self._pidfd = os.pidfd_open(self.leader)
        self.until("systemctl is-system-running | grep -Eq 'running|degraded'")

    def end(self) -> None:
        """As a loss of power. The end of the first process there ends all others; systemd-nspawn alone would leave them
        running."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            select.select([self._pidfd], [], [])
            os.close(self._pidfd)
            self._pidfd = -1
        self._nspawn.kill()
        self._nspawn.wait()

    def _init(self) -> int:
        """0: it is not there yet. The processes before it still have this machine's files."""
        for each in psutil.Process(self._nspawn.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                status = Path(f"/proc/{each.pid}/status").read_text()
                if each.name() == "systemd" and re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE):
                    return each.pid
        return 0

    def said(self, script: str) -> str:
        command = ["nsenter", "-t", str(self.leader), "-a", "bash", "-ec", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def until(self, script: str) -> None:
        self.said(f"until {script}; do sleep 0.2; done")


@contextmanager
def booted(name: str, *options: str, binds: Mapping[Path, str] | None = None) -> Iterator[Container]:
    """`options`: of systemd-nspawn. `binds`: by folder here, its path there."""
    if not are_possible():
        pytest.fail("make test-hosts needs root")
    words = ["--volatile=overlay", "--boot", "--register=no", "--keep-unit", "--quiet", f"--machine={name}", *options]
    words += [f"--bind={folder}:{path}" for folder, path in (binds or {}).items()]
    # systemd-nspawn takes no / itself. This one is in a mount namespace of its own, and goes with it: here the folder
    # stays empty, and can be removed.
    root = tempfile.mkdtemp()
    nspawn = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"mount --bind / {root} && exec systemd-nspawn -D {root} {' '.join(words)}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = Container(nspawn)
    try:
        found.boot()
        found.said(f"chmod a+rx {USER_CAN_READ}")
        yield found
    finally:
        found.end()
        os.rmdir(root)
        # Its lock, which one that is killed leaves.
        Path(root).with_name(f".#{Path(root).name}.lck").unlink(missing_ok=True)


@contextmanager
def networked(storage: Path) -> Iterator[dict[str, Container]]:
    """Three machines that reach each other and this one. All have `storage` at /srv/tidegate."""
    inside = f"ip -n {NAMESPACE} link"
    with ExitStack() as stack:
        sh(f"ip netns add {NAMESPACE}")
        stack.callback(sh, f"ip netns delete {NAMESPACE}")
        for command in ("add net type bridge", "set net up"):
            sh(f"{inside} {command}")
        sh(f"ip link add {NAMESPACE} type veth peer name here netns {NAMESPACE}")
        # The end of a namespace takes its links away later.
        stack.callback(sh, f"ip link delete {NAMESPACE}")
        for command in (f"addr add {HERE}/24 dev {NAMESPACE}", f"link set {NAMESPACE} up"):
            sh(f"ip {command}")
        for command in ("set here master net", "set here up"):
            sh(f"{inside} {command}")
        found = {}
        for name, address in ADDRESSES.items():
            binds = {storage: "/srv/tidegate"}
            found[name] = stack.enter_context(booted(f"tidegate-{name}", "--private-network", binds=binds))
            sh(f"{inside} add to-{name} type veth peer name host0 netns {found[name].leader}")
            for command in (f"set to-{name} master net", f"set to-{name} up"):
                sh(f"{inside} {command}")
            found[name].said(f"ip addr add {address}/24 dev host0; ip link set host0 up")
        yield found
