"""The config's section on the learning rate: the schedule's shape, what its progress counts, what a resume may meet.

A batch of the ledger is a minibatch and owns one step: the budget of a job is its iterations times its minibatches,
whatever is filtered, packed or resized (docs/adr/0022). `schedule_of` and `rules_of` make the ledger's own types of it.
Invariant: a config without fault has a schedule; the number of replicas is in none of its numbers.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from tidegate.config_base import Count, NonNegativeFloat, Positive, Section
from tidegate.lr_checkpoint import LegacyPolicy, OnMismatch
from tidegate.lr_errors import BatchRefused, LrError
from tidegate.lr_progress import EmptyBatch, LrLedger, LrMode, LrRules, OnSkip, projected_overshoot
from tidegate.lr_schedule import Decay, LrSchedule, Steps, WsdDecay

if TYPE_CHECKING:
    from tidegate.config import JobConfig


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


OF_THE_RULES = ("mode", "on_skip", "empty_batch")
"""Keys of the section that make no `LrSchedule`: what progress is counted by is the same for a whole lineage."""


def leave_out_schedule(actor: dict[str, Any]) -> None:
    """Of the config's section `actor` as plain values, what makes its `LrSchedule`."""
    for key in ("learning_rate", "lr_warm_up_samples"):
        del actor[key]
    actor["lr_schedule"] = {key: actor["lr_schedule"][key] for key in OF_THE_RULES}


def schedule_of(config: JobConfig) -> LrSchedule:
    """LrError where it contradicts itself."""
    section = config.actor.lr_schedule
    return LrSchedule(
        peak=config.actor.learning_rate,
        budget=_budget(config),
        warm_up=_warm_up(config),
        decay=section.decay,
        initial=section.initial,
        minimum=section.minimum,
        wsd_steps=section.wsd_updates,
        wsd_decay=section.wsd_decay,
    )


def rules_of(config: JobConfig) -> LrRules:
    section = config.actor.lr_schedule
    return LrRules(
        logical_minibatch=samples_per_update(config),
        mode=section.mode,
        on_skip=section.on_skip,
        empty_batch=section.empty_batch,
        max_consecutive_skips=config.actor.max_skipped_updates,
    )


def num_updates_of(config: JobConfig) -> int:
    """Of the whole job, when each minibatch is one update."""
    return config.algorithm.iterations * config.algorithm.n_minibatches


def _budget(config: JobConfig) -> int:
    return config.actor.lr_schedule.budget_updates or num_updates_of(config)


def _warm_up(config: JobConfig) -> Steps:
    updates = config.actor.lr_schedule.warm_up_updates
    return Fraction(config.actor.lr_warm_up_samples, samples_per_update(config)) if updates is None else updates


def samples_per_update(config: JobConfig) -> int:
    """Of a full minibatch, over all replicas."""
    algorithm = config.algorithm
    return algorithm.prompts_per_iteration // algorithm.n_minibatches * algorithm.group_size


def lr_faults(config: JobConfig) -> list[str]:
    section, dp = config.actor.lr_schedule, config.actor.layout.dp
    if section.warm_up_updates is not None and config.actor.lr_warm_up_samples:
        return [
            f"actor.lr_schedule.warm_up_updates={section.warm_up_updates} and actor.lr_warm_up_samples="
            f"{config.actor.lr_warm_up_samples} are one warm-up: leave one of them out"
        ]
    if section.decay is not Decay.WSD and section.wsd_updates:
        return [
            f"actor.lr_schedule.wsd_updates={section.wsd_updates} is the end of the decay WSD, and decay is "
            f"{section.decay}: set it to 0, or decay to WSD"
        ]
    room = _budget(config) - _warm_up(config)
    if section.decay is Decay.WSD and room > 0 and not 0 < section.wsd_updates <= room:
        return [
            f"actor.lr_schedule.wsd_updates={section.wsd_updates} must be above 0 and fit the {room} updates that "
            f"follow the warm-up (budget {_budget(config)}, warm-up {_warm_up(config)})"
        ]
    try:
        LrLedger(schedule_of(config), rules_of(config)).opened(0, samples_per_update(config), nominal=1, dp=dp)
    except BatchRefused as error:
        return [
            f"actor.layout.dp={dp} replicas cannot share a minibatch of {samples_per_update(config)} samples "
            f"(algorithm.prompts_per_iteration / n_minibatches * group_size): {error}"
        ]
    except LrError as error:
        return [f"actor.lr_schedule: {error}"]
    return []


def lr_told(config: JobConfig) -> str:
    """One line, of a config without fault: what the budget holds, and by how much the job will pass it."""
    schedule, mode = schedule_of(config), config.actor.lr_schedule.mode
    planned = num_updates_of(config)
    text = (
        f"learning rate: a budget of {schedule.budget} updates for the {planned} of this job "
        f"({config.algorithm.iterations} iterations of {config.algorithm.n_minibatches}), {_shape(schedule)}, in mode "
        f"{mode}"
    )
    if beyond := projected_overshoot(schedule, planned):
        text += f"; projected overshoot: {beyond} updates {_beyond(schedule)}"
    if config.actor.lr_schedule.budget_mismatch is OnMismatch.CHECKPOINT:
        text += "; a resume goes by its checkpoint's schedule"
    return text


def lr_warnings(config: JobConfig) -> list[str]:
    """Of a config without fault: that the job passes its budget, where that changes the rate."""
    schedule = schedule_of(config)
    beyond = projected_overshoot(schedule, num_updates_of(config))
    if not beyond or schedule.decay is Decay.CONSTANT:
        return []
    return [
        f"actor.lr_schedule.budget_updates={schedule.budget}: the job is projected to pass it by {beyond} updates, "
        f"{_beyond(schedule)}; leave it out for the budget of the whole job"
    ]


def _beyond(schedule: LrSchedule) -> str:
    return f"at {schedule.rate(schedule.budget):g}, as before" if schedule.decay is Decay.CONSTANT else "at the minimum"


def _shape(schedule: LrSchedule) -> str:
    warm_up = f"after a warm-up of {schedule.warm_up}" if schedule.warm_up else "without warm-up"
    if schedule.decay is Decay.CONSTANT:
        return f"constant at {schedule.peak:g} {warm_up}"
    return f"{schedule.decay} from {schedule.peak:g} to {schedule.minimum:g} {warm_up}"
