"""The iterations of a simulated job: the lengths of each by the drift, their hints, and the filtered groups.

1. The curve of the drift gives the mean (or the median) of an iteration.
2. The median of the scenario's law is found such that the law, cut at its limit, has this mean.
3. Lengths are drawn, for each iteration from a generator of its own.

With `drift.epoch_prompts` a prompt of the data set keeps its place in the law:

    row(i, k)   = (i * prompts_per_iteration + k) mod epoch_prompts      the prompt at position k of iteration i
    level(i, k) = median(i) * exp(sigma_prompt(i) * z(row))              z: drawn once for the job
    hint(i, k)  = level(of the last epoch, for this row) * exp(hint_sigma * z_hint);  none in the first epoch

Filtered groups are drawn apart from the lengths.

Invariants:
- The first iteration of a job without an epoch has the lengths of a run of one iteration.
  [test_job_iterations: first_iteration_is_that_of_one_run]
- The mean of an iteration's law is that of the curve. [test_job_iterations: the_mean_of_the_law_is_the_curves]
- The first epoch has no hint. [test_job_iterations: the_first_epoch_has_no_hint]
- Lengths do not depend on the number of iterations. [test_job_iterations: as_in_a_longer_job]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.state.values import JobSpec
from simulator.drift import Drift
from simulator.faults import Fault
from simulator.iteration import SimulatedIteration
from simulator.job_spec import job_of, mean_tokens, population_law
from simulator.lengths import Floats, LengthLaw, Lengths, LengthSection, lengths_at
from simulator.scenario import Scenario, ScenarioError, read_drift

MAX_ITERATIONS = 100_000
_HALVINGS = 60
"""A bisection between two medians that differ by a factor of a million is exact after so many."""
_OF_PROMPTS, _OF_FILTERS = 2**32, 2**32 + 1
"""Streams of random numbers besides those of the iterations."""


class SimulatedJob:
    """A job of `num_iterations` iterations under one seed.

    ScenarioError: the number is out of range, a fault names an iteration that the job does not have, or no law has the
    mean that the drift asks for.
    """

    def __init__(self, scenario: Scenario, num_iterations: int, seed: int) -> None:
        if not 1 <= num_iterations <= MAX_ITERATIONS:
            raise ScenarioError(
                f"--iterations {num_iterations:,}: a job has from 1 to {MAX_ITERATIONS:,} iterations; give one of these"
            )
        check_faults(scenario, num_iterations)
        self.scenario, self.num_iterations, self.seed = scenario, num_iterations, seed
        drift = read_drift(scenario)
        self._drift = drift
        self._sections = tuple(_section(scenario.lengths, drift, each) for each in range(num_iterations))
        self._prompts = _Prompts.drawn(scenario, seed) if scenario.drift.epoch_prompts else None
        spec = job_of(self._scenario_of(0), self._lengths(0))
        longest = max(section.max_tokens for section in self._sections)
        self.spec: JobSpec = replace(
            spec, num_iterations=num_iterations, lengths=replace(spec.lengths, max_tokens=longest)
        )

    def iteration(self, number: int) -> SimulatedIteration:
        own = self._scenario_of(number)
        workload = replace(own.workload_of(self._lengths(number)), filtered=self._filtered(number))
        return SimulatedIteration(own, self.seed, workload=workload, spec=self.spec)

    def new_faults(self, number: int, *, began_s: float) -> tuple[Fault, ...]:
        """The faults that are known from this iteration on."""
        return self.scenario.faults_of(number, began_s=began_s) if number else self.scenario.scheduled_faults()

    def _scenario_of(self, number: int) -> Scenario:
        return self.scenario.model_copy(update={"lengths": self._sections[number]})

    def _lengths(self, number: int) -> Lengths:
        if self._prompts is None:
            # The first iteration is that of a run without a job.
            return self._scenario_of(number).read_lengths((self.seed, number) if number else self.seed)
        rng = np.random.default_rng((self.seed, number))
        return self._prompts.lengths(self._sections, number, group_size=self.scenario.algorithm.group_size, rng=rng)

    def _filtered(self, number: int) -> frozenset[int]:
        if self._drift.trained_share is None:
            return frozenset()
        num_prompts = self.scenario.algorithm.prompts_per_iteration
        num_filtered = num_prompts - round(self._drift.trained_share.at(number) * num_prompts)
        order = np.random.default_rng((self.seed, _OF_FILTERS, number)).permutation(num_prompts)
        return frozenset(int(group) for group in order[:num_filtered])


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of the data set. `z`: their places in the law. `factor`: those of a long tail, 1 for most prompts."""

    num_per_iteration: int
    z: Floats
    factor: Floats

    @staticmethod
    def drawn(scenario: Scenario, seed: int) -> _Prompts:
        num_prompts, own = scenario.drift.epoch_prompts, scenario.lengths
        assert num_prompts is not None, "only a job with epochs has prompts that come again"
        rng = np.random.default_rng((seed, _OF_PROMPTS))
        z, factor = rng.standard_normal(num_prompts), np.ones(num_prompts)
        if own.law is LengthLaw.LONG_TAILED:
            is_tail = rng.random(num_prompts) < own.tail_share
            factor = np.where(is_tail, 1 + rng.pareto(own.tail_index, num_prompts), factor)
        return _Prompts(scenario.algorithm.prompts_per_iteration, z, factor)

    def lengths(
        self, sections: tuple[LengthSection, ...], number: int, *, group_size: int, rng: np.random.Generator
    ) -> Lengths:
        counts = number * self.num_per_iteration + np.arange(self.num_per_iteration)
        rows, before = counts % len(self.z), counts - len(self.z)
        level = self._levels(rows, sections[number])
        known = np.zeros(len(rows))
        for earlier in sorted({int(each) for each in before[before >= 0] // self.num_per_iteration}):
            is_of = (before >= 0) & (before // self.num_per_iteration == earlier)
            known[is_of] = self._levels(rows[is_of], sections[earlier])
        z_member = rng.standard_normal((len(rows), group_size))
        z_hint = rng.standard_normal(len(rows))
        return lengths_at(level, sections[number], z_member=z_member, z_hint=z_hint, rng=rng, known=known)

    def _levels(self, rows: np.typing.NDArray[np.int64], section: LengthSection) -> Floats:
        levels: Floats = section.median_tokens * np.exp(section.sigma_prompt * self.z[rows]) * self.factor[rows]
        return levels


def check_faults(scenario: Scenario, num_iterations: int) -> None:
    """ScenarioError: a fault is in an iteration that the run does not have."""
    for at, fault in enumerate(scenario.faults):
        if (fault.iteration or 0) >= num_iterations:
            has = "1 iteration" if num_iterations == 1 else f"{num_iterations} iterations"
            raise ScenarioError(
                f"faults.{at}.iteration={fault.iteration} and the run has {has}, counted from 0: "
                f"give --iterations {(fault.iteration or 0) + 1} or more, or lower it"
            )


def law_mean(section: LengthSection) -> float:
    """The mean of the section's law, cut at its limit, as policies reckon it."""
    return mean_tokens(population_law(section, Lengths((), ())))


def _section(own: LengthSection, drift: Drift, number: int) -> LengthSection:
    """The law of an iteration. A named curve's limits replace that of the scenario."""
    changes: dict[str, float] = {}
    if drift.limits is not None:
        changes["max_tokens"] = int(drift.limits.step(number))
    if drift.sigma_prompt is not None:
        changes["sigma_prompt"] = drift.sigma_prompt.at(number)
    section = own.model_copy(update=changes)
    factor = drift.spike(number)
    if drift.mean is None:
        median = own.median_tokens if drift.median is None else drift.median.at(number)
        return section.model_copy(update={"median_tokens": median * factor})
    scale = law_mean(own) if drift.is_relative else 1.0
    return _with_mean(section, drift.mean.at(number) * scale * factor, number)


def _with_mean(section: LengthSection, mean: float, number: int) -> LengthSection:
    def at(log_median: float) -> LengthSection:
        return section.model_copy(update={"median_tokens": math.exp(log_median)})

    low, high = 0.0, math.log(section.max_tokens) + 10
    if not law_mean(at(low)) <= mean <= law_mean(at(high)) or mean >= section.max_tokens:
        raise ScenarioError(
            f"drift asks for a mean of {mean:,.0f} tokens in iteration {number}, and no law with the scenario's spread "
            f"that is cut at {section.max_tokens:,} tokens has it: raise lengths.max_tokens, or lower the curve or its "
            "spikes"
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if law_mean(at(middle)) < mean else (low, middle)
    return at((low + high) / 2)
