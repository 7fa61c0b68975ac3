"""What a cluster costs: `python -m benchmarks.cluster [--json] [--quick] [--save]`.

`tls_overhead`: the median time of one step of the control plane with credentials over that without. A step is what a
command takes: a call to an instance, an event that NATS has on its disk, and a write that Redis has on its own. Both
sides have servers of the same kind on this machine, and take turns, step by step. On the one side Redis has users; it
has TLS on neither, because the embedded server has none.

`failover_redis_s`, `failover_nats_s`: the time that a small job loses when the primary of Redis dies, or the NATS
server that leads its events (`cluster_failover`); the median of five. Sentinels take a primary that is silent for 2 s
for dead, which is most of what Redis costs.

`submit_over_cold_run`: from a person's `submit` to the report of a job's first iteration, on a warm cluster, over the
same from `tidegate run` (`cluster_submit`).

`reload_job_lost_s`, `restart_job_lost_s`: the time that a job loses by another release of the cluster, in place and by
`down` and `up`. `reload_s`: the time of `tidegate reload`, while which the cluster's API is away (`cluster_reload`).

`jobs_1000_decide_ms`: the 99th percentile of a round of the cluster's scheduler, with 1,000 jobs that wait
(`cluster_decide`).

`node_loss_s`: the time that the job loses when all processes of a node on another machine die with its agent, which is
started again at once (`cluster_failover`); the median of five. Only root can make the namespaces that it needs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.cluster_decide import decided
from benchmarks.cluster_failover import failover, node_loss
from benchmarks.cluster_reload import RUNS as RELOADS
from benchmarks.cluster_reload import reloaded
from benchmarks.cluster_submit import RUNS, submitted
from benchmarks.report import Report, arguments, publish
from tests.two_machines import are_possible
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.redis_store import redis_store
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import credential_folder, issue_job_credentials, job_identity
from tidegate.events import EventSource
from tidegate.logs import configure_logging
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.runtime.server_kinds import ServerGuard
from tidegate.types import InstanceId, JobId
from tidegate.v1 import events_pb2, instance_pb2, instance_pb2_grpc

JOB, INSTANCE = JobId("bench"), InstanceId("actor@n0")
STEPS, QUICK_STEPS = 2000, 200
LOSSES = 5
_WARM_UP = 50
"""Steps that do not count: the first ones connect."""
OPEN = "open"
PARTS = ("call", "event", "write")
GOALS = {"tls_overhead": "<= 1.3", "submit_over_cold_run": "<= 0.5", "jobs_1000_decide_ms": "<= 50"}

Steps = tuple[Callable[[], Awaitable[Any]], ...]
"""The parts of a step, in the order of `PARTS`."""


class _Instance(instance_pb2_grpc.InstanceServicer):
    async def GateReport(self, request: Any, context: Any) -> instance_pb2.GateReportResponse:
        return instance_pb2.GateReportResponse(node="n0")


async def _no_gates() -> GateReports:
    return {}


@asynccontextmanager
async def side(folder: Path, *, has_credentials: bool) -> AsyncIterator[Steps]:
    """Servers, an instance and their client."""
    issue_job_credentials(folder, JOB)
    of = partial(credential_folder, folder)
    guard = ServerGuard.of(of(Party.NODE), of(Party.SCHEDULER), of(Party.JOB)) if has_credentials else None
    own = of(Party.SCHEDULER) if has_credentials else None
    async with AsyncExitStack() as closing:
        servers = await closing.enter_async_context(EmbeddedServers(folder / "servers", guard=guard))
        bus = await NatsBus.connect(servers.nats.url, name="benchmark", credential=own)
        closing.push_async_callback(bus.close)
        await bus.streams.open_job(JOB)
        store = redis_store(servers.store.url, credential=own)
        closing.push_async_callback(store.aclose)
        await adopt(store, MemoryTermRegister(), _no_gates)
        service = Service(
            instance_pb2.DESCRIPTOR.services_by_name["Instance"],
            partial(instance_pb2_grpc.add_InstanceServicer_to_server, _Instance()),  # type: ignore[abstract]  # one call
        )
        tls = Credentials(of(Party.JOB)) if has_credentials else None
        server = await serve([service], "127.0.0.1:0", tls=tls)
        closing.push_async_callback(partial(server.stop, grace_s=0.0))
        channels = Channels(default_timeout_s=5.0, tls=None if own is None else Credentials(own))
        closing.push_async_callback(channels.close)
        stub = instance_pb2_grpc.InstanceStub(channels.connect(server.endpoint, job_identity(JOB)))
        source = EventSource(INSTANCE, role=None, boot=1, now_ns=time.time_ns)
        body = events_pb2.Failed(what=events_pb2.Failed.WHAT_SAMPLE, message="x" * 100)
        yield (
            lambda: stub.GateReport(instance_pb2.GateReportRequest()),
            lambda: bus.events.publish(source.event(body, job=JOB, incarnation=1)),
            lambda: store.renew(JOB, INSTANCE, ttl_ms=10_000),
        )


async def measured(num_steps: int) -> list[dict[str, Any]]:
    """By side, the times of each part and of the whole step."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        async with AsyncExitStack() as closing:
            sides = {
                name: await closing.enter_async_context(side(_made(folder, name), has_credentials=name != OPEN))
                for name in (OPEN, "credentials")
            }
            times: dict[str, list[list[float]]] = {name: [] for name in sides}
            for number in range(_WARM_UP + num_steps):
                for name, steps in sides.items():
                    found = [await _milliseconds(each) for each in steps]
                    if number >= _WARM_UP:
                        times[name].append(found)
    return [_case(name, found) for name, found in times.items()]


