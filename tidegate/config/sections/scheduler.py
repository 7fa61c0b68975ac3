"""The config's section on the scheduler: which policy moves GPUs between components, how often it is asked, its rules.

`unmovable` says why a real job cannot run as configured: the components do not carry moves out yet.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.config.base import NonNegativeFloat, Positive, PositiveFloat, Section

Share = Annotated[float, Field(gt=0, le=1)]


class StaticSection(Section):
    collocated: bool = False
    """All GPUs generate, then all infer, then all train, in place of a fixed split."""


class RLinfSection(Section):
    """RLinf's own keys and defaults, but for the first: to name the policy is to turn it on."""

    auto_scheduler: bool = True
    use_pre_process_policy: bool = False
    use_wait_before_last_iter_policy: bool = True
    max_running_requests: Positive = 64
    """Of an engine that is to be kept; RLinf reads its `rollout.max_running_requests`."""


class DynaRLSection(Section):
    """Thresholds that DynaRL published, and what it left open."""

    request_priority: bool = False
    low_kv_use: Share = 0.3
    low_share: Share = 0.8
    low_for_s: NonNegativeFloat = 4.0
    max_kv_use: Share = 0.8
    released_shares: Annotated[tuple[Share, ...], Field(min_length=2, max_length=9)] = (
        0.125,
        0.25,
        0.375,
        0.5,
        0.625,
        0.75,
    )


class TideSection(Section):
    """Our own rules: when a move pays, and how much is searched."""

    least_gain_s: NonNegativeFloat = 2.0
    least_payback: NonNegativeFloat = 1.0
    lead_s: NonNegativeFloat = 0.3
    short_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    shorts_a_long: Positive = 1
    max_overfull: Annotated[float, Field(ge=1)] = 1.25
    fresh_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    rounds: Positive = 3


class SchedulerSection(Section):
    """Where GPUs go while an iteration runs."""

    policy: Literal["static", "rlinf", "dynarl", "tide"] = "static"
    decide_every_s: PositiveFloat = 1.0
    """At most so often on progress alone; whatever changes the job's structure is decided on at once."""
    static: StaticSection = StaticSection()
    rlinf: RLinfSection = RLinfSection()
    dynarl: DynaRLSection = DynaRLSection()
    tide: TideSection = TideSection()


def unmovable(section: SchedulerSection) -> str | None:
    """Why a job cannot be started with it; None when it can."""
    if section.policy == "static" and not section.static.collocated:
        return None
    key, remedy = f"scheduler.policy={section.policy}", "scheduler.policy to static"
    if section.policy == "static":
        key, remedy = "scheduler.static.collocated=true", "it to false"
    return (
        f"{key}: moves of real GPUs come with the next version; `tidegate simulate` and `tidegate plan` run it; set "
        f"{remedy} to start the job"
    )
