"""The config's section on the scheduler: the policy that moves GPUs between components, its interval and its rules."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from tidegate.config.base import NonNegativeFloat, Positive, PositiveFloat, Section
from tidegate.types import PromptOrder

Share = Annotated[float, Field(gt=0, le=1)]


class StaticSection(Section):
    collocated: bool = False
    """All GPUs generate, then all infer, then all train. There is no fixed split."""
    order: PromptOrder = PromptOrder.AS_GIVEN


class RLinfSection(Section):
    """RLinf's own keys and defaults, and `order`. Only the default of the first differs: naming the policy turns it
    on."""

    auto_scheduler: bool = True
    use_pre_process_policy: bool = False
    use_wait_before_last_iter_policy: bool = True
    max_running_requests: Positive = 64
    """The limit of an engine that stays. RLinf reads its own `rollout.max_running_requests`."""
    preprocess_threshold: Positive | None = None
    """The rollout gives the actor's GPUs back once at most so many sequences run. None: the half of them."""
    order: PromptOrder = PromptOrder.AS_GIVEN


class DynaRLSection(Section):
    """The thresholds that DynaRL published, and those that it left open."""

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
    """The rules of Tidegate's own policy: when a move pays, and how far it searches."""

    least_gain_s: NonNegativeFloat = 2.0
    lead_s: NonNegativeFloat = 0.3
    short_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    shorts_a_long: Positive = 1
    fresh_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    rounds: Positive = 3


class SchedulerSection(Section):
    """The assignment of GPUs while an iteration runs."""

    policy: Literal["static", "rlinf", "dynarl", "tide"] = "tide"
    decide_every_s: PositiveFloat = 1.0
    """The shortest interval between decisions on progress alone. A change of the job's structure is decided at once."""
    static: StaticSection = StaticSection()
    rlinf: RLinfSection = RLinfSection()
    dynarl: DynaRLSection = DynaRLSection()
    tide: TideSection = TideSection()

    @property
    def moves_gpus(self) -> bool:
        """Whether the policy may give a GPU of one component to another."""
        return self.policy != "static" or self.static.collocated


POLICIES: tuple[str, ...] = get_args(SchedulerSection.model_fields["policy"].annotation)
"""The names that `scheduler.policy` can have."""
