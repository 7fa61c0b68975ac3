"""The best fixed splits of a training's GPUs, strict and asynchronous, and what changing them between iterations gains.

A search climbs: from a split it goes to the fastest neighbour, until none is faster. A neighbour of a strict split has
one copy of the trainer more or less, or inference GPUs for one engine more or less. It may have more of the one and
less of the other, or another order of prompts.

A strict split learns nothing, so its iterations are simulated one by one. An asynchronous one is simulated over
`WINDOW` iterations, in its steady seconds (`simulator.asynchrony.search`).

`following` splits are the best of each sampled iteration by itself. To change them costs nothing, so no policy that
moves GPUs only between iterations gains more, up to the steps of the search.

Invariant: no neighbour of the split that is found is faster. [test_training_sim: no_neighbour_of_the_best_split]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TypeVar

from services.scheduler.policy.balance import Split as AsyncSplit
from services.scheduler.state.layouts import engine_size, with_dp
from simulator.asynchrony.course import Asynchrony
from simulator.asynchrony.run import simulate_async
from simulator.asynchrony.search import steady_s, tuned_split
from simulator.best_split import Split, static_seconds, with_split
from simulator.job_iterations import SimulatedJob
from simulator.lengths import Lengths
from simulator.scenario import Scenario
from tidegate.types import Layout, PromptOrder

WINDOW = 6
"""The mean length grows by 4 % in it at most. With a staleness of 1 four iterations count."""
_S = TypeVar("_S")


def climbed(at: _S, around: Callable[[_S], Iterable[_S]], seconds: Callable[[_S], float | tuple[float, int]]) -> _S:
    """The split from which no neighbour is faster."""
    while True:
        best = min([at, *around(at)], key=seconds)
        if best == at:
            return at
        at = best


class StrictTraining:
    """One training under one seed. Its lengths do not depend on the split. `scenario`: its placement is where the
    search begins."""

    def __init__(self, scenario: Scenario, num_iterations: int, seed: int) -> None:
        self._scenario, self._num_iterations, self._seed = scenario, num_iterations, seed
        home = scenario.placement().layout
        assert home is not None, "a training has a trainer"
        self._home: Layout = home
        self._step = engine_size(self.job().spec)
        self._job_of = cache(self.job)
        self.seconds = cache(self._seconds)

    def job(self, split: Split | None = None) -> SimulatedJob:
        """The job in this split. None: in that of the scenario."""
        scenario = with_split(self._scenario, split) if split else self._scenario
        assert scenario is not None, f"{split} is no start"
        return SimulatedJob(scenario, self._num_iterations, self._seed)

    def best(self, iterations: Sequence[int], near: Split | None = None) -> Split:
        """The split with the fewest seconds of these iterations together."""
        first = Split(self._home, len(self._scenario.placement().inference), PromptOrder.LONGEST_FIRST)
        return climbed(near or first, self.neighbours, lambda split: self.sum_s(split, iterations))

    def sum_s(self, split: Split, iterations: Iterable[int]) -> float:
        return sum(self.seconds(split, number) for number in iterations)

    def following_s(self, start: Split, iterations: Sequence[int]) -> float:
        """The seconds of these iterations, each in its best split."""
        total = 0.0
        for number in iterations:
            start = self.best((number,), start)
            total += self.seconds(start, number)
        return total

    def neighbours(self, split: Split) -> Iterator[Split]:
        yield from (replace(split, order=order) for order in PromptOrder if order is not split.order)
        for more_copies, more_engines in product((-1, 0, 1), repeat=2):
            copies, inference = split.actor.dp + more_copies, split.num_inference + more_engines * self._step
            layout = with_dp(self._home, copies) if copies > 0 and more_copies != more_engines else None
            other = replace(split, actor=layout, num_inference=inference) if layout and inference > 0 else None
            if other and with_split(self._scenario, other):
                yield other

    def _seconds(self, split: Split, number: int) -> float:
        return static_seconds(self._job_of(split).iteration(number), split.order)


def async_following(
    scenario: Scenario, rules: Asynchrony, lengths: Sequence[Lengths], start: AsyncSplit, windows: Iterable[int]
) -> tuple[float, float]:
    """Seconds of windows of iterations that begin at these numbers: in the split `start`, and each in its best one."""
    fixed_s, total_s, at = 0.0, 0.0, start
    for begin in windows:
        some = lengths[begin : begin + WINDOW]
        at = tuned_split(scenario, rules, some, near=at)
        runs = (simulate_async(scenario, rules, some, split=split) for split in (start, at))
        in_start_s, in_best_s = (steady_s(run, rules) for run in runs)
        fixed_s, total_s = fixed_s + in_start_s, total_s + in_best_s
    return fixed_s, total_s
