"""Runs whole jobs as a person would, follows their events, and kills the processes that a test names.

A job is `tidegate run CONFIG` in a separate process. Its events are followed through the Control API, and its processes
are found in /proc below the launcher. Nothing here waits by the clock: `until` returns when an event is there.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.e2e.lineage import rows
from tests.replicated import Replicated
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.gate import Gate
from tidegate.job import JobFolder, gate_folder
from tidegate.launcher.control import FOLLOW_TIMEOUT_S, NotRunning, control_of
from tidegate.ports.rpc import PeerUnavailable
from tidegate.types import NodeId
from tidegate.v1 import control_pb2
from tidegate.v1.events_pb2 import Event

REPOSITORY = Path(__file__).resolve().parents[2]
UPDATES_PER_ITERATION = 2
_LOOK_AGAIN_S = 0.05
"""The pause between looks for things without an event: the endpoint file, the absence of a dead process."""

Condition = Callable[[Event], bool]


def small_job(name: str, **changes: Any) -> dict[str, Any]:
    """A job of seconds: 2 nodes, actor TP2 x DP2 over both, three engines, one inference. Dotted keys change it."""
    raw: dict[str, Any] = {
        "job": name,
        "cluster": {
            "nodes": {"n0": 4, "n1": 4},
            "component_placement": {"actor": "0,1,4,5", "rollout": "2,3,6", "inference": "7"},
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "max_seq_len": 64,
        },
        "scheduler": {"policy": "static"},
        "task": {"name": "countdown"},
        "algorithm": {
            "iterations": 3,
            "prompts_per_iteration": 8,
            "group_size": 4,
            "n_minibatches": UPDATES_PER_ITERATION,
            "max_new_tokens": 48,
            "kl_coefficient": 0.01,
        },
        "actor": {
            "layout": {"tp": 2, "dp": 2},
            # Runs are compared bit for bit, so the inference must not score responses as they end.
            "num_logical_shards": 4,
            "learning_rate": 1e-3,
            # Another rate in each update: a job that continued at a wrong place of it would have other weights.
            "lr_schedule": {"decay": "cosine"},
            "warm_up": {"steps": 10, "batch_size": 16, "learning_rate": 2e-3},
        },
        "runtime": {"lease_ttl_s": 3.0, "lead_ttl_s": 1.5, "ack_wait_s": 3.0},
    }
    for dotted, value in changes.items():
        section = raw
        *parents, key = dotted.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return raw


def calm_job(name: str, **changes: Any) -> dict[str, Any]:
    """`small_job` with leases as long as by default. None ends where a process of a busy machine stands still for a few
    seconds."""
    times = {"lease_ttl_s": 20.0, "lead_ttl_s": 10.0, "ack_wait_s": 5.0}
    return small_job(name, **{"runtime": times, **changes})


def replicated_job(servers: Replicated, credentials: Path | None = None, **changes: Any) -> dict[str, Any]:
    """`calm_job("plain")` on replicated servers, with `credentials` for both. A failover takes seconds."""
    urls = {"nats_url": servers.nats_url, "redis_url": servers.redis_url}
    if credentials is not None:
        urls |= {"nats_credentials": str(credentials), "redis_credentials": str(credentials)}
    return calm_job("plain", servers=urls, **changes)


@dataclass(slots=True)
class RunningJob:
    """A running job. `events` has the events so far."""

    config: JobConfig
    process: asyncio.subprocess.Process
    events: list[Event] = field(default_factory=list)
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def folder(self) -> JobFolder:
        return JobFolder.of(self.config)

    async def until(self, what: Condition, *, after: int = 0) -> Event:
        """The first event for which `what` holds, past or to come, but not among the first `after` events.

        AssertionError when the job ends without it.
        """
        seen = after
        async with self._came:
            while True:
                for event in self.events[seen:]:
                    if what(event):
                        return event
                seen = len(self.events)
                if self.process.returncode is not None:
                    raise AssertionError(f"the job ended with {self.process.returncode} before the event came")
                await self._came.wait()

    async def until_logged(self, words: str) -> None:
        """Waits for a log line of any service. AssertionError when the job ends without it."""
        logs = self.folder.attempt().logs
        await self.until_seen(lambda: any(words in path.read_text(errors="replace") for path in logs.glob("*.jsonl")))

    async def until_seen(self, holds: Callable[[], bool]) -> None:
        """Waits for a condition on the job's files. AssertionError when it ends without it."""
        while not holds():
            assert self.process.returncode is None, f"the job ended with {self.process.returncode} before it was seen"
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), _LOOK_AGAIN_S)

    async def until_trained(self, num_updates: int) -> None:
        """Waits until the journal has so many updates. On replicated servers an event that tells of one comes late, and
        the next one may have replaced it by then."""
        await self.until_seen(lambda: self.num_trained() >= num_updates)

    def num_trained(self) -> int:
        """The updates that the journal has."""
        return len(rows(self.folder.journal)) if self.folder.journal.exists() else 0

    async def result(self) -> dict[str, Any]:
        """The result of the finished job. AssertionError, with its output, when it did not finish."""
        assert self.process.stderr is not None
        said = (await self.process.stderr.read()).decode()
        status = await self.process.wait()
        assert status == 0, f"exit {status}\n{said[-3000:]}"
        loaded: dict[str, Any] = json.loads(self.folder.result.read_text())
        return loaded

    def processes(self) -> list[psutil.Process]:
        """All processes below the launcher."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def service(self, module: str, node: str = "") -> psutil.Process:
        """A service by its module ("services.actor") and node, or a server by its program's name."""
        for process in self.processes():
            with suppress(psutil.Error):
                command = process.cmdline()
                is_it = module in command or Path("".join(command[:1])).name.startswith(module)
                of_node = not node or node in command or any(part.endswith(f"@{node}.sock") for part in command)
                if is_it and of_node and not _is_worker(process):
                    return process
        raise AssertionError(f"no process runs {module} {node}")

    def worker(self, gpu: str, role: str = "") -> psutil.Process:
        """The worker of a GPU, by its process's title.

        Where components have standbys on each other's GPUs, `role` names the component."""
        for process in self.processes():
            with suppress(psutil.Error):
                title = "".join(process.cmdline()[:1])
                if title.startswith("tidegate: ") and title.endswith(f"{role} {gpu}"):
                    return process
        raise AssertionError(f"nobody works on {gpu}")

    def gates(self) -> dict[str, bool]:
        """Whether each GPU is held."""
        return {
            state.gpu: state.held
            for node in self.config.cluster.nodes
            for state in Gate(gate_folder(self.config, NodeId(node))).report()
        }

    async def follow(self) -> None:
        """Collects events until the job's end, through restarts of the scheduler."""
        sequence = 0
        while self.process.returncode is None:
            with suppress(NotRunning, PeerUnavailable):
                async with control_of(self.folder) as stub:
                    request = control_pb2.ListEventsRequest(job=self.config.job, after_sequence=sequence, follow=True)
                    async for response in stub.ListEvents(request, timeout=FOLLOW_TIMEOUT_S):
                        sequence = response.stream_sequence
                        async with self._came:
                            self.events.append(response.event)
                            self._came.notify_all()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), _LOOK_AGAIN_S)
        async with self._came:
            self._came.notify_all()


