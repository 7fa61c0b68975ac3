"""The time until a death is noticed and until the work continues: `python -m benchmarks.death [--json] [--quick]`.

A job of many short iterations runs on two nodes. The benchmark kills one process after another with SIGKILL in the
middle of an iteration, and takes the times from the events that follow:
- A worker's death is noticed by its service through a pidfd.
- The launcher restarts a killed service, whose next start is the event.
- A service that hangs (SIGSTOP) is noticed only by the end of its lease. Its length is configuration.
`--save` keeps the result.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import Report, arguments, publish, spread
from tests.e2e.jobs import Condition, RunningJob, running, small_job
from tidegate.v1.events_pb2 import Event

LEASE_TTL_S = 3.0
_GO_ON: Condition = lambda event: event.WhichOneof("body") == "iteration_reported"  # noqa: E731 - a condition by name


@dataclass(frozen=True, slots=True)
class Death:
    """The process that dies, and the later events of the notice and the recovery.

    A service dies at most `max_runs` times: the launcher gives up a service that ends more than five times in a minute.
    """

    name: str
    victim: Callable[[RunningJob], psutil.Process]
    noticed: Condition
    recovered: Condition
    max_runs: int = 100


def _is(body: str, source: str) -> Condition:
    return lambda event: event.WhichOneof("body") == body and event.source.startswith(source)


DEATHS = (
    Death("engine_worker", lambda job: job.worker("n0/2"), _is("failed", "rollout"), _is("gpus_acquired", "rollout")),
    Death("inference_worker", lambda job: job.worker("n1/3"), _is("failed", "inf"), _is("gpus_acquired", "inference")),
    Death("actor_worker", lambda job: job.worker("n1/1"), _is("failed", "actor"), _is("layout_committed", "actor")),
    Death(
        "rollout_service",
        lambda job: job.service("services.rollout", "n0"),
        _is("instance_joined", "rollout@n0"),
        _is("gpus_acquired", "rollout"),
        max_runs=4,
    ),
)


async def measure(num_runs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by death, then by `noticed` and `recovered`."""
    seconds: dict[str, dict[str, list[float]]] = {death.name: {"noticed": [], "recovered": []} for death in DEATHS}
    raw = small_job("death", algorithm__iterations=10_000, runtime__max_actor_restarts=10_000)
    raw["runtime"] |= {"lease_ttl_s": LEASE_TTL_S}
    with tempfile.TemporaryDirectory() as folder:
        async with running(raw, Path(folder)) as job:
            await job.until(_GO_ON)
            for number in range(num_runs):
                for death in [each for each in DEATHS if number < each.max_runs]:
                    killed_ns = time.time_ns()
                    death.victim(job).kill()
                    for what, condition in (("noticed", death.noticed), ("recovered", death.recovered)):
                        event = await job.until(_after(killed_ns, condition))
                        seconds[death.name][what].append((event.occurred_unix_ns - killed_ns) / 1e9)
                    await job.until(_after(time.time_ns(), _GO_ON))
            seconds["hung_service"] = {"noticed": [await _hang(job)]}
    return seconds


async def _hang(job: RunningJob) -> float:
    """Seconds from the stop of a service to the report that its lease expired."""
    hung = job.service("services.inference", "n0")
    hung_ns = time.time_ns()
    hung.send_signal(signal.SIGSTOP)
    event = await job.until(_after(hung_ns, lambda event: event.WhichOneof("body") == "instance_lost"))
    hung.send_signal(signal.SIGCONT)
    return (event.occurred_unix_ns - hung_ns) / 1e9


def _after(unix_ns: int, condition: Condition) -> Condition:
    def later(event: Event) -> bool:
        return event.occurred_unix_ns > unix_ns and condition(event)

    return later


def main() -> int:
    options = arguments("The time until a death is noticed, and until the work continues.")
    seconds = asyncio.run(measure(2 if options.quick else 7))
    cases = [
        {"case": name, "what": what} | spread(values)
        for name, kinds in seconds.items()
        for what, values in kinds.items()
    ]
    figures = {f"{case['case']}_{case['what']}_s": float(str(case["median"])) for case in cases}
    against = f"leases of {LEASE_TTL_S:g} s; a killed service is started again by the launcher after its pause"
    return publish(Report("death", figures, cases=cases, against=against), options)


if __name__ == "__main__":
    sys.exit(main())