def _made(folder: str, name: str) -> Path:
    (made := Path(folder) / name).mkdir()
    return made


async def _milliseconds(act: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await act()
    return (time.perf_counter() - began) * 1000


def _case(name: str, times: list[list[float]]) -> dict[str, Any]:
    parts = dict(zip(PARTS, zip(*times, strict=True), strict=True))
    whole = [sum(each) for each in times]
    return {
        "case": name,
        "step_p50_ms": median(whole),
        "step_p99_ms": quantiles(whole, n=100, method="inclusive")[98],
        **{f"{part}_p50_ms": median(found) for part, found in parts.items()},
        "steps": len(whole),
    }


def main() -> int:
    options = arguments("What a cluster costs.")
    configure_logging("benchmark", level="ERROR")
    without, with_them = cases = asyncio.run(measured(QUICK_STEPS if options.quick else STEPS))
    losses: dict[str, Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]]
    losses = {f"failover_{server}_s": partial(failover, server=server) for server in ("redis", "nats")}
    if are_possible():
        losses["node_loss_s"] = node_loss
    lost: dict[str, float] = {}
    for name, loses in () if options.quick else losses.items():
        runs = []
        for _ in range(LOSSES):
            with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
                runs.append(asyncio.run(loses(Path(folder))))
            print(runs[-1], flush=True)
        cases += runs
        lost[name] = median(each["lost_s"] for each in runs)
    cases.append(decided(is_quick=options.quick))
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        cold, warm = starts = submitted(Path(folder), 1 if options.quick else RUNS)
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        in_place, anew = reloads = reloaded(Path(folder), 1 if options.quick else RELOADS)
    cases += starts + reloads
    figures = {"tls_overhead": with_them["step_p50_ms"] / without["step_p50_ms"]}
    figures |= {f"{part}_overhead": with_them[f"{part}_p50_ms"] / without[f"{part}_p50_ms"] for part in PARTS}
    figures |= lost
    figures["submit_over_cold_run"] = warm["first_iteration_s"] / cold["first_iteration_s"]
    figures["reload_job_lost_s"], figures["restart_job_lost_s"] = in_place["job_lost_s"], anew["job_lost_s"]
    figures["reload_s"] = in_place["command_s"]
    figures["jobs_1000_decide_ms"] = next(each["round_p99_ms"] for each in cases if "round_p99_ms" in each)
    against = "the same servers without credentials, as any process may use them; a cold tidegate run; down and up"
    return publish(Report(name="cluster", figures=figures, goals=GOALS, cases=cases, against=against), options)


if __name__ == "__main__":
    sys.exit(main())
