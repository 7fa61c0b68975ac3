"""The time that a job loses when a replica of its stores dies, or the agent of a machine with one of its nodes.

- The stores: the primary of Redis, or the NATS server that leads its streams. Both have replicas on this machine
  (`tests/replicated.py`).
- The node: all its processes die with the agent, which is started again at once. The machine is a network namespace
  (`tests/two_machines.py`), which only root can make.

It dies after the first optimizer update of an iteration. The time lost is that of this iteration and the next one, from
new weights to new weights, less twice the median of the job's other iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.e2e.jobs import UPDATES_PER_ITERATION, RunningJob, replicated_job, running
from tests.replicated import Replicated
from tests.two_machines import linked, two_machines
from tidegate.adapters import subjects
from tidegate.types import JobId

ITERATIONS = 7
STRUCK = 2
"""The iteration in which the server dies. The first ones warm up."""
_JOB = "plain"


async def failover(folder: Path, server: str) -> dict[str, Any]:
    """`server`: redis or nats. AssertionError where the job does not finish, or loses a sample."""
    async with (
        Replicated(folder / "servers") as servers,
        running(replicated_job(servers, algorithm__iterations=ITERATIONS), folder) as job,
    ):
        await job.until_trained(STRUCK * UPDATES_PER_ITERATION + 1)
        killed = "valkey0" if server == "redis" else await servers.leader_of(subjects.events_stream(JobId(_JOB)))
        servers.kill(killed)
        summary = (await job.result())["summary"]
    return _case(f"{server} fails over", job, summary)


async def node_loss(folder: Path) -> dict[str, Any]:
    """AssertionError where the job does not finish, or loses a sample."""
    with linked(), two_machines(folder) as lab:
        async with running(lab.job(_JOB, algorithm__iterations=ITERATIONS), lab.jobs) as job:
            await job.until_trained(STRUCK * UPDATES_PER_ITERATION + 1)
            lab.kill_agent()
            lab.start_agent()
            summary = (await job.result())["summary"]
    return _case("a node is lost and comes back", job, summary)


def _case(name: str, job: RunningJob, summary: Mapping[str, Any]) -> dict[str, Any]:
    assert (summary["lost"], summary["duplicates"]) == (0, 0), summary
    published = sorted(
        event.occurred_unix_ns / 1e9 for event in job.events if event.WhichOneof("body") == "weights_published"
    )
    took_s = [later - earlier for earlier, later in pairwise(published)]
    struck, others = took_s[STRUCK : STRUCK + 2], took_s[1:STRUCK] + took_s[STRUCK + 2 :]
    return {
        "case": name,
        "lost_s": sum(struck) - 2 * median(others),
        "struck_iterations_s": [round(each, 2) for each in struck],
        "other_iterations_s": [round(each, 2) for each in others],
    }
