"""`tide` with the plan that it made first: a baseline."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.policy.situation import Split
from services.scheduler.policy.tide.cluster import fitting
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.remembered import Remembered
from tests.unit.scheduler.policy.tide.openings import RATES, SPEC, memory_of, opening
from tests.unit.scheduler.situations import after, seen

ONCE = TidePolicy(revises=False)


def begun() -> tuple[Remembered, tuple[int, ...]]:
    """The first minibatch's GPUs have been moved; and the trainer's GPUs by minibatch, as planned at the opening."""
    opened = ONCE.choose(opening())
    plan = memory_of(opened).plan
    assert plan is not None
    at_ms = plan.starts_at_ms + 1
    moved = ONCE.choose(
        seen(SPEC, opened.assignment, num_unfinished=64, measured=RATES, remembered=after(opened), now_ms=at_ms)
    )
    return after(moved), tuple(stage.num_trainer_gpus for stage in plan.stages)


def test_the_first_plan_is_tides() -> None:
    assert ONCE.choose(opening()) == TidePolicy().choose(opening())


def test_the_trainer_starts_when_it_was_planned_and_gets_the_gpus_that_were_planned() -> None:
    remembered, planned = begun()
    assert remembered.assignment is not None
    assert remembered.assignment.trainer is not None
    assert len(remembered.assignment.trainer.gpus) == planned[0]


def test_a_minibatch_gets_what_was_planned_for_it_whatever_was_measured_since() -> None:
    remembered, planned = begun()
    assert remembered.assignment is not None
    situation = seen(
        SPEC,
        remembered.assignment,
        num_unfinished=64,
        measured=(replace(RATES[0], rate_tokens_per_s=RATES[0].rate_tokens_per_s / 100),),
        remembered=remembered,
        now_ms=50_000,
        num_done=1,
        num_taken=16,
    )
    choice = ONCE.choose(situation)
    assert choice.assignment.trainer is not None
    plan = memory_of(choice).plan
    assert plan is not None
    # The plan leaves no engine for that minibatch; while the rollout goes on, it keeps one.
    want = fitting(situation, Split(0, planned[1], plan.stages[0].num_inference_gpus), len(SPEC.gpus))
    assert len(choice.assignment.trainer.gpus) == want.num_trainer_gpus
    assert tuple(stage.num_trainer_gpus for stage in plan.stages) == planned[1:]
    assert not choice.alternatives
