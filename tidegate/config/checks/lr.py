"""Faults between the keys of the learning rate, and warnings about them. Each text is one fault or one warning."""

from __future__ import annotations

from tidegate.config.schedule import (
    beyond_budget,
    budget,
    num_updates_of,
    rules_of,
    samples_per_update,
    schedule_of,
    warm_up,
)
from tidegate.config.sections.job import JobSections
from tidegate.lr.errors import LrError
from tidegate.lr.progress import LrLedger, projected_overshoot
from tidegate.lr.schedule import Decay


def lr_faults(config: JobSections) -> list[str]:
    section = config.actor.lr_schedule
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
    room = budget(config) - warm_up(config)
    if section.decay is Decay.WSD and room > 0 and not 0 < section.wsd_updates <= room:
        return [
            f"actor.lr_schedule.wsd_updates={section.wsd_updates} must be above 0 and fit the {room} updates that "
            f"follow the warm-up (budget {budget(config)}, warm-up {warm_up(config)})"
        ]
    try:
        LrLedger(schedule_of(config), rules_of(config)).opened(0, samples_per_update(config), nominal=1)
    except LrError as error:
        return [f"actor.lr_schedule: {error}"]
    return []


def lr_warnings(config: JobSections) -> list[str]:
    """Warn that the job passes its budget, where that changes the rate. The config must be without fault."""
    schedule = schedule_of(config)
    beyond = projected_overshoot(schedule, num_updates_of(config))
    if not beyond or schedule.decay is Decay.CONSTANT:
        return []
    return [
        f"actor.lr_schedule.budget_updates={schedule.budget}: the job is projected to pass it by {beyond} updates, "
        f"{beyond_budget(schedule)}; leave it out to make all updates of the job the budget"
    ]
