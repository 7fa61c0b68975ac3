"""`tide`: what it chooses at each turn of an iteration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.policy.situation import Situation
from services.scheduler.policy.tide.foresight import Foresight, TideRules, stages_text
from services.scheduler.policy.tide.memory import TideMemory
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.costs import Rates
from services.scheduler.state.observed import ENDED, TrainerRate, Training
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from tests.unit.scheduler.policy.tide.openings import RATES, SPEC, memory_of, opening
from tests.unit.scheduler.situations import after, generation, job, seen
from tidegate.types import Layout, MinibatchOrder, NodeId, Role, gpu_id

POLICY = TidePolicy()
SPARE = tuple(gpu_id(NodeId("n9"), index) for index in range(4))
"""Placed nowhere."""


def training(done: int, *, closes_at_ms: int | None, remembered: Remembered, now_ms: int = 50_000) -> Situation:
    """The minibatch `done` is open, half of the iteration generated."""
    assert remembered.assignment is not None
    situation = seen(
        SPEC,
        remembered.assignment,
        num_unfinished=64,
        measured=RATES,
        remembered=remembered,
        now_ms=now_ms,
        num_done=done,
        num_taken=8 * (done + 1),
        is_at_boundary=False,
    )
    closing = replace(situation.trainer.training, closes_at_ms=closes_at_ms)
    return replace(situation, trainer=replace(situation.trainer, training=closing))


def begun() -> tuple[Assignment, Remembered]:
    """The first minibatch's GPUs have been moved, and the trainer was seen on them."""
    opened = POLICY.choose(opening())
    at = opened.assignment
    moved = POLICY.choose(seen(SPEC, at, num_unfinished=64, measured=RATES, remembered=after(opened), now_ms=10**6))
    assert moved.assignment.trainer is not None
    return moved.assignment, after(moved)


def test_an_iteration_opens_with_every_gpu_in_the_rollout_and_some_short_prompts_between_the_longest() -> None:
    choice = POLICY.choose(opening(replace(SPEC, minibatch_order=MinibatchOrder.ARRIVAL)))
    assert sorted(gpu for engine in choice.assignment.engines for gpu in engine) == sorted(SPEC.gpus)
    assert choice.group_order[:8] == (0, 31, 30, 1, 29, 2, 3, 28)
    assert sorted(choice.group_order) == list(range(32))
    assert choice.ask_at_ms is not None


def test_with_fixed_minibatches_an_iteration_opens_with_the_prompts_of_the_first() -> None:
    order = POLICY.choose(opening(replace(SPEC, minibatch_order=MinibatchOrder.FIXED))).group_order
    assert order[:8] == tuple(reversed(range(8)))
    assert sorted(order) == list(range(32))


def test_with_fixed_minibatches_an_iteration_opens_with_the_order_that_ends_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Foresight.plan

    def later(self: Foresight, *args: Any, order: tuple[int, ...] = (), **rest: Any) -> Any:
        found = planned(self, *args, order=order, **rest)
        return replace(found, end_s=found.end_s + 1000 * (order[0] == 7))

    monkeypatch.setattr(Foresight, "plan", later)
    order = POLICY.choose(opening(replace(SPEC, minibatch_order=MinibatchOrder.FIXED))).group_order
    assert order == tuple(reversed(range(32)))


def test_hints_with_a_larger_error_than_the_spread_of_prompts_are_ignored() -> None:
    situation = opening()
    law = replace(situation.lengths, sigma_hint=1.1 * situation.lengths.sigma_prompt)
    assert not POLICY.choose(replace(situation, lengths=law)).group_order
    better = replace(law, sigma_hint=0.9 * law.sigma_prompt)
    assert POLICY.choose(replace(situation, lengths=better)).group_order


@pytest.mark.parametrize("minibatches", [1, 4])
def test_where_lending_the_trainers_gpus_does_not_pay_an_iteration_opens_with_everything_at_home(
    minibatches: int,
) -> None:
    spec = replace(SPEC, num_minibatches=minibatches)
    choice = POLICY.choose(opening(spec, median_tokens=20.0))
    assert choice.assignment == as_configured(spec)
    assert choice.trains
    assert "would not pay" in choice.reason
    open_one = seen(
        spec,
        choice.assignment,
        num_unfinished=64,
        measured=RATES,
        remembered=after(choice),
        num_taken=8,
        is_at_boundary=False,
    )
    assert POLICY.choose(open_one).assignment == choice.assignment


