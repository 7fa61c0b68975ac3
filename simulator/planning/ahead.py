"""Whether a rollout that runs ahead of the trainer would gain more than moving GPUs within strict iterations.

    tokens_per_s = response tokens of the timed iterations / their (steady) seconds

Each way on new weights has a fixed split of its own, tuned by `simulator.asynchrony.search` on lengths that are not
timed. Strict ways take the same iterations one by one. An asynchronous training has `staleness` iterations more at both
ends, and its steady seconds count.

Invariants:
- The lengths of the timed iterations are the same for every way. [test_gains: every_way_has_the_same_tokens]
- A staleness outside its range is refused before anything runs. [test_plan: a_wrong_config_of_plan]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from services.scheduler.policy.balance import Split
from simulator.asynchrony.course import Asynchrony, OnNewWeights
from simulator.asynchrony.run import simulate_async, sizes_of
from simulator.asynchrony.search import NUM_STEADY, num_ends, num_tuned, steady_s, tuned_split
from simulator.best_split import BestSplit, split_seconds, tuning_seeds
from simulator.planning.gains import MOVING, Mapped, moving_seconds
from simulator.scenario import Scenario
from simulator.world import Unfinished

NUM_TIMED = NUM_STEADY
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


def compared_ahead(found: BestSplit, scenario: Scenario, staleness: int, mapped: Mapped = map) -> Ahead:
    """`found`: the best split of the scenario. `mapped`: as `map`, perhaps in other processes."""
    if staleness == 0:
        return Ahead(0, refused="--staleness 0 asks for none")
    if scenario.actor_num_logical_shards is not None:
        return Ahead(staleness, refused="actor.num_logical_shards is set, and a reproducible job has strict iterations")
    try:
        found_ways = mapped(_ways, repeat(found), repeat(scenario), repeat(staleness), (None, *WAYS))
        return Ahead(staleness, [*chain.from_iterable(found_ways)])
    except (ValueError, Unfinished) as error:
        return Ahead(staleness, refused=str(error))


def _ways(found: BestSplit, scenario: Scenario, staleness: int, on_new_weights: OnNewWeights | None) -> list[Way]:
    """None: the strict ways."""
    seeds = [(scenario.seed + at) % 2**32 for at in range(NUM_TIMED)]
    if on_new_weights is None:
        return _strict(found, scenario, seeds)
    return [_way(found, Asynchrony(staleness=staleness, on_new_weights=on_new_weights), seeds)]


def _strict(found: BestSplit, scenario: Scenario, seeds: Sequence[int]) -> list[Way]:
    num_tokens = sum(scenario.read_lengths(seed).num_tokens for seed in seeds)
    own = found.scenario
    static_s = sum(split_seconds(own, found.order, seed) for seed in seeds)
    moving_s = sum(moving_seconds(own, seed) for seed in seeds)
    placed = own.placement()
    gpus = len(placed.actor), len(placed.rollout), len(placed.inference)
    return [Way("the best split", gpus, num_tokens / static_s), Way(MOVING, gpus, num_tokens / moving_s)]


def _way(found: BestSplit, rules: Asynchrony, seeds: Sequence[int]) -> Way:
    """The search begins at the best strict split's layout."""
    scenario = found.scenario
    tuning = [scenario.read_lengths(seed) for seed in tuning_seeds(scenario.seed, num_tuned(rules))]
    split = tuned_split(scenario, rules, tuning)
    timed = [scenario.read_lengths(seed) for seed in seeds]
    ends = tuning[: num_ends(rules)]
    run = simulate_async(scenario, rules, [*ends, *timed, *ends], split=split)
    num_tokens = sum(each.num_tokens for each in timed)
    return Way(rules.on_new_weights.value, _gpus(split, scenario), num_tokens / steady_s(run, rules))


def _gpus(split: Split, scenario: Scenario) -> tuple[int, int, int]:
    sizes = sizes_of(scenario)
    return split.copies * sizes.copy, split.engines * sizes.engine, split.inference