def _is_worker(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and "tidegate.runtime.forkserver" in parent.cmdline()


@asynccontextmanager
async def running(raw: dict[str, Any], folder: Path, *options: str) -> AsyncIterator[RunningJob]:
    """Starts a job in `folder` and follows it. On leaving, ends its remaining processes and waits for their death."""
    config = parse_config(raw | {"output_dir": str(folder)})
    path = folder / f"{config.job}.yaml"
    path.write_text(yaml.safe_dump(raw | {"output_dir": str(folder)}))
    command = [sys.executable, "-m", "cli", "run", str(path), *options]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=REPOSITORY, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    job = RunningJob(config, process)
    following = asyncio.create_task(job.follow())
    known: list[psutil.Process] = []
    try:
        yield job
        known = job.processes() if process.returncode is None else []
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()
        await following
        _, alive = psutil.wait_procs(known, timeout=5)
        assert not alive, f"{len(alive)} of {len(known)} processes outlived the job: {alive}"


def generating(iteration: int, num_groups: int = 1) -> Condition:
    """Whether the iteration has this many groups, and goes on."""
    return lambda event: (
        event.WhichOneof("body") == "progress"
        and event.iteration == iteration
        and event.progress.phase == "generate"
        and num_groups <= event.progress.num_done < event.progress.num_total
    )


def updated(iteration: int) -> Condition:
    """Whether the iteration's first optimizer update is committed, and it goes on."""
    return lambda event: (
        event.WhichOneof("body") == "progress"
        and event.iteration == iteration
        and event.progress.phase == "train"
        and event.progress.num_done < event.progress.num_total
    )


Victim = Callable[[RunningJob], psutil.Process]


def service_of(module: str, node: str = "") -> Victim:
    return lambda job: job.service(module, node)


def worker_of(gpu: str) -> Victim:
    return lambda job: job.worker(gpu)
