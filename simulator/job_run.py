"""A whole job under one policy: a row of figures for each iteration, and their sums.

All iterations go through one state of the scheduler, so the policy keeps what it has learned. Time is that of the job.

    seconds  = from the end of the iteration before to the end of this one
    wait_s   = the part of it in which no attempt was under way, after a loss
    tokens   = generated tokens of responses

Invariants:
- The seconds of the iterations add up to those of the job. [test_job_run: seconds_add_up]
- The GPU time by state of an iteration adds up to its seconds on all GPUs. [test_job_run: gpu_time_adds_up]
- A job of one iteration is a run of one iteration. [test_job_run: a_job_of_one_iteration_is_a_run]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.policy import Policy
from simulator.gpus import Doing
from simulator.happenings import Happening, What
from simulator.job_iterations import SimulatedJob
from simulator.job_spec import mean_tokens
from simulator.outcome import Run
from simulator.scheduled import Finished, Scheduled


@dataclass(frozen=True, slots=True)
class IterationRow:
    """The figures of one iteration.

    `mean_tokens` is the mean length of its responses. `expected_mean_tokens` is what the scheduler expected before it,
    from the iterations that it had seen. `num_hinted`: prompts with a hint. `gpu_s`: GPU-seconds by state, of all
    attempts. `num_restarts`: attempts that ended with the loss of the actor's state.
    """

    iteration: int
    ends_s: float
    seconds: float
    wait_s: float
    num_tokens: int
    mean_tokens: float
    expected_mean_tokens: float
    num_hinted: int
    num_moves: int
    num_samples: int
    num_filtered: int
    num_lost: int
    num_restarts: int
    bound_s: float
    gpu_s: Mapping[str, float]
    missed_faults: tuple[Happening, ...] = ()


@dataclass(frozen=True, slots=True)
class JobRun:
    policy: str
    seed: int
    num_gpus: int
    rows: tuple[IterationRow, ...]

    @property
    def total_s(self) -> float:
        return self.rows[-1].ends_s

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_moves(self) -> int:
        return sum(row.num_moves for row in self.rows)

    @property
    def gpu_s(self) -> Mapping[str, float]:
        return {state.value: sum(row.gpu_s.get(state, 0.0) for row in self.rows) for state in Doing}


def simulate_job(job: SimulatedJob, policy: Policy, *, name: str) -> JobRun:
    """Simulate all iterations. ValueError: the policy cannot run the job. Unfinished: as `simulator.run.simulate`."""
    policy.check(job.spec)
    rows: list[IterationRow] = []
    expected = mean_tokens(job.spec.lengths)
    for finished in Scheduled(job.iteration(0), policy).run_job(job, name):
        rows.append(_row(finished, len(rows), before_s=rows[-1].ends_s if rows else 0.0, expected=expected))
        expected = mean_tokens(finished.learned.lengths or job.spec.lengths)
    return JobRun(name, job.seed, len(job.scenario.cluster.gpus()), tuple(rows))


def _row(finished: Finished, number: int, *, before_s: float, expected: float) -> IterationRow:
    run, workload = finished.run, finished.simulated.workload
    lengths = workload.lengths
    attempts = (*finished.abandoned, run)
    # An attempt that was abandoned as it began has no spans.
    first_gpus = [next(iter(each.timeline.values())) for each in attempts if each.iteration_s]
    ends = [before_s, *(spans[-1].end_s for spans in first_gpus)]
    wait_s = sum(spans[0].start_s - end_s for spans, end_s in zip(first_gpus, ends[:-1], strict=True))
    return IterationRow(
        iteration=number,
        ends_s=ends[-1],
        seconds=ends[-1] - before_s,
        wait_s=wait_s,
        num_tokens=lengths.num_tokens,
        mean_tokens=lengths.num_tokens / (workload.num_groups * workload.group_size),
        expected_mean_tokens=expected,
        num_hinted=sum(hint > 0 for hint in lengths.hints),
        num_moves=sum(each.num_moves for each in attempts),
        num_samples=run.num_samples,
        num_filtered=len(workload.filtered) * workload.group_size,
        num_lost=run.num_lost,
        num_restarts=len(finished.abandoned),
        bound_s=run.bound.bound_s,
        gpu_s=_gpu_s(attempts, wait_s=wait_s),
        missed_faults=tuple(each for each in run.history if each.what is What.FAULT_MISSED),
    )


def _gpu_s(attempts: Sequence[Run], *, wait_s: float) -> Mapping[str, float]:
    """The GPU-seconds by state. While a component waits for lost GPUs, all others wait too."""
    found = dict.fromkeys(Doing, 0.0)
    for spans in (spans for run in attempts for spans in run.timeline.values()):
        for span in spans:
            found[span.state] += span.end_s - span.start_s
    for spans in attempts[-1].timeline.values():
        found[Doing.LOST if spans[0].state is Doing.LOST else Doing.WAITING] += wait_s
    return {state.value: seconds for state, seconds in found.items() if seconds}
