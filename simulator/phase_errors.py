"""The error of simulated iterations with fitted costs against the measured iterations, phase by phase.

Each half of the iterations is simulated with its own lengths and with costs that are fitted to the other half. So no
fit is compared with its own data. A run of one iteration has no other half and is compared with itself. Phases overlap,
so their times do not add up to that of the iteration. No run that `calibrate` reads contains a switch of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from simulator.calibration import all_tokens, fitted_values, scenario_of, world_of
from simulator.happenings import What
from simulator.scenario import Scenario
from tidegate.recorded import RecordedIteration, RecordedRun

COLUMNS = ("phase", "measured_s", "simulated_s", "error_percent")
EXPLANATION = (
    "Medians; the costs for each half of the iterations are fitted to the other half. The run has no moves, so it "
    "shows nothing of switches."
)


@dataclass(frozen=True, slots=True)
class PhaseError:
    """Medians over the iterations. For the inference, `measured_s` is the sum over its GPUs."""

    phase: str
    measured_s: float
    simulated_s: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.simulated_s / self.measured_s - 1)

    def row(self) -> dict[str, float | str]:
        seconds = {"measured_s": round(self.measured_s, 4), "simulated_s": round(self.simulated_s, 4)}
        return {"phase": self.phase, **seconds, "error_percent": round(self.error_percent, 1) + 0.0}

    def summary(self) -> str:
        percent = round(self.error_percent) + 0
        return f"{self.phase}: {self.simulated_s:.3g} s, measured {self.measured_s:.3g} s ({percent:+d} %)"


def of_run(run: RecordedRun) -> tuple[PhaseError, ...]:
    """The errors of all phases that took time in the run."""
    pairs = [
        (_measured(iteration), _simulated(iteration, scenario, run))
        for fitted_to, compared in _halves(run.iterations)
        for scenario in [scenario_of(fitted_values(replace(run, iterations=fitted_to)))]
        for iteration in compared
    ]
    found = [
        PhaseError(phase, median(was[phase] for was, _ in pairs), median(now[phase] for _, now in pairs))
        for phase in pairs[0][0]
    ]
    return tuple(each for each in found if each.measured_s > 0)


_Iterations = tuple[RecordedIteration, ...]


def _halves(iterations: _Iterations) -> Sequence[tuple[_Iterations, _Iterations]]:
    """Pairs of (iterations to fit to, iterations to compare)."""
    if len(iterations) < 2:
        return [(iterations, iterations)]
    even, odd = iterations[::2], iterations[1::2]
    return [(even, odd), (odd, even)]


def _measured(iteration: RecordedIteration) -> dict[str, float]:
    return {
        "rollout": iteration.generating_s,
        "inference": iteration.inferring_s,
        "training": sum(each.seconds for each in iteration.minibatches),
        "iteration": iteration.seconds,
    }


def _simulated(iteration: RecordedIteration, scenario: Scenario, run: RecordedRun) -> dict[str, float]:
    history = list(world_of(iteration, scenario).happenings())
    at_s = {what: [each.at_s for each in history if each.what is what] for what in What}
    return {
        "rollout": at_s[What.ROLLOUT_FINISHED][0],
        "inference": all_tokens(iteration, run) / scenario.costs.inference.rate_tokens_per_s,
        "training": sum(at_s[What.MINIBATCH_FINISHED]) - sum(at_s[What.MINIBATCH_STARTED]),
        "iteration": at_s[What.ITERATION_FINISHED][0],
    }
