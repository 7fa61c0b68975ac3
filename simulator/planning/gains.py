"""What moving GPUs would gain over the best fixed split, case by case.

    gain = seconds of an iteration under `static` in the split / seconds under `tide` that starts in it

In each case the split is tuned anew, as a user tunes it on iterations and not on what a config says: a search around
the split of the assumed case. Both are timed on the same lengths, which no search draws.

Invariant: the same scenario gives the same gains. [test_gains: the_same_scenario_gives_the_same_gains]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import Any

from simulator.best_split import BestSplit, Effort, Split, best_split, split_seconds
from simulator.planning.cases import CASES, Case, in_case
from simulator.policies import policies_of
from simulator.run import simulate
from simulator.scenario import Scenario
from simulator.world import Unfinished

MOVING = "tide"
Mapped = Callable[..., Iterable[Any]]
"""`map`, or the same of a pool of processes."""
AROUND = Effort(num_seeds=1, last_step_share=1 / 8)
"""Steps of an eighth of the GPUs on one seed: our choice, for speed."""


@dataclass(frozen=True, slots=True)
class CaseGain:
    """`num_runs`: simulated iterations of the search of the split."""

    case: Case
    split: BestSplit
    split_s: float
    moving_s: float
    num_runs: int

    @property
    def gain(self) -> float:
        return self.split_s / self.moving_s


@dataclass(frozen=True, slots=True)
class Gains:
    """The gains by case, the assumed one first. `refused`: why `tide` cannot run the job; then there are none."""

    cases: Sequence[CaseGain] = ()
    refused: str = ""

    @property
    def median(self) -> float:
        return median(each.gain for each in self.cases)

    @property
    def range(self) -> tuple[float, float]:
        found = [each.gain for each in self.cases]
        return min(found), max(found)


def gains_over(found: BestSplit, scenario: Scenario, mapped: Mapped = map) -> Gains:
    """`found`: the best split of the scenario as assumed. `mapped`: as `map`, perhaps in other processes."""
    try:
        return Gains([*mapped(_gain, repeat(found), repeat(scenario), CASES)])
    except (ValueError, Unfinished) as error:
        return Gains(refused=str(error))


def moving_seconds(scenario: Scenario, seed: int) -> float:
    """One iteration under `tide`. ValueError: it cannot run the job. Unfinished: as `simulate`."""
    return simulate(scenario, policies_of([MOVING], scenario)[MOVING], name=MOVING, seed=seed).iteration_s


def _gain(found: BestSplit, scenario: Scenario, case: Case) -> CaseGain:
    is_assumed = case == CASES[0]
    own = found if is_assumed else _tuned(in_case(scenario, case), found.split)
    seconds = split_seconds(own.scenario, own.order, scenario.seed)
    return CaseGain(case, own, seconds, moving_seconds(own.scenario, scenario.seed), own.num_runs)


def _tuned(scenario: Scenario, near: Split) -> BestSplit:
    return best_split(scenario, effort=AROUND, near=near)
