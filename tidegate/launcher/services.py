"""Which processes a job is made of, and in what order they start and end.

Start: a fork server a node (before anything that has threads), the tracker if there is one, the scheduler, then each
component's instance on each node. End: the scheduler first, so that nobody starts again what leaves, then all
instances, the tracker, which then has all there is to tell, and the fork servers. Invariants: every process finds this
installation's modules, wherever the launcher was started; a job never needs its tracker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import structlog

import tidegate
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.runtime.processes import ServiceEnd, ServiceSpec, Supervisor
from tidegate.types import NodeId, Role, instance_id

SCHEDULER = "scheduler"
TRACKER = "tracking"
_PRELOAD_FIRST = {"cpu": ("tidegate.megatron.cpu_stand_in:install",), "cuda": ()}
_PRELOAD = ("services.actor.worker", "services.rollout.worker", "services.inference.worker")
_MAX_RESTARTS = 5
"""In a minute. One that fails at its start is given up after 8 s of pauses, a kill now and then is always survived."""
_TRACKER_GRACE_S = 2.0
"""Past the time that it has to close: what it needs to read the last events and to say what it did not write."""


class JobServices:
    """The processes of one job. `sockets` is a folder for this user only."""

    def __init__(self, config: JobConfig, folder: JobFolder, *, sockets: Path, boot: int) -> None:
        self._config = config
        self._folder = folder
        self._attempt = folder.attempt()
        self._sockets = sockets
        self._boot = boot
        self._supervisor = Supervisor()
        self._log = structlog.get_logger("services")
        self._started: list[str] = []

    def start(self) -> None:
        for node in self._nodes():
            self._start(_forkserver(node), self._forkserver_command(node))
        if self._config.tracking.is_on:
            self._start_tracker()
        self._start(SCHEDULER, ("services.scheduler", *self._config_arguments()))
        for role, node in self._instances():
            command = (f"services.{role}", *self._config_arguments(), "--node", node)
            self._start(instance_id(role, node), (*command, "--forkserver", str(self._socket(node))))

    async def next_end(self) -> ServiceEnd:
        return await self._supervisor.next_end()

    def log_of(self, name: str) -> Path:
        """What a process says that is no log line: why it could not start."""
        return self._attempt.logs / f"{name}.out"

    async def stop(self) -> None:
        """Returns when every process, and what it forked, is gone. Nothing happens for those that were not started."""
        for names in (
            [SCHEDULER],
            [instance_id(role, node) for role, node in self._instances()],
            [TRACKER],
            [_forkserver(node) for node in self._nodes()],
        ):
            ends = await self._supervisor.stop(*(name for name in names if name in self._started))
            for end in ends:
                if end.name == TRACKER and end.was_asked and end.exit_status:
                    self._log.warning("tracker killed: some metrics may not be told", status=end.exit_status)

    def _start_tracker(self) -> None:
        numbers = ("--attempt", str(self._attempt.number), "--boot", str(self._boot))
        spec = self._spec(TRACKER, ("tidegate.tracking", *self._config_arguments(), *numbers))
        longest_s = self._config.tracking.close_timeout_s + _TRACKER_GRACE_S
        self._launch(replace(spec, max_restarts=0, stop_timeout_s=longest_s))

    def _start(self, name: str, command: tuple[str, ...]) -> None:
        self._launch(self._spec(name, command))

    def _launch(self, spec: ServiceSpec) -> None:
        self._supervisor.start(spec)
        self._started.append(spec.name)

    def _nodes(self) -> list[NodeId]:
        return [NodeId(node) for node in self._config.cluster.nodes]

    def _instances(self) -> Iterator[tuple[Role, NodeId]]:
        """Of every role on every node: which GPUs it gets is the scheduler's to say."""
        for node in self._nodes():
            for role in Role:
                yield role, node

    def _spec(self, name: str, command: tuple[str, ...]) -> ServiceSpec:
        root = str(Path(tidegate.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return ServiceSpec(
            name=name,
            command=(sys.executable, "-m", *command),
            log_path=self.log_of(name),
            # Safe path: a folder called `services` where the launcher was started is not ours.
            env={"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)},
            max_restarts=_MAX_RESTARTS,
        )

    def _forkserver_command(self, node: NodeId) -> tuple[str, ...]:
        preload = ",".join((*_PRELOAD_FIRST[self._config.cluster.device], *_PRELOAD))
        socket = str(self._socket(node))
        return (
            "tidegate.runtime.forkserver",
            "--socket",
            socket,
            "--preload",
            preload,
            "--owner-pid",
            str(os.getpid()),
        )

    def _socket(self, node: NodeId) -> Path:
        return self._sockets / f"{_forkserver(node)}.sock"

    def _config_arguments(self) -> tuple[str, str]:
        return ("--config", str(self._folder.config))


def _forkserver(node: NodeId) -> str:
    return f"forkserver@{node}"
