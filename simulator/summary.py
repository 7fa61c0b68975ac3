"""Summaries of the runs of one scenario, in the figures that people compare policies by.

Ratios are to the first run. The bound is that of the scenario, the same for every policy of one seed. A run's shares of
GPU time add up to 100 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.run import Run
from tidegate.timeline import Span, state_lengths
from tidegate.timeline_page.page import STATES
from tidegate.types import GpuId

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run.

    speedup            = iteration_s of the first run / iteration_s
    over_bound_percent = 100 * (iteration_s / bound - 1)
    """

    policy: str
    seed: int
    iteration_s: float
    speedup: float
    over_bound_percent: float
    state_percent: Mapping[str, float]
    """The share of all GPUs' time in each state, in the order of a legend."""
    num_moves: int
    num_samples: int
    num_lost: int

    def row(self) -> dict[str, Any]:
        """One table row, with a column for each figure."""
        return {
            "policy": self.policy,
            "iteration_s": round(self.iteration_s, 3),
            "speedup": round(self.speedup, 4),
            "over_bound_percent": round(self.over_bound_percent, 2),
            **{f"{state}_percent": round(share, 3) for state, share in self.state_percent.items()},
            "num_moves": self.num_moves,
            "num_samples": self.num_samples,
            "num_lost": self.num_lost,
        }


def summaries(runs: Sequence[Run]) -> tuple[Summary, ...]:
    """The summaries. Each has all states that occur in any run."""
    percents = [_state_percent(run) for run in runs]
    found = {state for each in percents for state in each}
    states = [*(state for state in STATES if state in found), *sorted(found - STATES.keys())]
    return tuple(
        Summary(
            policy=run.policy,
            seed=run.seed,
            iteration_s=run.iteration_s,
            speedup=runs[0].iteration_s / run.iteration_s,
            over_bound_percent=100 * (run.iteration_s / run.bound.bound_s - 1),
            state_percent={state: percent.get(state, 0.0) for state in states},
            num_moves=run.num_moves,
            num_samples=run.num_samples,
            num_lost=run.num_lost,
        )
        for run, percent in zip(runs, percents, strict=True)
    )


def lanes_of(run: Run) -> dict[GpuId, tuple[Span, ...]]:
    """The spans of each GPU in whole nanoseconds. Neighbours share their boundary: no time is lost or counted twice."""
    return {
        gpu: tuple(Span(_ns(span.start_s), _ns(span.end_s), span.state) for span in spans)
        for gpu, spans in run.timeline.items()
    }


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _state_percent(run: Run) -> dict[str, float]:
    lengths = state_lengths(span for spans in lanes_of(run).values() for span in spans)
    total = sum(lengths.values())
    return {state: 100 * length / total for state, length in lengths.items()}
