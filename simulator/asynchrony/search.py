"""The best fixed split of an asynchronous training: what a user would tune.

1. A balanced training of the same lengths shows about where it lies.
2. From there it climbs: of the neighbouring splits the fastest in a simulation, until none is faster.

Invariant: no neighbour of the split is faster. [test_async_training: no_neighbour_of_the_tuned_split]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from services.scheduler.policy.balance import Sizes, Split
from simulator.asynchrony.course import Asynchrony
from simulator.asynchrony.run import simulate_async, sizes_of
from simulator.lengths import Lengths
from simulator.scenario import Scenario


def tuned_split(scenario: Scenario, rules: Asynchrony, lengths: Sequence[Lengths]) -> Split:
    """ScenarioError: the scenario's placement is no start."""
    sizes = sizes_of(scenario)

    @cache
    def seconds(split: Split) -> float:
        return simulate_async(scenario, rules, lengths, split=split).seconds

    at = simulate_async(scenario, rules, lengths, balances=True).splits[-1][1]
    while True:
        best = min([at, *neighbours(at, sizes)], key=seconds)
        if best == at:
            return at
        at = best


def neighbours(split: Split, sizes: Sizes) -> Iterator[Split]:
    """Splits with one copy more or less, and with inference GPUs for about an engine more or less. The rollout has the
    rest."""
    scorers = -(-sizes.engine // sizes.scorer) * sizes.scorer
    for more_copies, more_inference in ((-1, 0), (1, 0), (0, -scorers), (0, scorers)):
        copies, inference = split.copies + more_copies, split.inference + more_inference
        engines = (sizes.num_gpus - copies * sizes.copy - inference) // sizes.engine
        if sizes.fewest_copies <= copies <= sizes.most_copies and inference >= sizes.scorer and engines >= 1:
            yield Split(engines, copies, inference)
