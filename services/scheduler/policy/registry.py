"""Policies by name: how each is made from the config's section on the scheduler, and the type of its memory. Pure.

Invariant: every policy of the config (`SchedulerSection.policy`) has an entry, with a memory of its own.
[test_registry: every_policy_of_the_config]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLMemory, DynaRLPolicy, DynaRLRules
from services.scheduler.policy.phases import PhasesMemory, PhasesPolicy
from services.scheduler.policy.rlinf import RLinfMemory, RLinfPolicy, RLinfRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.policy.tide.memory import TideMemory
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.remembered import PolicyMemory
from tidegate.config.sections.scheduler import SchedulerSection


@dataclass(frozen=True, slots=True)
class Entry:
    make: Callable[[SchedulerSection], Policy]
    memory: type[PolicyMemory]


def _static(section: SchedulerSection) -> Policy:
    kind = PhasesPolicy if section.static.collocated else StaticPolicy
    return kind(section.static.order)


ENTRIES: Mapping[str, Entry] = {
    "static": Entry(_static, PhasesMemory),
    "rlinf": Entry(lambda section: RLinfPolicy(RLinfRules(**section.rlinf.model_dump())), RLinfMemory),
    "dynarl": Entry(lambda section: DynaRLPolicy(DynaRLRules(**section.dynarl.model_dump())), DynaRLMemory),
    "tide": Entry(lambda section: TidePolicy(TideRules(**section.tide.model_dump())), TideMemory),
}


def policy_of(section: SchedulerSection) -> Policy:
    """The policy that the section names, with its rules."""
    return ENTRIES[section.policy].make(section)
