"""How fast and at what cost the scheduler controls a job: `python -m benchmarks.control [--json] [--quick] [--save]`.

1. From a structural event to the arrival of its command at the lead, through the real scheduler process, NATS, Redis
   and gRPC. `alone` has no other events, `busy` has 1,000 progress events a second (`control_events`). The figures are
   the larger of the two cases. `back to back` is the rate at which commands follow each other at most.
2. The scheduler's CPU while the iterations of a real job run, of one core; the median of the iterations. The job is
   `examples/paced.yaml` with twice the prompts, under `tide`, at the pace of its GPUs.
3. The moves of slots to the actor in that job, from the decision to the first step, by part (`control_moves`).
   `move_s` is the median of all parts together, `move_decide_and_tell_s` of the scheduler's part.

`--quick`: few events, and a short job.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.control_events import FULL, PROGRESS_PER_S, QUICK, WORKS_S, measured
from benchmarks.control_job import QUICK as QUICK_JOB
from benchmarks.control_job import Ran, run_job
from benchmarks.report import Report, arguments, publish

GOALS = {
    "event_to_command_p99_ms": "<= 25",
    "progress_per_s": f">= {0.95 * PROGRESS_PER_S:g}",
    "scheduler_cpu_share": "<= 0.01",
    "move_decide_and_tell_s": "<= 0.1",
}
_CASES = {"back to back": (0.0, 0.0), "alone": (0.0, WORKS_S), "busy": (PROGRESS_PER_S, WORKS_S)}
"""By name: the progress events a second, and the mean seconds of an answer."""


def event_cases(*, is_quick: bool) -> list[dict[str, Any]]:
    cases = []
    sizes = QUICK if is_quick else FULL
    for name, (rate, works_s) in _CASES.items():
        with tempfile.TemporaryDirectory(prefix="control-") as folder:
            case = measured(name, Path(folder), sizes, progress_per_s=rate, works_s=works_s)
            cases.append(asyncio.run(case))
        print(*(f"{key}={value}" for key, value in cases[-1].items()), flush=True)
    return cases


def job_figures(ran: Ran) -> dict[str, float]:
    """RuntimeError where no slot went to the actor."""
    if not ran.moves:
        raise RuntimeError("no slot moved to the actor")
    return {
        "scheduler_cpu_share": median(ran.cpu_shares),
        "move_s": median(each.total_s for each in ran.moves),
        "move_decide_and_tell_s": median(each.decide_and_tell_s for each in ran.moves),
        "move_drain_s": median(each.drain_s for each in ran.moves),
        "move_switch_s": median(each.switch_s for each in ran.moves),
        "move_wait_s": median(each.wait_s for each in ran.moves),
        "num_moves": len(ran.moves),
    }


def main() -> int:
    options = arguments("From events to commands, the scheduler's CPU, and the parts of a move.")
    cases = event_cases(is_quick=options.quick)
    with tempfile.TemporaryDirectory(prefix="control-") as folder:
        ran = run_job(Path(folder), *(QUICK_JOB if options.quick else ()))
    for move in ran.moves:
        print(*(f"{key}={value}" for key, value in move.row().items()), flush=True)
    report = Report(
        name="control",
        figures={
            "event_to_command_p50_ms": max(case["p50_ms"] for case in cases[1:]),
            "event_to_command_p99_ms": max(case["p99_ms"] for case in cases[1:]),
            "commands_per_s_back_to_back": cases[0]["commands_per_s"],
            "progress_per_s": cases[-1]["progress_per_s"],
            **job_figures(ran),
        },
        goals=GOALS,
        cases=[
            *cases,
            {
                "case": "job",
                "iterations_s": [end - start for start, end in ran.iterations],
                "scheduler_cpu_shares": ran.cpu_shares,
                "num_events": ran.num_events,
            },
            *({"case": "move", **move.row()} for move in ran.moves),
        ],
        against="the wall time of the same events, iterations and moves",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