def test_gpus_of_no_home_generate_where_an_iteration_opens_at_home() -> None:
    situation = replace(opening(median_tokens=20.0), free=SPARE)
    choice = POLICY.choose(situation)
    home = as_configured(SPEC)
    assert (choice.assignment.trainer, choice.assignment.inference) == (home.trainer, home.inference)
    assert set(SPARE) < {gpu for engine in choice.assignment.engines for gpu in engine}


def test_an_iteration_does_not_open_at_home_with_a_trainer_that_is_elsewhere() -> None:
    situation = opening(median_tokens=20.0)
    choice = POLICY.choose(replace(situation, trainer=replace(situation.trainer, placed=None)))
    assert choice.assignment.trainer is None


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("num_unfinished", [0, 8])
def test_a_first_choice_late_in_an_iteration_starts_from_the_present_gpus(
    minibatches: int, num_unfinished: int
) -> None:
    spec = replace(SPEC, num_minibatches=minibatches)
    home = as_configured(spec)
    for num_done in range(minibatches):
        for is_at_boundary in (False, True) if num_done else (False,):
            situation = seen(
                spec,
                home,
                num_unfinished=num_unfinished,
                measured=RATES,
                remembered=Remembered(),
                num_done=num_done,
                num_taken=min(32 // minibatches * (num_done + (not is_at_boundary)), 32 - num_unfinished // 4),
                is_at_boundary=is_at_boundary,
            )
            choice = POLICY.choose(situation)
            assert choice.trains
            assert choice.assignment.trainer is not None
            if not is_at_boundary:
                assert choice.assignment.trainer.gpus[:4] == SPEC.placement[Role.ACTOR].gpus


def test_an_iteration_does_not_open_at_a_home_that_lost_a_gpu() -> None:
    situation = opening(median_tokens=20.0)
    lost = as_configured(SPEC).engines[0][0]
    engines = tuple(engine for engine in situation.engines if lost not in engine.gpus)
    choice = POLICY.choose(replace(situation, generation=replace(situation.generation, engines=engines)))
    assert lost not in choice.assignment.gpus
    assert choice.assignment.trainer is None


def test_before_a_rate_was_measured_the_start_is_planned_with_the_assumed_one() -> None:
    slow, fast = (
        opening(replace(SPEC, rates=Rates(((4, rate),), inference_tokens_per_s_per_gpu=1e9)), measured=())
        for rate in (50.0, 50_000.0)
    )
    late, early = (memory_of(POLICY.choose(situation)).plan for situation in (slow, fast))
    assert late is not None
    assert early is not None
    assert late.ends_at_ms > early.ends_at_ms


def test_without_gpus_for_a_copy_of_the_trainer_every_gpu_generates() -> None:
    alone = replace(opening(), free=(), moving=(), inference=replace(opening().inference, gpus=()))
    one_engine = replace(alone.generation, engines=())
    lost = replace(alone, generation=one_engine, trainer=replace(alone.trainer, placed=None), free=SPEC.gpus[:1])
    assert "too few for a copy of the trainer" in POLICY.choose(lost).reason


def test_the_trainer_starts_when_its_plan_says() -> None:
    assigned, _ = begun()
    assert assigned.trainer is not None
    assert assigned.engines
    assert assigned.inference


def test_in_a_fixed_order_inference_may_get_its_gpus_ahead_of_the_trainer_and_keeps_them() -> None:
    opened = POLICY.choose(opening(replace(SPEC, minibatch_order=MinibatchOrder.FIXED)))
    memory = memory_of(opened)
    assert memory.plan is not None
    plan = replace(memory.plan, starts_at_ms=90_000, infers_at_ms=40_000, ends_at_ms=600_000, made_at_ms=38_900)
    before = replace(after(opened), own=replace(memory, plan=plan))
    spec = replace(SPEC, minibatch_order=MinibatchOrder.FIXED)
    early = seen(spec, opened.assignment, num_unfinished=64, measured=RATES, remembered=before, now_ms=39_000)
    assert POLICY.choose(early).assignment == opened.assignment
    at = seen(spec, opened.assignment, num_unfinished=64, measured=RATES, remembered=before, now_ms=40_001)
    ahead = POLICY.choose(at)
    # Whole engines leave, so that inference may get a GPU more.
    assert len(ahead.assignment.inference) - plan.stages[0].num_inference_gpus in (0, 1)
    assert ahead.assignment.trainer is None
    assert not ahead.trains
    later = seen(spec, ahead.assignment, num_unfinished=64, measured=RATES, remembered=after(ahead), now_ms=42_000)
    assert POLICY.choose(later).assignment == ahead.assignment


def test_while_a_minibatch_is_open_nothing_moves() -> None:
    assigned, remembered = begun()
    choice = POLICY.choose(training(0, closes_at_ms=None, remembered=remembered))
    assert (choice.assignment, choice.memory) == (assigned, remembered.own)


def test_engines_are_asked_just_ahead_of_a_minibatchs_end() -> None:
    assigned, remembered = begun()
    early = POLICY.choose(training(0, closes_at_ms=60_000, remembered=remembered))
    assert (early.assignment, early.memory) == (assigned, remembered.own)
    assert early.ask_at_ms == 60_000 - 2300
    late = POLICY.choose(training(0, closes_at_ms=60_000, remembered=remembered, now_ms=57_700))
    assert memory_of(late).num_answered == 2
    again = training(0, closes_at_ms=60_000, remembered=after(late), now_ms=58_000)
    assert POLICY.choose(again).assignment == late.assignment


def test_gpus_of_an_ended_rollout_go_to_inference_and_then_to_the_trainer() -> None:
    assigned, remembered = begun()
    assert assigned.trainer is not None
    done = seen(SPEC, assigned, ready=(0, 1), num_taken=2, is_at_boundary=False, measured=RATES, remembered=remembered)
    choice = POLICY.choose(done)
    assert not choice.assignment.engines
    assert choice.assignment.trainer == assigned.trainer
    assert sorted(choice.assignment.gpus) == sorted(SPEC.gpus)
    inferred = seen(
        SPEC, choice.assignment, num_taken=2, is_at_boundary=False, measured=RATES, remembered=after(choice)
    )
    last = POLICY.choose(inferred).assignment
    assert last.trainer is not None
    assert len(last.trainer.gpus) == 16
    assert not last.inference


@pytest.mark.parametrize(
    ("num_done", "is_at_boundary", "rate", "stays"),
    [
        (1, True, 100_000.0, True),
        (1, False, 100_000.0, True),
        (3, True, 100_000.0, True),
        (1, True, 5.0, False),
        (1, False, 5.0, False),
        (3, True, 5.0, False),
        (3, False, 5.0, True),
    ],
)
def test_where_the_way_home_costs_more_than_the_last_moves_gain_everything_stays_at_home(
    num_done: int, is_at_boundary: bool, rate: float, stays: bool
) -> None:
    """The rollout has ended in an iteration that opened at home. Once the last minibatch is open the trainer moves no
    more, and inference is fast."""
    home = as_configured(SPEC)
    assert home.trainer is not None
    num_answered = num_done + (not is_at_boundary)
    ended = seen(
        SPEC,
        home,
        ready=tuple(range(8 * num_done + 4)),
        num_done=num_done,
        num_taken=8 * num_done + 4 * (not is_at_boundary),
        is_at_boundary=is_at_boundary,
        measured=(TrainerRate(home.trainer.layout, rate),),
        remembered=Remembered(iteration=0, assignment=home, own=TideMemory(is_begun=True, num_answered=num_answered)),
        now_ms=50_000,
    )
    choice = POLICY.choose(ended)
    assert choice.trains
    assert (choice.assignment == home) is stays


def test_a_lost_gpu_of_no_home_leaves_at_once_where_the_others_stay_at_home() -> None:
    opened = POLICY.choose(replace(opening(median_tokens=20.0), free=SPARE))
    assert set(SPARE) < set(opened.assignment.gpus)
    lost = SPARE[0]
    left = replace(
        opened.assignment, engines=tuple(engine for engine in opened.assignment.engines if lost not in engine)
    )
    for num_unfinished in (0, 8):
        situation = seen(
            SPEC,
            left,
            num_unfinished=num_unfinished,
            num_taken=4,
            is_at_boundary=False,
            measured=RATES,
            remembered=after(opened),
            now_ms=5_000,
        )
        situation = replace(situation, free=tuple(gpu for gpu in (*situation.free, *SPARE[1:2]) if gpu != lost))
        assert lost not in POLICY.choose(situation).assignment.gpus


def test_a_lost_gpu_leaves_at_once_and_the_others_stay_where_they_are() -> None:
    home = as_configured(SPEC)
    memory = Remembered(iteration=0, assignment=home, own=TideMemory(is_begun=True, num_answered=1))
    lost = home.engines[0][0]
    left = Assignment(home.engines[1:], home.trainer, home.inference)
    situation = seen(
        SPEC, left, num_unfinished=64, measured=RATES, remembered=memory, num_taken=1, is_at_boundary=False
    )
    situation = replace(situation, free=tuple(gpu for gpu in situation.free if gpu != lost))
    choice = POLICY.choose(situation)
    assert lost not in choice.assignment.gpus
    assert choice.assignment.trainer == home.trainer
    assert set(left.engines) <= set(choice.assignment.engines)


def test_after_the_last_minibatch_everything_goes_home() -> None:
    assigned, remembered = begun()
    done = seen(SPEC, assigned, num_done=4, num_taken=32, measured=RATES, remembered=remembered)
    assert POLICY.choose(done).assignment == as_configured(SPEC)


def test_a_trainer_without_gpus_begins_at_the_latest_when_the_rollout_is_over() -> None:
    opened = POLICY.choose(opening())
    memory = memory_of(opened)
    assert opened.assignment.trainer is None
    assert memory.plan is not None
    later = replace(memory, plan=replace(memory.plan, starts_at_ms=10**6, ends_at_ms=2 * 10**6))
    before = replace(after(opened), own=later)
    over = seen(SPEC, opened.assignment, num_unfinished=0, measured=RATES, remembered=before, now_ms=50_000)
    assert POLICY.choose(over).assignment.trainer is not None


def test_a_trainer_of_any_number_of_copies_can_be_chosen() -> None:
    """48 GPUs, copies of 4, 128 prompts of 2: the copies divide no minibatch."""
    spec = job(actor=12, rollout=32, inference=4, actor_tp=4, rollout_tp=2, prompts=128, group_size=2, minibatches=1)
    rates = (TrainerRate(Layout(tp=4, dp=3), 500.0),)
    situation = opening(spec, measured=rates)
    opened = POLICY.choose(situation)
    done = seen(spec, opened.assignment, measured=rates, remembered=after(opened), now_ms=1000)
    choice = POLICY.choose(done)
    assert choice.assignment.trainer is not None
    assert len(choice.assignment.trainer.gpus) == 48


def test_a_reproducible_trainer_has_copies_that_divide_its_logical_shards() -> None:
    """48 GPUs, copies of 4: of 12 copies 8 divide 8 shards."""
    spec = job(actor=8, rollout=36, inference=4, actor_tp=4, rollout_tp=2, prompts=128, group_size=2, minibatches=1)
    rates = (TrainerRate(Layout(tp=4, dp=2), 500.0),)
    spec = replace(spec, num_logical_shards=8)
    opened = POLICY.choose(opening(spec, measured=rates))
    done = seen(spec, opened.assignment, measured=rates, remembered=after(opened), now_ms=1000)
    trainer = POLICY.choose(done).assignment.trainer
    assert trainer is not None
    assert trainer.layout == Layout(tp=4, dp=8)


@pytest.mark.parametrize(("rules", "moves"), [(TideRules(), True), (TideRules(least_gain_s=1e6), False)])
def test_the_trainer_moves_only_where_that_gains_enough(rules: TideRules, moves: bool) -> None:
    """After the first minibatch, in an iteration that opened at home, with a trainer that is slow on its 4 GPUs."""
    home = as_configured(SPEC)
    slow = (TrainerRate(SPEC.placement[Role.ACTOR].layout, 5.0),)
    between = seen(
        SPEC,
        home,
        num_unfinished=8,
        measured=slow,
        remembered=after(POLICY.choose(opening(median_tokens=20.0))),
        now_ms=5_000,
        num_done=1,
        num_taken=8,
    )
    assert (TidePolicy(rules).choose(between).assignment.trainer != home.trainer) is moves


def test_the_same_situation_gives_the_same_choice() -> None:
    situation = opening()
    assert POLICY.choose(situation) == POLICY.choose(situation)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"least_gain_s": -1.0}, "least_gain_s=-1.0 is below 0"),
        ({"short_share": 1.5}, "short_share=1.5"),
        ({"rounds": 0}, "rounds=0 is below 1"),
    ],
)
def test_impossible_rules_are_refused(rules: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TideRules(**rules)  # type: ignore[arg-type]  # the table's values are of several types


def test_a_plan_needs_no_report_of_training() -> None:
    situation = opening()
    assert situation.trainer.training == Training(measured=RATES)
    assert memory_of(POLICY.choose(situation)).plan is not None


def in_a_minibatch(*, num_idle: int, carries: bool = True, closes_at_ms: int | None = None) -> Situation:
    """The last minibatch is open on four GPUs with most of its groups left. Of six engines `num_idle` are idle."""
    spec = replace(SPEC, num_minibatches=2, carries_gradients=carries)
    home = as_configured(SPEC)
    assert home.trainer is not None
    count = spec.num_prompts * spec.group_size
    num_working = len(home.engines) - num_idle
    places = (*(ENDED,) * (count - num_working), *range(num_working))
    picture = generation(spec, home.engines, lengths=(4000,) * count, places=places)
    situation = seen(
        spec,
        home,
        picture=picture,
        measured=(TrainerRate(home.trainer.layout, 5_000.0),),
        num_done=1,
        num_taken=17,
        is_at_boundary=False,
        now_ms=50_000,
        remembered=Remembered(iteration=0, assignment=home, own=TideMemory(is_begun=True, num_answered=2)),
    )
    open_one = replace(situation.trainer.training, closes_at_ms=closes_at_ms)
    law = replace(situation.lengths, log_mean=math.log(4000))
    return replace(situation, trainer=replace(situation.trainer, training=open_one), lengths=law)


def test_idle_gpus_come_to_an_open_minibatch_where_gradients_are_carried() -> None:
    situation = in_a_minibatch(num_idle=4)
    choice = POLICY.choose(situation)
    assert choice.assignment.trainer is not None
    assert len(choice.assignment.trainer.gpus) > 4
    assert choice.trains
    assert "goes on" in choice.reason
    again = replace(situation, remembered=after(choice), now_ms=50_100)
    assert POLICY.choose(again).assignment == choice.assignment, "it waits for the move that is under way"


@pytest.mark.parametrize(
    "situation",
    [
        in_a_minibatch(num_idle=4, carries=False),
        in_a_minibatch(num_idle=4, closes_at_ms=60_000),
        in_a_minibatch(num_idle=0),
    ],
    ids=["gradients are not carried", "the minibatch has its last group", "no GPU is idle"],
)
def test_an_open_minibatch_keeps_its_gpus_where(situation: Situation) -> None:
    assert POLICY.choose(situation).assignment == as_configured(SPEC)


@pytest.mark.parametrize(
    ("num_gpus", "want"), [((), "no GPU"), ((1,), "1 GPU"), ((1, 2), "1, 2 GPUs"), ((4, 1), "4, 1 GPU")]
)
def test_the_stages_of_a_plan_are_told_also_where_no_minibatch_is_left(num_gpus: tuple[int, ...], want: str) -> None:
    assert stages_text(num_gpus) == want
