"""A policy is chosen by name, with the rules that the config gives it."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.registry import ENTRIES, policy_of
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.policy.tide.tide_policy import TidePolicy
from tidegate.config.base import Section
from tidegate.config.sections.scheduler import POLICIES, DynaRLSection, RLinfSection, SchedulerSection, TideSection


def test_every_policy_of_the_config_is_registered_with_a_memory_of_its_own() -> None:
    assert sorted(ENTRIES) == sorted(POLICIES)
    assert len({entry.memory for entry in ENTRIES.values()}) == len(ENTRIES)


def test_a_job_that_names_no_policy_has_tide() -> None:
    assert isinstance(policy_of(SchedulerSection()), TidePolicy)
    assert policy_of(SchedulerSection(policy="static")) == StaticPolicy()


def test_a_policy_has_the_rules_of_its_section() -> None:
    named = {"policy": "rlinf", "rlinf": {"use_pre_process_policy": True, "max_running_requests": 8}}
    want = RLinfRules(max_running_requests=8, auto_scheduler=True, use_pre_process_policy=True)
    assert policy_of(SchedulerSection.model_validate(named)) == RLinfPolicy(want)
    named = {"policy": "dynarl", "dynarl": {"request_priority": True, "released_shares": [0.5, 0.25]}}
    wanted = DynaRLRules(request_priority=True, released_shares=(0.5, 0.25))
    assert policy_of(SchedulerSection.model_validate(named)) == DynaRLPolicy(wanted)
    named = {"policy": "tide", "tide": {"least_gain_s": 5.0}}
    assert policy_of(SchedulerSection.model_validate(named)) == TidePolicy(TideRules(least_gain_s=5.0))


DIFFER = {"auto_scheduler": True, "max_running_requests": 64}
"""To name RLinf's policy is to turn it on; the number is that of RLinf's examples, which its workers have no default
for."""


@pytest.mark.parametrize(
    ("rules", "section"), [(RLinfRules, RLinfSection), (DynaRLRules, DynaRLSection), (TideRules, TideSection)]
)
def test_a_policys_section_has_its_rules_and_their_defaults(rules: type, section: type[Section]) -> None:
    want = {each.name: DIFFER.get(each.name, each.default) for each in fields(rules)}
    assert MISSING not in want.values()
    assert {name: field.default for name, field in section.model_fields.items()} == want
