"""The units of `deploy/` under a real systemd, in a container on this machine's files. Its changes stay in memory."""

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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, small_job
from tests.two_machines import are_possible

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("systemd-nspawn") is None, reason="it needs systemd-nspawn (systemd-container)"),
    pytest.mark.skipif(
        REPOSITORY.is_relative_to("/tmp"), reason="a container has a /tmp of its own, without this folder"
    ),
]

TIDEGATE = "runuser -u alice -- /opt/tidegate/bin/tidegate"
JOBS = "/srv/tidegate/jobs"


class Container:
    """A machine with systemd, and user alice."""

    def __init__(self, nspawn: subprocess.Popen[bytes]) -> None:
        self._nspawn = nspawn
        self._leader, self._pidfd = 0, -1
        """The container's systemd, by its pid here."""

    def boot(self) -> None:
        """Until systemd there has started all units."""
        while not self._leader:
            assert self._nspawn.poll() is None, "systemd-nspawn has ended"
            time.sleep(0.05)
            self._leader = self._init()
        self._pidfd = os.pidfd_open(self._leader)
        self.until("systemctl is-system-running | grep -Eq 'running|degraded'")

    def end(self) -> None:
        """The end of the first process there ends all others. systemd-nspawn alone would leave them running."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            select.select([self._pidfd], [], [])
            os.close(self._pidfd)
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
        command = ["nsenter", "-t", str(self._leader), "-a", "bash", "-ec", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def until(self, script: str) -> None:
        self.said(f"until {script}; do sleep 0.2; done")


@pytest.fixture
def container() -> Iterator[Container]:
    if not are_possible():
        pytest.fail("make test-hosts needs root")
    options = "--volatile=overlay --boot --private-network --register=no --keep-unit --quiet --machine=tidegate-units"
    # systemd-nspawn takes no / itself. This one is in a mount namespace of its own, and goes with it: here the folder
    # stays empty, and can be removed.
    root = tempfile.mkdtemp()
    command = f"mount --bind / {root} && exec systemd-nspawn -D {root} {options}"
    nspawn = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = Container(nspawn)
    try:
        found.boot()
        # The interpreter, and this repository's environment, may be in a home that only root can read.
        homes = {str(parent) for path in (Path(sys.executable).resolve(), REPOSITORY) for parent in path.parents}
        found.said(f"useradd alice; chmod a+rx {' '.join(sorted(homes))}; ln -sfn {sys.prefix} /opt/tidegate")
        found.said("mkdir -p /etc/tidegate /srv/tidegate; chown alice /srv/tidegate")
        found.said(f"cp {REPOSITORY}/deploy/*.service /etc/systemd/system/")
        found.said(f"cp {REPOSITORY}/deploy/cluster.env /etc/tidegate/")
        yield found
    finally:
        found.end()
        os.rmdir(root)
        # Its lock, which one that is killed leaves.
        Path(root).with_name(f".#{Path(root).name}.lck").unlink(missing_ok=True)


def test_a_cluster_that_systemd_keeps_trains_a_job_and_goes_on_after_its_agent_was_killed(container: Container) -> None:
    text = yaml.safe_dump(small_job("kept", algorithm__iterations=12))
    container.said(f"cat > /srv/tidegate/kept.yaml <<'EOF'\n{text}\nEOF")
    container.said("systemctl daemon-reload; systemctl start tidegate-cluster@alice")
    container.until(f"{TIDEGATE} get nodes --output-dir {JOBS} 2>/dev/null | grep -q ready")
    container.said(f"{TIDEGATE} submit /srv/tidegate/kept.yaml --output-dir {JOBS}")
    container.until(f"compgen -G '{JOBS}/kept/checkpoints/*/manifest.json'")
    container.said("systemctl kill --signal=KILL --kill-whom=main tidegate-cluster@alice")
    container.until(f"{TIDEGATE} get jobs --output-dir {JOBS} 2>/dev/null | grep -q finished")
    assert container.said("systemctl show --value -p NRestarts tidegate-cluster@alice") == "1"
    assert container.said("stat -c '%U %a' /var/lib/tidegate/gates") == "alice 700"
    container.said("systemctl stop tidegate-cluster@alice")
    assert container.said("systemctl show --value -p Result tidegate-cluster@alice") == "success"
    assert container.said("pgrep -u alice || true") == ""


def test_an_agent_that_systemd_keeps_listens_and_is_started_again_after_it_was_killed(container: Container) -> None:
    certs = "/opt/tidegate/bin/tidegate certs"
    container.said(f"{certs} init --authority /etc/tidegate/ca --cluster lab")
    container.said(
        f"{certs} issue node b --authority /etc/tidegate/ca --to /etc/tidegate/node; chown -R alice /etc/tidegate/node"
    )
    container.said("echo LISTEN=127.0.0.1:7400 > /etc/tidegate/agent.env")
    container.said("systemctl daemon-reload; systemctl start tidegate-agent@alice")
    listens = "journalctl -u tidegate-agent@alice | grep -c 'listens on 127.0.0.1:7400'"
    container.until(f"[ $({listens}) = 1 ]")
    container.said("systemctl kill --signal=KILL --kill-whom=main tidegate-agent@alice")
    container.until(f"[ $({listens}) = 2 ]")
    container.said("systemctl stop tidegate-agent@alice")
    assert container.said("systemctl show --value -p Result tidegate-agent@alice") == "success"
    assert container.said("pgrep -u alice || true") == ""
