"""The best fixed split of an asynchronous training: what a user would tune.

    value = steady seconds, to be low; of equal ones the split with the most engines
    steady = seconds * max(1, trained tokens / generated tokens)

of the iterations without the first and the last `staleness`.

1. A balanced training of the same lengths shows about where it lies.
2. From there it climbs: of the neighbouring splits the fastest in a simulation, until none is faster.

When an asynchronous training begins, the rollout makes several iterations at once, and the trainer uses them up
afterwards. Meanwhile it trains more than the rollout makes: a split with too few engines looks up to 1.5 times as fast
as it is in the long run, for as many as five iterations. In the last `staleness` iterations no further one is issued.

Invariants:
- No neighbour of the split is faster. [test_async_training: no_neighbour_of_the_tuned_split]
- Few iterations have the steady seconds of many. [test_async_training: steady_seconds_are_those_of_a_longer]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from services.scheduler.policy.balance import Sizes, Split
from simulator.asynchrony.course import Asynchrony
from simulator.asynchrony.run import AsyncRun, simulate_async, sizes_of
from simulator.lengths import Lengths
from simulator.scenario import Scenario

NUM_STEADY = 4
"""Where engines end sequences under old weights, iterations may come in turns of two lengths or four."""


def num_ends(rules: Asynchrony) -> int:
    """The iterations at each end of a training that do not count."""
    return rules.staleness


def num_tuned(rules: Asynchrony) -> int:
    """The iterations on which a split is tuned."""
    return NUM_STEADY + 2 * num_ends(rules)


def steady_s(run: AsyncRun, rules: Asynchrony) -> float:
    """The steady seconds of the iterations that count; of all where a training is too short for any. To the ms, so that
    rounding decides nothing."""
    ends, count = num_ends(rules), len(run.iteration_s)
    own = slice(ends, count - ends) if count > 2 * ends else slice(None)
    trained, generated = sum(run.trained[own]), sum(run.generated[own])
    return round(sum(run.iteration_s[own]) * max(1.0, trained / max(1, generated)), 3)


def tuned_split(
    scenario: Scenario, rules: Asynchrony, lengths: Sequence[Lengths], *, near: Split | None = None
) -> Split:
    """`near`: where the search begins in place of 1. ScenarioError: the scenario's placement is no start."""
    sizes = sizes_of(scenario)

    @cache
    def value(split: Split) -> tuple[float, int]:
        return steady_s(simulate_async(scenario, rules, lengths, split=split), rules), -split.engines

    at = near or simulate_async(scenario, rules, lengths, balances=True).splits[-1][1]
    while True:
        best = min([at, *neighbours(at, sizes)], key=value)
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
