"""Notes how far the clocks of a job's other machines are from this one's, as long as the job runs (`tidegate.clocks`).

Invariant: an agent that does not answer costs a note and nothing else. [test_machine: does_not_answer_costs_a_note]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.clocks import EVERY_S, FILE, Offset, line_of
from tidegate.config.sections.job import ClusterSection
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.hosted import stub_of
from tidegate.types import NodeId
from tidegate.v1 import machine_pb2

NUM_EXCHANGES = 8
ANSWER_S = 5.0


@asynccontextmanager
async def noted_clocks(cluster: ClusterSection, folder: Path) -> AsyncIterator[None]:
    """Within the block, a line for each machine goes to the folder of the spans at once, and then every `EVERY_S`."""
    if not cluster.machines:
        yield
        return
    noting = asyncio.create_task(_note(cluster, folder / FILE))
    try:
        yield
    finally:
        noting.cancel()
        (ended,) = await asyncio.gather(noting, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            structlog.get_logger("launcher").warning("clocks were not noted to the end", error=str(ended))


async def _note(cluster: ClusterSection, path: Path) -> None:
    log, tls = structlog.get_logger("launcher"), Credentials(Path(cluster.machine_credentials))
    channels = Channels(default_timeout_s=ANSWER_S, tls=tls)
    stubs = [(machine, stub_of(channels, machine, tls.identity.cluster)) for machine in cluster.machines]
    try:
        while True:
            for machine, stub in stubs:
                try:
                    line = line_of(map(NodeId, machine.nodes), await offset_of(stub))
                    with path.open("a") as stream:
                        stream.write(line)
                except (PeerUnavailable, PeerRefused, OSError) as error:
                    log.warning("the clock is not known", machine=machine.name, error=str(error))
            await asyncio.sleep(EVERY_S)
    finally:
        await channels.close()


async def offset_of(stub: Any, *, now_ns: Callable[[], int] = time.monotonic_ns) -> Offset:
    """The offset of the fastest of several exchanges. PeerUnavailable, PeerRefused."""
    found = []
    for _ in range(NUM_EXCHANGES):
        asked_ns = now_ns()
        there_ns = (await stub.GetClock(machine_pb2.GetClockRequest())).monotonic_ns
        found.append(Offset.measured(asked_ns, there_ns, now_ns()))
    return min(found, key=lambda each: each.error_ns)
