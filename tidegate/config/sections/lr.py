"""The config's section on the learning rate: the schedule's shape, what its progress counts, what a resume may meet."""

from __future__ import annotations

from tidegate.config.base import Count, NonNegativeFloat, Positive, Section
from tidegate.lr.checkpoint import LegacyPolicy, OnMismatch
from tidegate.lr.progress import EmptyBatch, LrMode, OnSkip
from tidegate.lr.schedule import Decay, WsdDecay


class LrScheduleSection(Section):
    """From `initial` to `actor.learning_rate` over the warm-up, then to `minimum` at the end of the budget."""

    decay: Decay = Decay.CONSTANT
    mode: LrMode = LrMode.NOMINAL
    budget_updates: Positive | None = None
    """None: `algorithm.iterations` times `n_minibatches`."""
    warm_up_updates: Count | None = None
    """None: `actor.lr_warm_up_samples` says it."""
    initial: NonNegativeFloat = 0.0
    minimum: NonNegativeFloat = 0.0
    wsd_updates: Count = 0
    wsd_decay: WsdDecay = WsdDecay.LINEAR
    on_skip: OnSkip = OnSkip.ADVANCE
    empty_batch: EmptyBatch = EmptyBatch.HOLD
    legacy_policy: LegacyPolicy = LegacyPolicy.ERROR
    budget_mismatch: OnMismatch = OnMismatch.ERROR


OF_A_RESUME = ("legacy_policy", "budget_mismatch")
"""Keys that say what to make of a checkpoint, and nothing of a run that was never interrupted."""
