"""What each part of `tide` is worth: `python -m benchmarks.ablation [--json] [--quick] [--save]`.

A part is what can be left out of the policy by itself (`ablation_parts`). On each seed `tide` runs with and without it,
on the same lengths and costs:

    gain = seconds of tide without the part / seconds of tide - 1       above 0: the part makes iterations shorter

A setting's gain is the median over its seeds. A part has these figures, over the settings in which it may act:

    gain_X         the median of the settings' gains
    gain_most_X    the largest of them; the case names its setting
    gain_mean_X    their mean, of which gain_error_X is the standard error: the spread between settings over the root
                   of their number

A part is worth keeping where the first is at least `LEAST_MEDIAN`, or the second at least `LEAST_ANYWHERE`. Some parts
are kept for another reason, which stands at them (`Part.kept_for`).

A search of plans is chaotic: any change of a forecast, however small, makes single iterations some percent longer or
shorter. `nothing` shows how much. It replaces no part, and lays forecasts out in 127 intervals where there are 128.

The seeds of `TUNING` serve to choose, those of `REPORTED` to report; short settings have all of them, the others the
first `LONG_SEEDS`. It takes some 40 minutes of one core. `--quick` has the short settings and one seed of `TUNING`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import mean, median, stdev
from typing import Any

from benchmarks import tide_parts
from benchmarks.ablation_parts import NOTHING, PARTS, Kind, Part
from benchmarks.direct import simulate
from benchmarks.iteration import basis_of, config_of
from benchmarks.iteration_grid import CELLS, FIXED
from benchmarks.report import Report, arguments, publish
from benchmarks.told_wrong import LAWS, WRONGS
from benchmarks.wrong_rates import MisinformedPolicy, Wrong
from services.scheduler.policy.tide.foresight import TideRules
from simulator.job_scenario import scenario_of
from simulator.scenario import Scenario, load_scenario

TUNING, REPORTED = range(100, 105), range(480, 485)
LONG_SEEDS = 2
LEAST_MEDIAN, LEAST_ANYWHERE = 0.005, 0.02
GOALS = {"num_parts_of_little_worth": "<= 0"}
FIGURES = ("gain", "gain_most", "gain_mean", "gain_error")
AS_IT_IS = ""
"""The name of `tide` with all its parts."""

CELLS_TRIED = (
    "long tails",
    "dear log-probabilities",
    "dear moves",
    "H800, noisy hints, noise, small cache, dear log-probabilities",
    "hard to plan: slow trainer, dear moves, no hints, wide groups, noise",
    "fixed order: dear moves, no hints, noise",
)
JOBS: Mapping[str, Sequence[str]] = {
    "8 modelled slots": (),
    "8 modelled slots, a fixed order": FIXED,
}
"""The iteration of `benchmarks.iteration`, with drawn lengths."""
TOLD_TRIED = (
    ("published_fit", "spreads x0.5"),
    ("roofline", "hints of other prompts"),
    ("roofline", "trainer x0.7"),
    ("published_fit", "trainer x1.3"),
    ("published_fit", "spreads x0.5, hints of other prompts, trainer x1.3"),
    ("roofline", "spreads x2, median x0.5, decoding x0.7"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """`wrong`: what the policy is told. None: the truth."""

    kind: Kind
    scenario: Callable[[], Scenario]
    wrong: Wrong | None = None

    def seeds(self, among: Sequence[int]) -> Sequence[int]:
        return among if self.kind is Kind.SHORT else among[:LONG_SEEDS]

    def seconds(self, part: Part, seed: int) -> float:
        scenario = self.scenario()
        policy = part.policy(TideRules(**scenario.scheduler.tide.model_dump()))
        told = policy if self.wrong is None else MisinformedPolicy(policy, self.wrong)
        with part.left_out():
            return simulate(scenario, told, seed=seed, directly=True).iteration_s


def _settings() -> Iterator[tuple[str, Setting]]:
    for name, each in tide_parts.SETTINGS.items():
        is_short = any(word.startswith("algorithm.prompts_per_iteration") for word in each.overrides)
        is_fixed = not set(FIXED).isdisjoint(each.overrides)
        yield name, Setting(Kind.FIXED if is_fixed else Kind.SHORT if is_short else Kind.ARRIVAL, each.scenario)
    for cell in CELLS:
        if cell.name in CELLS_TRIED:
            yield cell.name, Setting(Kind.FIXED if cell.is_fixed else Kind.ARRIVAL, cell.scenario)
    for name, words in JOBS.items():
        yield name, Setting(Kind.FIXED if words else Kind.SHORT, partial(_of_job, words))
    for law, wrong in TOLD_TRIED:
        yield f"{law} told {wrong}", Setting(Kind.TOLD_WRONG, partial(load_scenario, LAWS[law]), WRONGS[wrong])


def _of_job(words: Sequence[str]) -> Scenario:
    config = config_of(words)
    return scenario_of(config, basis_of(config))


SETTINGS: Mapping[str, Setting] = dict(_settings())


def seconds_of(part: str, setting: str, seed: int) -> float:
    return SETTINGS[setting].seconds(PARTS[part] if part else Part(), seed)


def case_of(name: str, gains: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The case of a part. `gains`: by setting, those of its seeds."""
    medians = {setting: median(each) for setting, each in gains.items()}
    most = max(medians, key=medians.__getitem__)
    return {
        "case": name,
        "gain": median(medians.values()),
        "gain_most": medians[most],
        "gain_mean": mean(medians.values()),
        "gain_error": stdev(medians.values()) / sqrt(len(medians)) if len(medians) > 1 else 0.0,
        "gains_most_in": most,
        "gain_min": min(min(each) for each in gains.values()),
        "gain_max": max(max(each) for each in gains.values()),
        "kept_for": PARTS[name].kept_for,
        "by_setting": {setting: list(each) for setting, each in gains.items()},
    }


def figures_of(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    little = [each for each in cases if each["gain"] < LEAST_MEDIAN and each["gain_most"] < LEAST_ANYWHERE]
    figures: dict[str, float] = {}
    for each in cases:
        figures |= {f"{figure}_{each['case']}": each[figure] for figure in FIGURES}
    unexplained = [each for each in little if each["case"] != NOTHING and not each["kept_for"]]
    return figures | {"num_parts_of_little_worth": len(unexplained)}


def main() -> int:
    options = arguments("What each part of tide is worth, simulated.")
    among = TUNING[:1] if options.quick else REPORTED
    settings = {name: each for name, each in SETTINGS.items() if not options.quick or each.kind is Kind.SHORT}
    with ProcessPoolExecutor() as pool:
        found = {
            (part, name, seed): pool.submit(seconds_of, part, name, seed)
            for part in (AS_IT_IS, *PARTS)
            for name, setting in settings.items()
            if part == AS_IT_IS or setting.kind in PARTS[part].kinds
            for seed in setting.seeds(among)
        }
    cases = []
    for part in PARTS:
        gains: dict[str, list[float]] = {}
        for (of, name, seed), seconds in found.items():
            if of == part:
                as_it_is_s = found[AS_IT_IS, name, seed].result()
                gains.setdefault(name, []).append(seconds.result() / as_it_is_s - 1)
        cases += [case_of(part, gains)] if gains else []
    against = "tide with the part, on the same lengths and costs"
    return publish(Report("ablation", figures_of(cases), GOALS, cases, against), options)


if __name__ == "__main__":
    sys.exit(main())
