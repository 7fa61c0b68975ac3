"""Policies by name: what a config's section on the scheduler comes to. Pure."""

from __future__ import annotations

from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.policy.tide.tide_policy import TidePolicy
from tidegate.config.sections.scheduler import SchedulerSection


def policy_of(section: SchedulerSection) -> Policy:
    """The policy that it names, with its rules."""
    match section.policy:
        case "static":
            return PhasesPolicy() if section.static.collocated else StaticPolicy()
        case "rlinf":
            return RLinfPolicy(RLinfRules(**section.rlinf.model_dump()))
        case "dynarl":
            return DynaRLPolicy(DynaRLRules(**section.dynarl.model_dump()))
        case "tide":
            return TidePolicy(TideRules(**section.tide.model_dump()))
