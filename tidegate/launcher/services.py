"""The processes of a job, and the order in which they start and end.

Start:
1. one fork server for each node, before anything that has threads, unless this machine keeps one for its nodes;
2. the tracker, if there is one;
3. the scheduler;
4. each component's instance on each node.

End:
1. the scheduler, so that it restarts nothing that leaves;
2. all instances;
3. the tracker, which then has all events to report;
4. the fork servers.

A node of another machine has its processes there: here each has a stand-in, which is asked and watched as they are
(`hosted`). [test_job_services: a_node_on_another_machine]

A job on CUDA sees its devices, and a job on CPUs none. [test_job_services: job_on_cuda_has_its_devices]
[test_job_services: job_on_cpus_sees_no_device]

Every process finds this installation's modules, wherever the launcher was started.

Invariant: a job never needs its tracker. [test_tracking: changes_nothing_of_a_jobs_end]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import structlog

from tidegate.config.job_config import JobConfig
from tidegate.device_slots import DeviceKind
from tidegate.job import JobFolder
from tidegate.machines import own_modules
from tidegate.runtime.hosted import Hosted
from tidegate.runtime.large_copies import with_large_copies
from tidegate.runtime.processes import ServiceEnd, ServiceSpec, StartChild, Supervisor
from tidegate.types import NodeId, Role, instance_id

SCHEDULER = "scheduler"
TRACKER = "tracking"
FORKED = ("services.scheduler", *(f"services.{role}" for role in Role), "tidegate.runtime.hosted")
"""The services that a spawner imports once for all of them."""
_PRELOAD = (
    "tidegate.megatron.cpu_stand_in:install",
    "services.actor.worker",
    "services.rollout.worker",
    "services.inference.worker",
)
_MAX_RESTARTS = 5
"""The limit in a minute, and in a row for a process that fails within a minute of its start: it is given up after 8 s
of pauses. A start waits for NATS for 15 s, so an outage of a minute is survived. A rare kill is survived."""
_HOSTED_STOP_S = 20.0
"""The agent gives the process ten seconds to end. A stand-in that is killed ends the call, and so the process too."""
_TRACKER_GRACE_S = 2.0
"""Added to the tracker's time to close: it reads the last events and reports what it did not write."""


class JobServices:
    """The processes of one job. Only this user can read the folder `sockets`. `start_child` is the supervisor's."""

    def __init__(
        self, config: JobConfig, folder: JobFolder, *, sockets: Path, boot: int, start_child: StartChild | None = None
    ) -> None:
        self._config = config
        self._folder = folder
        self._attempt = folder.attempt()
        self._sockets = sockets
        self._boot = boot
        self._supervisor = Supervisor(start_child)
        self._log = structlog.get_logger("services")
        self._started: list[str] = []

    def start(self) -> None:
        for spec in self.specs():
            self._supervisor.start(spec)
            self._started.append(spec.name)

    def specs(self) -> Iterator[ServiceSpec]:
        """In the order of their start."""
        for node in self._own_fork_servers():
            spec = self._spec(_forkserver(node), forkserver_command(self._socket(node)))
            spec = replace(spec, env=fork_server_env(self._config.cluster.device))
            yield self._placed(spec, node, None)
        if self._config.tracking.is_on:
            yield self._tracker_spec()
        yield self._spec(SCHEDULER, ("services.scheduler", *self._config_arguments(), "--boot", str(self._boot)))
        for role, node in self._instances():
            command = (f"services.{role}", *self._config_arguments(), "--node", node)
            spec = self._spec(instance_id(role, node), (*command, "--forkserver", str(self._socket(node))))
            yield self._placed(spec, node, role)

    async def next_end(self) -> ServiceEnd:
        return await self._supervisor.next_end()

    def log_of(self, name: str) -> Path:
        """The file of what a process here prints that is no log line, for example why it could not start. Of a node on
        another machine that is its stand-in."""
        is_here = self._config.cluster.machine_of(name.partition("@")[2]) is None
        return self._attempt.logs / (f"{name}.out" if is_here else f"{name}.stand-in.out")

    async def stop(self) -> None:
        """Returns when every process, and what it forked, is gone. Skips processes that were not started."""
        for names in (
            [SCHEDULER],
            [instance_id(role, node) for role, node in self._instances()],
            [TRACKER],
            [_forkserver(node) for node in self._own_fork_servers()],
        ):
            ends = await self._supervisor.stop(*(name for name in names if name in self._started))
            for end in ends:
                if end.name == TRACKER and end.was_asked and end.exit_status:
                    self._log.warning("tracker killed: some metrics may be missing", status=end.exit_status)

    def _tracker_spec(self) -> ServiceSpec:
        numbers = ("--attempt", str(self._attempt.number), "--boot", str(self._boot))
        spec = self._spec(TRACKER, ("tidegate.tracking", *self._config_arguments(), *numbers))
        longest_s = self._config.tracking.close_timeout_s + _TRACKER_GRACE_S
        return replace(spec, max_restarts=0, stop_timeout_s=longest_s)

    def _nodes(self) -> list[NodeId]:
        return [NodeId(node) for node in self._config.cluster.nodes]

    def _own_fork_servers(self) -> list[NodeId]:
        has_one = bool(self._config.runtime.fork_server)
        return [node for node in self._nodes() if not has_one or self._config.cluster.machine_of(node) is not None]

    def _instances(self) -> Iterator[tuple[Role, NodeId]]:
        """One for every role on every node. The scheduler decides which GPUs it gets."""
        for node in self._nodes():
            for role in Role:
                yield role, node

    def _spec(self, name: str, command: tuple[str, ...]) -> ServiceSpec:
        return ServiceSpec(
            name=name,
            command=(sys.executable, "-m", *command),
            log_path=self.log_of(name),
            env=service_env(self._config.cluster.device),
            max_restarts=_MAX_RESTARTS,
        )

    def _placed(self, spec: ServiceSpec, node: NodeId, role: Role | None) -> ServiceSpec:
        """The spec, or that of a stand-in where the node is on another machine."""
        if self._config.cluster.machine_of(node) is None:
            return spec
        hosted = Hosted(self._folder.config, node, role, self._attempt.logs / f"{spec.name}.out")
        return replace(self._spec(spec.name, hosted.command()), stop_timeout_s=_HOSTED_STOP_S)

    def _socket(self, node: NodeId) -> Path:
        return Path(self._config.runtime.fork_server or self._sockets / f"{_forkserver(node)}.sock")

    def _config_arguments(self) -> tuple[str, str]:
        return ("--config", str(self._folder.config))


def service_env(device: DeviceKind, *, modules: str = "") -> dict[str, str]:
    """The environment of a service, besides this process's. `modules`: the folder of another release's."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    paths = [modules or own_modules(), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Safe path: a folder called `services` in the launcher's working directory is not Tidegate's.
    return (
        {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
        | hidden
        | with_large_copies(os.environ)
    )


def fork_server_env(device: DeviceKind, *, modules: str = "") -> dict[str, str]:
    """Its imports ask whether there is a device. NVIDIA's management library tells without a CUDA context, which would
    start a thread and survive no fork. On CPUs the variable changes nothing."""
    return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | service_env(device, modules=modules)


def forkserver_command(socket: Path) -> tuple[str, ...]:
    """Of a fork server for workers of all roles, which dies with this process."""
    owner = ("--owner-pid", str(os.getpid()))
    return ("tidegate.runtime.forkserver", "--socket", str(socket), "--preload", ",".join(_PRELOAD), *owner)


def _forkserver(node: NodeId) -> str:
    return f"forkserver@{node}"
