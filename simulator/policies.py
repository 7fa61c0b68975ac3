"""The policies that a scenario is simulated under, by name.

Invariant: a name that is none is refused with the nearest one, before anything runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from simulator.run import Chooses
from simulator.scenario import Scenario, ScenarioError

_LEAST_LIKENESS = 0.5
"""As of keys: below it two names only share a few letters."""


def _rlinf(scenario: Scenario) -> Chooses:
    rules = RLinfRules(
        max_running_requests=scenario.costs.engine.max_running,
        auto_scheduler=True,
        use_pre_process_policy=True,
        use_wait_before_last_iter_policy=False,
    )
    return RLinfPolicy(rules)


_MADE: Mapping[str, Callable[[Scenario], Chooses]] = {
    "static": lambda scenario: PhasesPolicy(),
    "rlinf": _rlinf,
    "dynarl": lambda scenario: DynaRLPolicy(DynaRLRules()),
    "dynarl_priority": lambda scenario: DynaRLPolicy(DynaRLRules(request_priority=True)),
}


def policies_of(names: Sequence[str], scenario: Scenario) -> dict[str, Chooses]:
    """In the order named. ScenarioError for a name that is none, or named twice."""
    for name in names:
        if name not in _MADE:
            near = difflib.get_close_matches(name, _MADE, n=1, cutoff=_LEAST_LIKENESS)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ScenarioError(f"no policy is called {name!r}{hint} (known: {', '.join(_MADE)})")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ScenarioError(f"policy {', '.join(twice)} is named twice: compare each once")
    return {name: _MADE[name](scenario) for name in names}
