"""The config's section on the learning rate: the schedule's shape, the unit of progress, and the rules of a resume."""

from __future__ import annotations

from tidegate.config.base import Count, NonNegativeFloat, Positive, Section
from tidegate.lr.checkpoint import LegacyPolicy, OnMismatch
from tidegate.lr.progress import EmptyBatch, LrMode, OnSkip
from tidegate.lr.schedule import Decay, WsdDecay


class LrScheduleSection(Section):
    """The rate goes from `initial` to `actor.learning_rate` over the warm-up, then to `minimum` at the budget's end."""

    decay: Decay = Decay.CONSTANT
    mode: LrMode = LrMode.NOMINAL
    budget_updates: Positive | None = None
    """None: `algorithm.iterations` times `n_minibatches`."""
    warm_up_updates: Count | None = None
    """None: `actor.lr_warm_up_samples` sets the warm-up."""
    initial: NonNegativeFloat = 0.0
    minimum: NonNegativeFloat = 0.0
    wsd_updates: Count = 0
    wsd_decay: WsdDecay = WsdDecay.LINEAR
    on_skip: OnSkip = OnSkip.ADVANCE
    empty_batch: EmptyBatch = EmptyBatch.HOLD
    legacy_policy: LegacyPolicy = LegacyPolicy.ERROR
    budget_mismatch: OnMismatch = OnMismatch.ERROR


RESUME_KEYS = ("legacy_policy", "budget_mismatch")
"""Keys that concern the use of a checkpoint only. They have no effect on a run without interruption."""
