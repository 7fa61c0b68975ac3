"""Whether a rollout that runs ahead of the trainer would gain more than moving GPUs within strict iterations.

    tokens_per_s = response tokens of the timed iterations / their seconds

Each way on new weights has a fixed split of its own, tuned by `simulator.asynchrony.search` on lengths that are not
timed. Strict ways take the same iterations one by one. Of an asynchronous training some iterations at both ends are
left out, in which the rollout runs ahead of nothing yet, or of nothing any more:

    iterations = staleness + NUM_TIMED + staleness

Invariants:
- The lengths of the timed iterations are the same for every way. [test_gains: every_way_has_the_same_tokens]
- A staleness outside its range is refused before anything runs. [test_plan: a_wrong_config_of_plan]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.policy.balance import Split
from simulator.asynchrony.course import Asynchrony, OnNewWeights
from simulator.asynchrony.run import simulate_async, sizes_of
from simulator.asynchrony.search import tuned_split
from simulator.best_split import BestSplit, split_seconds, tuning_seeds
from simulator.planning.gains import MOVING, moving_seconds
from simulator.scenario import Scenario
from simulator.world import Unfinished

NUM_TIMED = 2
"""The timed iterations. Single ones differ by 5 %."""
MOST_STALENESS = 8
"""Our limit of the work: each step takes two more simulated iterations in every run."""
WAYS = (OnNewWeights.ENDS_OLD, OnNewWeights.COMPUTES_CACHE)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a training, and its speed. `gpus`: of actor, rollout and inference at its start."""

    name: str
    gpus: tuple[int, int, int]
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """The strict ways first: the best split, then `tide`. `refused`: why there is no comparison."""

    staleness: int
    ways: Sequence[Way] = ()
    refused: str = ""

    def gain(self, way: Way) -> float:
        """How many times as fast as strict `tide`."""
        (moving,) = (each for each in self.ways if each.name == MOVING)
        return way.tokens_per_s / moving.tokens_per_s


def staleness_fault(staleness: int) -> str:
    """Empty: the plan can compare it."""
    if 0 <= staleness <= MOST_STALENESS:
        return ""
    return (
        f"--staleness {staleness} is outside 0 to {MOST_STALENESS}, the iterations by which a rollout may run ahead: "
        "take 1 for one step off, or 0 to compare no asynchrony"
    )


def compared_ahead(found: BestSplit, scenario: Scenario, staleness: int) -> Ahead:
    """`found`: the best split of the scenario."""
    if staleness == 0:
        return Ahead(0, refused="--staleness 0 asks for none")
    if scenario.actor_num_logical_shards is not None:
        return Ahead(staleness, refused="actor.num_logical_shards is set, and a reproducible job has strict iterations")
    try:
        return Ahead(staleness, [*_strict(found, scenario), *(_way(found, each, staleness) for each in WAYS)])
    except (ValueError, Unfinished) as error:
        return Ahead(staleness, refused=str(error))


def _timed_seeds(scenario: Scenario) -> list[int]:
    return [(scenario.seed + at) % 2**32 for at in range(NUM_TIMED)]


def _strict(found: BestSplit, scenario: Scenario) -> list[Way]:
    seeds = _timed_seeds(scenario)
    num_tokens = sum(scenario.read_lengths(seed).num_tokens for seed in seeds)
    own = found.scenario
    static_s = sum(split_seconds(own, found.order, seed) for seed in seeds)
    moving_s = sum(moving_seconds(own, seed) for seed in seeds)
    placed = own.placement()
    gpus = len(placed.actor), len(placed.rollout), len(placed.inference)
    return [Way("the best split", gpus, num_tokens / static_s), Way(MOVING, gpus, num_tokens / moving_s)]


def _way(found: BestSplit, on_new_weights: OnNewWeights, staleness: int) -> Way:
    """The search begins at the best strict split's layout."""
    scenario, rules = found.scenario, Asynchrony(staleness=staleness, on_new_weights=on_new_weights)
    tuning = [scenario.read_lengths(seed) for seed in tuning_seeds(scenario.seed, staleness + NUM_TIMED)]
    split = tuned_split(scenario, rules, tuning)
    timed = [scenario.read_lengths(seed) for seed in _timed_seeds(scenario)]
    ends = tuning[:staleness]
    run = simulate_async(scenario, rules, [*ends, *timed, *ends], split=split)
    seconds = sum(run.iteration_s[staleness : staleness + NUM_TIMED])
    return Way(on_new_weights.value, _gpus(split, scenario), sum(each.num_tokens for each in timed) / seconds)


def _gpus(split: Split, scenario: Scenario) -> tuple[int, int, int]:
    sizes = sizes_of(scenario)
    return split.copies * sizes.copy, split.engines * sizes.engine, split.inference
