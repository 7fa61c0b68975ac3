"""Two machines on one: network namespaces with a link between them. Each has host memory, gates and a clock of its own.

It needs root, iproute2's `ip` and util-linux's `unshare`. The second machine has an agent. NATS and Redis run on the
first one's address, without credentials: nobody else is on the link.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.e2e.jobs import REPOSITORY, small_job
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.json_text import parse_json
from tidegate.runtime.server_kinds import NATS, VALKEY, packaged_binary

HERE, THERE = "10.77.0.1", "10.77.0.2"
NATS_PORT, REDIS_PORT, AGENT_PORT = 4333, 6399, 7400
CLOCK_AHEAD_S = 86_400
NAMESPACE, LINK, FAR = "tidegate-b", "tidegate-a", "tidegate-b"


def are_possible() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, stderr=subprocess.PIPE)


@dataclass
class Lab:
    """`folder` is the storage that both machines share."""

    folder: Path
    keeper: subprocess.Popen[bytes]
    """Keeps the mounts of the second machine, whose /dev/shm and gates outlive its agents."""
    command: tuple[str, ...] = (sys.executable, "-m", "cli")
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_agent(self) -> None:
        """On the second machine. It returns once the agent listens."""
        agent = ("agent", "--listen", f"{THERE}:{AGENT_PORT}")
        words = " ".join(
            (
                *self.command,
                *agent,
                "--credentials",
                str(self.folder / "node"),
                "--log",
                str(self.folder / "helper.log"),
            )
        )
        started = subprocess.Popen(
            [
                "nsenter",
                "-t",
                str(self.keeper.pid),
                "-m",
                "ip",
                "netns",
                "exec",
                NAMESPACE,
                # A machine's monotonic clock begins with its start.
                "unshare",
                "--time",
                "--monotonic",
                str(CLOCK_AHEAD_S),
                "sh",
                "-c",
                f"exec {words}",
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.agents.append(started)
        assert started.stdout is not None
        assert b"listens on" in started.stdout.readline()

    def kill_agent(self) -> None:
        agent = self.agents.pop()
        agent.kill()
        agent.wait()

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    def tidegate(self, *words: str) -> Any:
        """What a command of the first machine answers, as JSON."""
        return parse_json(self.typed(*words, "--output-dir", str(self.jobs), "-o", "json"))

    def typed(self, *words: str) -> str:
        """What a command of the first machine prints."""
        done = subprocess.run([*self.command, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    @contextmanager
    def cluster(self, *nodes: str) -> Iterator[psutil.Process]:
        """The agent of a cluster with nodes here, and some on the second machine: n1=4@b."""
        far = ("--machine", f"b={THERE}:{AGENT_PORT}", "--address", HERE)
        folders = ("--machine-credentials", str(self.folder / "operator"), "--gate-root", str(self.folder / "gates"))
        agent = self.tidegate("up", *nodes, *far, *folders)["agent"]
        try:
            yield psutil.Process(agent)
        finally:
            self.tidegate("down")

    def submit(self, raw: dict[str, Any]) -> None:
        config = self.folder / f"{raw['job']}.yaml"
        config.write_text(yaml.safe_dump(raw))
        self.tidegate("submit", str(config))

    def job(self, name: str, **changes: Any) -> dict[str, Any]:
        """Its node n1 is on the second machine."""
        return small_job(
            name,
            cluster__addresses={"n0": HERE, "n1": THERE},
            cluster__machines=[{"name": "b", "agent": f"{THERE}:{AGENT_PORT}", "nodes": ["n1"]}],
            cluster__machine_credentials=str(self.folder / "operator"),
            runtime__gate_root=str(self.folder / "gates"),
            servers={"nats_url": f"nats://{HERE}:{NATS_PORT}", "redis_url": f"redis://{HERE}:{REDIS_PORT}"},
            **changes,
        )


@contextmanager
def linked() -> Iterator[None]:
    """The second machine, and the link to it."""
    sh(f"ip netns add {NAMESPACE}")
    try:
        sh(f"ip link add {LINK} type veth peer name {FAR} netns {NAMESPACE}")
        for command in (f"addr add {HERE}/24 dev {LINK}", f"link set {LINK} up"):
            sh(f"ip {command}")
        for command in (f"addr add {THERE}/24 dev {FAR}", f"link set {FAR} up", "link set lo up"):
            sh(f"ip -n {NAMESPACE} {command}")
        yield
    finally:
        sh(f"ip netns delete {NAMESPACE}")


@contextmanager
def two_machines(folder: Path, *command: str) -> Iterator[Lab]:
    """Servers here, an agent there. `command`: that of an installed Tidegate; else this source tree's."""
    authority = Authority.create(folder / "ca", "lab")
    authority.issue(Identity("lab", Party.NODE, "b"), folder / "node")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), folder / "operator")
    stores = folder / "stores"
    stores.mkdir()
    nats = [str(packaged_binary(NATS)), "-a", HERE, "-p", str(NATS_PORT), "-js", "-sd", str(stores / "nats")]
    redis = [str(packaged_binary(VALKEY)), "--bind", HERE, "--port", str(REDIS_PORT), "--protected-mode", "no"]
    redis += ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(stores)]
    servers = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in (nats, redis)]
    found = Lab(folder, _mounted(folder / "gates"))
    found.command = command or found.command
    found.jobs.mkdir()
    try:
        found.start_agent()
        yield found
    finally:
        for process in (*found.agents, *servers, found.keeper):
            process.send_signal(signal.SIGTERM)
            process.wait()


def _mounted(gates: Path) -> subprocess.Popen[bytes]:
    """A process with a /dev/shm and gates of its own."""
    gates.mkdir()
    mounts = f"mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {gates} && echo mounted && exec sleep infinity"
    keeper = subprocess.Popen(["unshare", "--mount", "sh", "-c", mounts], stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"mounted\n"
    return keeper


@contextmanager
def link_down() -> Iterator[None]:
    sh(f"ip link set {LINK} down")
    try:
        yield
    finally:
        sh(f"ip link set {LINK} up")


def services_there() -> list[str]:
    """The pids of services in the other namespace, but for the agent and its helper."""
    pids = subprocess.run(["ip", "netns", "pids", NAMESPACE], check=True, stdout=subprocess.PIPE, text=True)
    found = []
    for pid in pids.stdout.split():
        try:
            words = Path("/proc", pid, "cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if b"services." in words or b"forkserver" in words or b"tidegate: " in words:
            found.append(pid)
    return found
