"""The error of a calibrated simulator against its job: `python -m benchmarks.calibration [--json]`.

The demo's job runs eight times on this machine, one after the other, each with a seed of its own. The costs are fitted
to the second, fourth and sixth run, so that a change of the machine's speed affects both sides. The other five runs are
compared with the fitted scenario, which is simulated under the static policy with five seeds. The seconds of a run are
the median of its iterations:

    relative_error = |median(simulated_s) / median(real_s) - 1|

`--quick`: one run to fit to and two to compare, each with four iterations after a short warm-up.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, arguments, publish, spread
from services.scheduler.policy.static import StaticPolicy
from simulator.calibration import fitted_values, scenario_text
from simulator.run import simulate
from simulator.scenario import load_scenario
from tidegate.recorded import RecordedRun, joined, recorded

DEMO = Path(__file__).resolve().parent.parent / "tidegate" / "demo.yaml"
QUICK = ("algorithm.iterations=4", "actor.warm_up.steps=20")
FITTED, FITTED_QUICK = (1, 3, 5), (1,)
"""The numbers of the runs to fit to."""
NUM_COMPARED, NUM_COMPARED_QUICK = 5, 2


def run_of(seed: int, folder: Path, changes: tuple[str, ...]) -> RecordedRun:
    """Run the demo's job from its start to its end."""
    words = [str(DEMO), f"seed={seed}", f"output_dir={folder}", *changes]
    subprocess.run([sys.executable, "-m", "cli", "run", *words], check=True, capture_output=True)
    return recorded(folder / "demo")


def case_of(name: str, seconds: list[float]) -> dict[str, Any]:
    return {"case": name, **{key if key == "runs" else f"{key}_s": value for key, value in spread(seconds).items()}}


def main() -> int:
    options = arguments("Run the demo, calibrate the simulator with one run, and compare with the others.")
    num_compared = NUM_COMPARED_QUICK if options.quick else NUM_COMPARED
    fitted_to = FITTED_QUICK if options.quick else FITTED
    with tempfile.TemporaryDirectory(prefix="calibration-") as root:
        runs = [
            run_of(seed, Path(root) / str(seed), QUICK if options.quick else ())
            for seed in range(num_compared + len(fitted_to))
        ]
        (path := Path(root) / "scenario.yaml").write_text(
            scenario_text(fitted_values(joined([runs[at] for at in fitted_to])))
        )
        scenario = load_scenario(path)
    iteration_s = [median(iteration.seconds for iteration in run.iterations) for run in runs]
    fitted_s = [iteration_s[at] for at in fitted_to]
    real_s = [seconds for at, seconds in enumerate(iteration_s) if at not in fitted_to]
    simulated_s = [simulate(scenario, StaticPolicy(), seed=seed).iteration_s for seed in range(num_compared)]
    cases = [case_of("real", real_s), case_of("simulated", simulated_s), case_of("fitted to", fitted_s)]
    for case in cases:
        print(case["case"], *(f"{key}={value:.4g}" for key, value in case.items() if key != "case"))
    figures = {
        "relative_error": abs(median(simulated_s) / median(real_s) - 1),
        "real_s": median(real_s),
        "simulated_s": median(simulated_s),
        "sync_share": scenario.costs.sync.fixed_s / median(simulated_s),
    }
    report = Report(
        name="calibration",
        figures=figures,
        goals={"relative_error": "<= 0.15"},
        cases=cases,
        against="runs of the demo's job that the costs were not fitted to",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
