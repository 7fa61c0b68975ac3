"""The learning rate of a config: its `LrSchedule`, its `LrRules`, and the plan in one line.

A batch of the ledger is a minibatch and owns one step (docs/adr/0022). Filtering, packing and resizes do not change it:

    budget = iterations * n_minibatches

    budget        steps of the learning-rate schedule, unless `actor.lr_schedule.budget_updates` sets it
    iterations    `algorithm.iterations`
    n_minibatches `algorithm.n_minibatches`

Invariants:
- A config without fault has a schedule. [test_schedule: a_schedule_that_contradicts_itself]
- No number of the schedule depends on the number of replicas. [test_schedule: the_number_of_replicas_changes_nothing]
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from tidegate.config.sections.job import JobSections
from tidegate.lr.checkpoint import OnMismatch
from tidegate.lr.progress import LrRules, projected_overshoot
from tidegate.lr.schedule import Decay, LrSchedule, Steps

RULE_KEYS = ("mode", "on_skip", "empty_batch")
"""Keys of the section that set the `LrRules`, not the `LrSchedule`. A whole lineage has the same rules."""


def leave_out_schedule(actor: dict[str, Any]) -> None:
    """Remove the keys of the `LrSchedule` from the config's section `actor`, which is given as plain values."""
    for key in ("learning_rate", "lr_warm_up_samples"):
        del actor[key]
    actor["lr_schedule"] = {key: actor["lr_schedule"][key] for key in RULE_KEYS}


def schedule_of(config: JobSections) -> LrSchedule:
    """LrError: the schedule contradicts itself."""
    section = config.actor.lr_schedule
    return LrSchedule(
        peak=config.actor.learning_rate,
        budget=budget(config),
        warm_up=warm_up(config),
        decay=section.decay,
        initial=section.initial,
        minimum=section.minimum,
        wsd_steps=section.wsd_updates,
        wsd_decay=section.wsd_decay,
    )


def rules_of(config: JobSections) -> LrRules:
    section = config.actor.lr_schedule
    return LrRules(
        logical_minibatch=samples_per_update(config),
        mode=section.mode,
        on_skip=section.on_skip,
        empty_batch=section.empty_batch,
        max_consecutive_skips=config.actor.max_skipped_updates,
    )


def num_updates_of(config: JobSections) -> int:
    """The updates of the whole job: one for each minibatch."""
    return config.algorithm.iterations * config.algorithm.n_minibatches


def budget(config: JobSections) -> int:
    return config.actor.lr_schedule.budget_updates or num_updates_of(config)


def warm_up(config: JobSections) -> Steps:
    updates = config.actor.lr_schedule.warm_up_updates
    return Fraction(config.actor.lr_warm_up_samples, samples_per_update(config)) if updates is None else updates


def samples_per_update(config: JobSections) -> int:
    """Samples of a full minibatch, summed over all replicas."""
    algorithm = config.algorithm
    return algorithm.prompts_per_iteration // algorithm.n_minibatches * algorithm.group_size


def lr_summary(config: JobSections) -> str:
    """One line on the budget and the projected overshoot. The config must be without fault."""
    schedule, mode = schedule_of(config), config.actor.lr_schedule.mode
    planned = num_updates_of(config)
    text = (
        f"learning rate: a budget of {schedule.budget} updates for the {planned} of this job "
        f"({config.algorithm.iterations} iterations of {config.algorithm.n_minibatches}), {_shape(schedule)}, in mode "
        f"{mode}"
    )
    if beyond := projected_overshoot(schedule, planned):
        text += f"; projected overshoot: {beyond} updates {beyond_budget(schedule)}"
    if config.actor.lr_schedule.budget_mismatch is OnMismatch.CHECKPOINT:
        text += "; a resume goes by its checkpoint's schedule"
    return text


def beyond_budget(schedule: LrSchedule) -> str:
    return f"at {schedule.rate(schedule.budget):g}, as before" if schedule.decay is Decay.CONSTANT else "at the minimum"


def _shape(schedule: LrSchedule) -> str:
    warm_up = f"after a warm-up of {schedule.warm_up}" if schedule.warm_up else "without warm-up"
    if schedule.decay is Decay.CONSTANT:
        return f"constant at {schedule.peak:g} {warm_up}"
    return f"{schedule.decay} from {schedule.peak:g} to {schedule.minimum:g} {warm_up}"
