"""Baselines by name, besides the policies of a job's config: what a comparison should hold against a policy.

| name | what it is |
|---|---|
| `phases`, `phases_ordered` | `static`, collocated; and with the longest prompts first |
| `split`, `split_ordered` | `static` in the configured placement; and with the longest prompts first |
| `rlinf_ordered` | `rlinf` with the longest prompts first |
| `rlinf_wait` | `rlinf` with its wait before the last minibatch |
| `dynarl_priority` | `dynarl` with its `request_priority` |
| `fused`, `fused_ordered` | RLHFuse's inter-stage fusion; and with the longest prompts first |
| `planned_once` | `tide` with its first plan of the iteration, which it never revises |
| `best_split` | `split` in the placement and order that a search finds best (`best_split`) |

The other rules are those of the scenario. All but `best_split` are policies of the same situation, so a replay can ask
them too. `best_split` is `static` in another placement.

Invariant: a baseline of `RULES` has only rules that a job can have. [test_baselines: rules_that_a_job_can_have]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from services.scheduler.policy import Policy
from services.scheduler.policy.fused import FusedPolicy
from services.scheduler.policy.registry import policy_of
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.policy.tide.tide_policy import TidePolicy
from tidegate.config.sections.scheduler import POLICIES, SchedulerSection
from tidegate.types import PromptOrder

BEST_SPLIT = "best_split"
_LONGEST = PromptOrder.LONGEST_FIRST
_AS_GIVEN = PromptOrder.AS_GIVEN

RULES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "phases": ("static", {"collocated": True, "order": _AS_GIVEN}),
    "phases_ordered": ("static", {"collocated": True, "order": _LONGEST}),
    "split": ("static", {"collocated": False, "order": _AS_GIVEN}),
    "split_ordered": ("static", {"collocated": False, "order": _LONGEST}),
    "rlinf_ordered": ("rlinf", {"order": _LONGEST}),
    "rlinf_wait": ("rlinf", {"use_wait_before_last_iter_policy": True}),
    "dynarl_priority": ("dynarl", {"request_priority": True}),
}
"""By baseline: the policy, and the rules of it that are not the scenario's."""


def section_of(name: str, section: SchedulerSection) -> SchedulerSection:
    """The section with the rules of a baseline of `RULES`."""
    policy, rules = RULES[name]
    own = getattr(section, policy).model_copy(update=rules)
    return section.model_copy(update={"policy": policy, policy: own})


def _by_rules(name: str, section: SchedulerSection) -> Policy:
    return policy_of(section_of(name, section))


def _planned_once(section: SchedulerSection) -> Policy:
    return TidePolicy(TideRules(**section.tide.model_dump()), revises=False)


def _by_config(name: str, section: SchedulerSection) -> Policy:
    return policy_of(section.model_copy(update={"policy": name}))


MAKERS: Mapping[str, Callable[[SchedulerSection], Policy]] = {
    **{name: partial(_by_config, name) for name in POLICIES},
    **{name: partial(_by_rules, name) for name in RULES},
    "fused": lambda section: FusedPolicy(),
    "fused_ordered": lambda section: FusedPolicy(order=_LONGEST),
    "planned_once": _planned_once,
}
"""Every policy that a situation suffices for, by name."""

NAMES = (*MAKERS, BEST_SPLIT)
"""What `--policy` and `--compare` take."""
