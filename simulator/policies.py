"""What is compared in a simulation, by name: the scheduler's policies with the scenario's rules, and baselines.

An unknown name, and a job that a policy cannot run, are refused before a simulation starts.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.policy import Policy
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state.values import JobSpec
from simulator.baselines import BEST_SPLIT, MAKERS, NAMES
from simulator.best_split import best_split
from simulator.job_spec import job_of
from simulator.scenario import Scenario, ScenarioError
from tidegate.config.sections.scheduler import SchedulerSection

BY_RATE = ("tail_batching", "partial", "dropped", "probed")
"""Methods of `simulator.rounds` and `simulator.probing`, which are no policies."""
_LEAST_LIKENESS = 0.5
"""The smallest ratio of difflib for a hint. Below it two names share only a few letters."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy and the scenario that it runs in. The scenario is the given one but for the placement of `best_split`.
    `note`: what a reader of the result has to know besides the name; empty for nothing."""

    scenario: Scenario
    policy: Policy
    note: str = ""


def requested_policies(given: argparse.Namespace) -> list[str]:
    """The names in `--compare` or `--policy`. Empty: neither is set."""
    if given.compare is not None:
        return [name.strip() for name in given.compare]
    return [] if given.policy is None else [given.policy]


def contenders_of(names: Sequence[str], scenario: Scenario, seed: int | None = None) -> dict[str, Contender]:
    """The policies and baselines in the order of `names`, for the iteration of `seed` (default: the scenario's).

    ScenarioError: a name is unknown or occurs twice, or a policy cannot run the job.
    """
    _check_names(names)
    plain = policies_of([name for name in names if name != BEST_SPLIT], scenario)
    found = {name: Contender(scenario, policy) for name, policy in plain.items()}
    if BEST_SPLIT in names:
        found[BEST_SPLIT] = best_split_contender(scenario, seed)
    return {name: found[name] for name in names}


def best_split_contender(scenario: Scenario, seed: int | None = None) -> Contender:
    """ScenarioError: a component has no GPUs in the placement."""
    split = best_split(scenario, seed)
    return Contender(split.scenario, StaticPolicy(split.order), str(split))


def policies_of(names: Sequence[str], scenario: Scenario) -> dict[str, Policy]:
    """The policies in the order of `names`. ScenarioError as `policies_by_name`."""
    return policies_by_name(names, scenario.scheduler, job_of(scenario, scenario.read_lengths()))


def policies_by_name(names: Sequence[str], section: SchedulerSection, spec: JobSpec) -> dict[str, Policy]:
    """The policies with the section's rules.

    ScenarioError: a name is unknown or occurs twice, needs a scenario, or a policy cannot run the job.
    """
    _check_names(names)
    if BEST_SPLIT in names:
        raise ScenarioError(
            f"{BEST_SPLIT} is searched by simulation and has no answer to one job's events: compare it in "
            "`tidegate simulate SCENARIO`"
        )
    made = {name: MAKERS[name](section) for name in names}
    for policy in made.values():
        try:
            policy.check(spec)
        except ValueError as error:
            raise ScenarioError(str(error)) from error
    return made


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name in BY_RATE:
            raise ScenarioError(
                f"{name} is no policy: it changes what an iteration trains, or the order within groups; "
                "`python -m benchmarks.early_ends` compares it by its rate"
            )
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=_LEAST_LIKENESS)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ScenarioError(f"no policy is called {name!r}{hint} (known: {', '.join(NAMES)})")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ScenarioError(f"policy {', '.join(twice)} is named twice: compare each once")
