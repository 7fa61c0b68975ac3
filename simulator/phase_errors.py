"""How far iterations that the simulator makes with fitted costs are from those that were measured, phase by phase.

Each half of the iterations is simulated, with its own lengths, by costs that were fitted to the other half, so that no
fit is compared with what it was made of; a run of one iteration has no other half, and is compared with itself.
What phases take overlaps: they do not add up to the iteration. The switch of GPUs is in no run that `calibrate` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from simulator.calibration import all_tokens, calibrated, scenario_of, world_of
from simulator.happenings import What
from simulator.scenario import Scenario
from tidegate.recorded import RecordedIteration, RecordedRun

COLUMNS = ("phase", "measured_s", "simulated_s", "error_percent")
TOLD = "Medians; each half of the iterations by costs fitted to the other. Nothing moved: of switches nothing is known."


@dataclass(frozen=True, slots=True)
class PhaseError:
    """Medians over the iterations. `measured_s` of inference: of its GPUs, added up."""

    phase: str
    measured_s: float
    simulated_s: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.simulated_s / self.measured_s - 1)

    def row(self) -> dict[str, float | str]:
        seconds = {"measured_s": round(self.measured_s, 4), "simulated_s": round(self.simulated_s, 4)}
        return {"phase": self.phase, **seconds, "error_percent": round(self.error_percent, 1) + 0.0}

    def told(self) -> str:
        percent = round(self.error_percent) + 0
        return f"{self.phase}: {self.simulated_s:.3g} s, measured {self.measured_s:.3g} s ({percent:+d} %)"


def of_run(run: RecordedRun) -> tuple[PhaseError, ...]:
    """Those that took no time in the run are left out."""
    pairs = [
        (_measured(iteration), _simulated(iteration, scenario, run))
        for fitted_to, compared in _halves(run.iterations)
        for scenario in [scenario_of(calibrated(replace(run, iterations=fitted_to)))]
        for iteration in compared
    ]
    found = [
        PhaseError(phase, median(was[phase] for was, _ in pairs), median(now[phase] for _, now in pairs))
        for phase in pairs[0][0]
    ]
    return tuple(each for each in found if each.measured_s > 0)


_Iterations = tuple[RecordedIteration, ...]


def _halves(iterations: _Iterations) -> Sequence[tuple[_Iterations, _Iterations]]:
    """(to fit to, to compare)."""
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
