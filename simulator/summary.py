"""What runs of one scenario come to, in the figures that people compare policies by.

Invariants: a run's shares of GPU time add up to 100 %; ratios are to the run that is named first; the bound is the
scenario's, the same for every policy of one seed.
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
    """`speedup`: the first run's time over this one's; `over_bound_percent`: how much longer than the bound it took."""

    policy: str
    seed: int
    iteration_s: float
    speedup: float
    over_bound_percent: float
    state_percent: Mapping[str, float]
    """Of all GPUs' time, by state in the order of a legend."""
    num_moves: int
    num_samples: int
    num_lost: int

    def row(self) -> dict[str, Any]:
        """A column a figure."""
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
    """Each with all states that any of them has."""
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
    """Each GPU in whole nanoseconds; neighbours share their boundary: nothing is lost or counted twice."""
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
