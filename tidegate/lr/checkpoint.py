"""A ledger of learning-rate progress as JSON, and the rules of a resume.

A resume takes one of two ways:
- A text that names its unit is read (`decoded`) and compared with the config (`resumed`).
- Counters without a unit are foreign, whatever their numbers. They are used only by an explicit policy (`adopted`).

Invariants:
- `decoded(encoded(ledger)) == ledger`, and a second load has the same result: loading assigns, it never adds.
  [test_lr_checkpoint: loads_as_the_same_ledger]
- A text whose numbers do not add up, or that a later version wrote, is refused.
  [test_lr_checkpoint: a_damaged_ledger_is_refused]
- Progress is never scaled by the ratio of two budgets. [test_lr_checkpoint: a_legacy_policy_sets_the_progress]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from operator import ge
from typing import Any

from tidegate.json_text import parse_json
from tidegate.lr.closed import ClosedBatch
from tidegate.lr.errors import BudgetMismatch, CheckpointRefused, ForeignCheckpoint, LrError
from tidegate.lr.progress import EmptyBatch, LrLedger, LrMode, LrRules, OnSkip, OpenBatch
from tidegate.lr.schedule import Decay, LrSchedule, Steps, WsdDecay
from tidegate.lr.units import Units

VERSION = 1
UNIT = "sample x epoch"
_STEPS = ("origin", "progress", "committed", "nominal", "skipped", "shortfall")
_COUNTS = ("next_batch", "num_units", "num_updates", "num_skips", "num_consecutive_skips")


class OnMismatch(StrEnum):
    """Which schedule holds when those of the config and the checkpoint differ. `ERROR`: refuse the resume."""

    ERROR = "error"
    CONFIG = "config"
    CHECKPOINT = "checkpoint"


class LegacyPolicy(StrEnum):
    """The progress of a lineage that resumes from foreign counters: counters without a unit."""

    ERROR = "error"
    """Refuse the resume."""
    REBASE = "rebase"
    """Progress is the really consumed number of steps, which the caller knows."""
    CLAMP = "clamp"
    """Progress is that of the counters, but at most the budget."""
    KEEP = "keep"
    """Progress is that of the counters."""


def encoded(ledger: LrLedger) -> str:
    """JSON with all counters and the full schedule."""
    schedule = {name: _plain(value) for name, value in _fields(ledger.schedule).items()}
    counters = {name: _plain(getattr(ledger, name)) for name in (*_STEPS, *_COUNTS)}
    return json.dumps(
        {
            "version": VERSION,
            "unit": UNIT,
            "schedule": schedule,
            "rules": _fields(ledger.rules),
            **counters,
            "open_batch": None if ledger.open_batch is None else _encoded_batch(ledger.open_batch),
            "last_batch": None if ledger.last_batch is None else _encoded_last(ledger.last_batch),
        }
    )


def decoded(text: str) -> LrLedger:
    """The inverse of `encoded`. ForeignCheckpoint: counters without a unit. CheckpointRefused: a damaged ledger."""
    try:
        raw = parse_json(text)
    except (ValueError, TypeError) as error:
        raise CheckpointRefused(f"the learning-rate ledger is no JSON ({error}); take another checkpoint") from error
    if not isinstance(raw, dict):
        raise CheckpointRefused(f"the learning-rate ledger is a {type(raw).__name__}, not an object")
    if "unit" not in raw:
        raise ForeignCheckpoint(f"{_counters(raw)} have no unit: {_CHOOSE}")
    if raw["unit"] != UNIT or not isinstance(raw.get("version"), int) or not 1 <= raw["version"] <= VERSION:
        raise CheckpointRefused(
            f"the learning-rate ledger has version {raw.get('version')} and counts {raw['unit']!r}; this one reads "
            f"versions up to {VERSION} that count {UNIT!r}: resume with the version that saved it"
        )
    try:
        ledger = _decoded(raw)
        _check_sums(ledger)
        _check_counts(ledger)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise CheckpointRefused(f"the learning-rate ledger is damaged ({fault}); take another checkpoint") from error
    return ledger


def resumed(
    saved: LrLedger, schedule: LrSchedule, rules: LrRules, *, on_mismatch: OnMismatch = OnMismatch.ERROR
) -> LrLedger:
    """The saved ledger under the schedule and the rules of a config.

    The config's treatment of skips and empty batches holds from here on, and so does its budget where the rate is
    constant. CheckpointRefused: a step would change its meaning. BudgetMismatch: the schedules differ in another way
    and `on_mismatch` is ERROR.
    """
    was = saved.rules
    if (was.mode, was.logical_minibatch) != (rules.mode, rules.logical_minibatch):
        raise CheckpointRefused(
            f"the checkpoint counts in mode {was.mode} with logical mini-batches of {was.logical_minibatch} units, the "
            f"config in {rules.mode} with {rules.logical_minibatch}: their steps cannot be compared; set the config's "
            "values to the checkpoint's"
        )
    now = replace(saved, rules=rules)
    if saved.schedule == schedule or on_mismatch is OnMismatch.CHECKPOINT:
        return now
    is_longer_only = schedule.decay is Decay.CONSTANT and replace(saved.schedule, budget=schedule.budget) == schedule
    if on_mismatch is OnMismatch.ERROR and not is_longer_only:
        raise BudgetMismatch(
            f"the checkpoint has a budget of {saved.schedule.budget} steps, of which {saved.progress} are done, and "
            f"the config one of {schedule.budget} ({_differences(saved.schedule, schedule)}): choose whose schedule "
            "holds, config or checkpoint (for a job: actor.lr_schedule.budget_mismatch)"
        )
    return replace(now, schedule=schedule)


def adopted(
    counters: Mapping[str, object],
    schedule: LrSchedule,
    rules: LrRules,
    *,
    policy: LegacyPolicy = LegacyPolicy.ERROR,
    consumed: Steps | None = None,
    next_batch: int = 0,
) -> LrLedger:
    """A ledger that continues from foreign counters, such as a Megatron scheduler's `state_dict()`.

    `consumed` is the number of steps for the data consumed so far; `rebase` needs it. The config's schedule holds from
    here on. ForeignCheckpoint: `policy` is ERROR, or the numbers that it needs are missing.
    """
    num_steps = counters.get("num_steps")
    if policy is LegacyPolicy.ERROR:
        raise ForeignCheckpoint(
            f"{_counters(counters)} have no unit, and the config has a budget of {schedule.budget}: {_CHOOSE}"
        )
    if policy is LegacyPolicy.REBASE:
        if consumed is None or isinstance(consumed, float | bool) or consumed < 0:
            raise ForeignCheckpoint(f"consumed={consumed!r}: rebase needs the exact number of consumed steps, from 0")
        origin = Fraction(consumed)
    elif isinstance(num_steps, bool) or not isinstance(num_steps, int | Fraction) or num_steps < 0:
        raise ForeignCheckpoint(f"num_steps={num_steps!r} is no number of steps: choose rebase, which does not use it")
    else:
        origin = Fraction(num_steps)
    if policy is LegacyPolicy.CLAMP:
        origin = min(origin, Fraction(schedule.budget))
    return LrLedger(schedule, rules, origin=origin, progress=origin, committed=origin, next_batch=next_batch)


_CHOOSE = (
    "choose rebase (the consumed steps are the progress), clamp (theirs, up to the budget) or keep (theirs), for a job "
    "by actor.lr_schedule.legacy_policy; they are never scaled"
)


def _counters(counters: Mapping[str, object]) -> str:
    return f"num_steps={counters.get('num_steps')} of lr_decay_steps={counters.get('lr_decay_steps')}"


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    """A Fraction as its numerator and denominator."""
    return [value.numerator, value.denominator] if isinstance(value, Fraction) else value


def _exact(value: Any) -> Fraction:
    numerator, denominator = value
    return Fraction(_int(numerator), _int(denominator))


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no int")
    return value


def _encoded_batch(batch: OpenBatch) -> dict[str, Any]:
    updates = {name: [list(run) for run in units.runs] for name, units in batch.updates.items()}
    return {
        "id": batch.id,
        "num_units": batch.num_units,
        "nominal": _plain(batch.nominal),
        "updates": updates,
        "skips": sorted(batch.skips),
    }


def _encoded_last(batch: ClosedBatch) -> dict[str, Any]:
    counts = {"updates": dict(batch.updates), "skips": sorted(batch.skips)}
    return {"id": batch.id, "nominal": _plain(batch.nominal), **counts}


def _decoded(raw: Mapping[str, Any]) -> LrLedger:
    # `get`: a ledger of an older version has no last batch.
    batch, last = raw["open_batch"], raw.get("last_batch")
    counters: dict[str, Any] = {name: _exact(raw[name]) for name in _STEPS}
    counters |= {name: _int(raw[name]) for name in _COUNTS}
    return LrLedger(
        _decoded_schedule(raw["schedule"]),
        _decoded_rules(raw["rules"]),
        open_batch=None if batch is None else _decoded_batch(batch),
        last_batch=None if last is None else _decoded_last(last),
        **counters,
    )


def _decoded_schedule(raw: Mapping[str, Any]) -> LrSchedule:
    named = {"decay": Decay(raw["decay"]), "wsd_decay": WsdDecay(raw["wsd_decay"])}
    values = {each.name: raw[each.name] for each in dataclasses.fields(LrSchedule)}
    steps = {name: _exact(value) for name, value in values.items() if isinstance(value, list)}
    return LrSchedule(**{**values, **steps, **named})


def _decoded_rules(raw: Mapping[str, Any]) -> LrRules:
    named = {
        "mode": LrMode(raw["mode"]),
        "on_skip": OnSkip(raw["on_skip"]),
        "empty_batch": EmptyBatch(raw["empty_batch"]),
    }
    return LrRules(**{**{each.name: raw[each.name] for each in dataclasses.fields(LrRules)}, **named})


def _decoded_batch(raw: Mapping[str, Any]) -> OpenBatch:
    updates = {
        name: Units.of(*(range(_int(first), _int(stop)) for first, stop in runs))
        for name, runs in raw["updates"].items()
    }
    consumed = Units.of(*updates.values())
    batch = OpenBatch(_int(raw["id"]), _int(raw["num_units"]), _exact(raw["nominal"]), updates, consumed=consumed)
    if batch.num_units < 1 or batch.nominal <= 0:
        raise LrError(f"batch {batch.id} has {batch.num_units} units and owns {batch.nominal} steps")
    skips = frozenset(raw["skips"])
    is_known = skips <= updates.keys() and all(updates.values())
    if not is_known or consumed - Units.of(range(batch.num_units)):
        raise LrError(f"batch {batch.id} holds updates or units that are none of its {batch.num_units}")
    return replace(batch, skips=skips)


def _decoded_last(raw: Mapping[str, Any]) -> ClosedBatch:
    updates = {update: _int(count) for update, count in raw["updates"].items()}
    batch = ClosedBatch(_int(raw["id"]), _exact(raw["nominal"]), updates, frozenset(raw["skips"]))
    if min(updates.values(), default=1) < 1 or batch.nominal <= 0 or not batch.skips <= updates.keys():
        raise LrError(f"the closed batch {batch.id} holds updates without units, skips of none, or no steps")
    return batch


def _check_sums(ledger: LrLedger) -> None:
    """LrError: the steps contradict each other."""
    made = ledger.progress - ledger.origin
    batch = ledger.open_batch
    pending = Fraction(0) if batch is None else batch.share(batch.pending)
    is_nominal = ledger.rules.mode is LrMode.NOMINAL
    want = ledger.nominal - ledger.skipped - ledger.shortfall - pending if is_nominal else ledger.num_updates
    counters = [getattr(ledger, name) for name in (*_STEPS, *_COUNTS)]
    in_order = batch is None or batch.id == ledger.next_batch
    in_order &= ledger.last_batch is None or ledger.last_batch.id == ledger.next_batch - 1
    is_within = ledger.origin <= ledger.committed <= ledger.progress
    if made != want or min(counters) < 0 or not in_order or not is_within:
        raise LrError(
            f"it does not add up: {made} steps of progress, its batches make {want}; batch "
            f"{batch.id if batch else None} is open, {ledger.last_batch.id if ledger.last_batch else None} was closed "
            f"last and {ledger.next_batch} follows"
        )


def _check_counts(ledger: LrLedger) -> None:
    """LrError: the counts of units, updates and skips contradict each other or the steps."""
    batch = ledger.open_batch or OpenBatch(ledger.next_batch, 1, Fraction(0))
    of_closed = ledger.nominal - batch.nominal - ledger.shortfall
    before = (
        ledger.num_units - batch.consumed.count,
        ledger.num_updates - len(batch.updates) + len(batch.skips),
        ledger.num_skips - len(batch.skips),
    )
    num_units, num_updates, num_skips = before
    last = ledger.last_batch or ClosedBatch(0, Fraction(0))
    of_last = (sum(last.updates.values()), len(last.updates) - len(last.skips), len(last.skips))
    is_possible = all(map(ge, before, of_last)) and num_units >= num_updates + num_skips and of_closed >= 0
    # Each closed batch owns steps. If they own none, no batch is closed, and no unit, update or skip is theirs.
    is_possible &= of_closed > 0 or not any(before)
    is_possible &= ledger.num_consecutive_skips <= ledger.num_skips and (ledger.num_skips > 0 or not ledger.skipped)
    if not ledger.num_updates:
        is_possible &= ledger.num_consecutive_skips == ledger.num_skips and ledger.committed == ledger.origin
    if not is_possible:
        raise LrError(
            f"its counts do not add up: {ledger.num_units} units in {ledger.num_updates} updates and "
            f"{ledger.num_skips} skips, {ledger.num_consecutive_skips} in a row; the closed batches have "
            f"{num_units}, {num_updates} and {num_skips} of them for {of_closed} steps"
        )


def _differences(saved: LrSchedule, configured: LrSchedule) -> str:
    was, now = _fields(saved), _fields(configured)
    return ", ".join(f"{name} {was[name]} and {now[name]}" for name in was if was[name] != now[name])
