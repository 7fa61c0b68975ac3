"""The scheduler's policies for a simulation, by name and with the scenario's rules.

An unknown name, and a job that a policy cannot run, are refused before a simulation starts.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from services.scheduler.state.values import JobSpec
from simulator.job_spec import job_of
from simulator.scenario import Scenario, ScenarioError
from tidegate.config.sections.scheduler import POLICIES, SchedulerSection

_LEAST_LIKENESS = 0.5
"""The smallest ratio of difflib for a hint. Below it two names share only a few letters."""


def requested_policies(given: argparse.Namespace) -> list[str]:
    """The names in `--compare` or `--policy`. Empty: neither is set."""
    if given.compare is not None:
        return [name.strip() for name in given.compare]
    return [] if given.policy is None else [given.policy]


def policies_of(names: Sequence[str], scenario: Scenario) -> dict[str, Policy]:
    """The policies in the order of `names`.

    ScenarioError: a name is unknown or occurs twice, or a policy cannot run the job.
    """
    return policies_by_name(names, scenario.scheduler, job_of(scenario, scenario.read_lengths()))


def policies_by_name(names: Sequence[str], section: SchedulerSection, spec: JobSpec) -> dict[str, Policy]:
    """The policies with the section's rules. ScenarioError as `policies_of`."""
    for name in names:
        if name not in POLICIES:
            near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=_LEAST_LIKENESS)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ScenarioError(f"no policy is called {name!r}{hint} (known: {', '.join(POLICIES)})")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ScenarioError(f"policy {', '.join(twice)} is named twice: compare each once")
    made = {name: policy_of(section.model_copy(update={"policy": name})) for name in names}
    for policy in made.values():
        try:
            policy.check(spec)
        except ValueError as error:
            raise ScenarioError(str(error)) from error
    return made
