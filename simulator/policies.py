"""The policies that a scenario is simulated under: the scheduler's, by name, with the scenario's rules.

Invariant: a name that is none, and a job that a policy cannot run, are refused before anything runs.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import get_args

from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from services.scheduler.state.values import JobSpec
from simulator.job import job_of
from simulator.scenario import Scenario, ScenarioError
from tidegate.config.sections.scheduler import SchedulerSection

NAMES: tuple[str, ...] = get_args(SchedulerSection.model_fields["policy"].annotation)
_LEAST_LIKENESS = 0.5
"""As of keys: below it two names only share a few letters."""


def asked_policies(given: argparse.Namespace) -> list[str]:
    """What `--compare` or `--policy` names; empty for neither."""
    if given.compare is not None:
        return [name.strip() for name in given.compare]
    return [] if given.policy is None else [given.policy]


def policies_of(names: Sequence[str], scenario: Scenario) -> dict[str, Policy]:
    """In the order named. ScenarioError for a name that is none, or named twice, or a job that it cannot run."""
    return named(names, scenario.scheduler, job_of(scenario, scenario.read_lengths()))


def named(names: Sequence[str], section: SchedulerSection, spec: JobSpec) -> dict[str, Policy]:
    """With the section's rules. ScenarioError as `policies_of`."""
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=_LEAST_LIKENESS)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ScenarioError(f"no policy is called {name!r}{hint} (known: {', '.join(NAMES)})")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ScenarioError(f"policy {', '.join(twice)} is named twice: compare each once")
    made = {name: policy_of(section.model_copy(update={"policy": name})) for name in names}
    for policy in made.values():
        try:
            policy.check(spec)
        except ValueError as error:
            raise ScenarioError(str(error)) from error
    return made
