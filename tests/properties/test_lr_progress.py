"""Learning-rate progress under any batching, any resize, any restart: the sum, the rate at each cut, and repeated
updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lr_training import Plan, train, updates_of
from tests.unit.lr.schedules import SHAPES, Groups, schedule_of
from tidegate.lr.checkpoint import decoded, encoded
from tidegate.lr.progress import EmptyBatch, LrLedger, LrMode, LrRules, OnSkip, projected_overshoot
from tidegate.lr.schedule import Decay, LrSchedule
from tidegate.megatron.lr import drive, param_scheduler

LENGTHS = st.lists(st.integers(1, 60), min_size=4, max_size=24)
PLANS = st.builds(Plan, cap=st.integers(8, 128), dp=st.integers(1, 4), grouping=st.integers(1, 4))
NOMINAL = st.fractions(Fraction(1, 9), 40, max_denominator=9)
COSINE = LrSchedule(1e-3, budget=40, warm_up=Fraction(9, 2), decay=Decay.COSINE, minimum=1e-5)


def new(schedule: LrSchedule = COSINE, **rules: Any) -> LrLedger:
    return LrLedger(schedule, LrRules(**{"logical_minibatch": 4, **rules}))


@given(batches=st.lists(LENGTHS, min_size=1, max_size=3), plan=PLANS, epochs=st.integers(1, 3), nominal=NOMINAL)
def test_the_sum_of_lr_progress_is_exact_whatever_the_lengths_cap_grouping_replicas_and_epochs(
    batches: list[list[int]], plan: Plan, epochs: int, nominal: Fraction
) -> None:
    by_size, owned = new(), new()
    for number, lengths in enumerate(batches):
        by_size, _ = train(by_size, number, lengths, plan, epochs=epochs)
        owned, _ = train(owned, number, lengths, plan, epochs=epochs, nominal=nominal)
    assert by_size.progress == Fraction(epochs * sum(map(len, batches)), 4)
    assert owned.progress == owned.nominal == nominal * len(batches)


@given(lengths=LENGTHS, plans=st.tuples(PLANS, PLANS), epochs=st.integers(1, 2), nominal=NOMINAL)
def test_two_plans_of_the_same_data_have_the_same_rate_at_every_common_cut(
    lengths: list[int], plans: tuple[Plan, Plan], epochs: int, nominal: Fraction
) -> None:
    (one, rates), (other, other_rates) = (
        train(new(), 0, lengths, plan, epochs=epochs, nominal=nominal) for plan in plans
    )
    common = rates.keys() & other_rates.keys()
    assert 0 in common
    assert {cut: rates[cut] for cut in common} == {cut: other_rates[cut] for cut in common}
    assert one.progress == other.progress


@given(lengths=LENGTHS, plan=PLANS, mode=st.sampled_from(LrMode), after_warm_up=st.booleans())
def test_progress_only_grows_and_after_the_warm_up_the_rate_only_falls(
    lengths: list[int], plan: Plan, mode: LrMode, after_warm_up: bool
) -> None:
    schedule = dataclasses.replace(COSINE, warm_up=0 if after_warm_up else COSINE.warm_up)
    ledger = new(schedule, mode=mode).opened(0, len(lengths))
    before = ledger
    for number, ranks in enumerate(updates_of(range(len(lengths)), lengths, plan)):
        ledger = ledger.committed_update(0, str(number), flat(ranks))
        assert ledger.progress > before.progress
        assert not after_warm_up or ledger.rate <= before.rate
        before = ledger


@given(
    lengths=LENGTHS,
    plans=st.lists(PLANS, min_size=1, max_size=4),
    resize_at=st.integers(0, 6),
    nominal=NOMINAL,
)
def test_a_resize_plans_anew_what_is_pending_and_changes_neither_the_rate_at_a_cut_nor_the_sum(
    lengths: list[int], plans: list[Plan], resize_at: int, nominal: Fraction
) -> None:
    """Within an accumulation too, whose gradients are then dropped: nothing was told of it."""
    fixed, _ = train(new(), 0, lengths, plans[0], nominal=nominal)
    ledger = new().opened(0, len(lengths), nominal=nominal)
    rates = {}
    for number, plan in enumerate(plans):
        is_last = number == len(plans) - 1
        assert ledger.open_batch is not None
        pending = list(ledger.open_batch.pending)
        for update, ranks in enumerate(updates_of(pending, lengths, plan) if pending else ()):
            rates[ledger.num_units] = ledger.rate
            if not is_last and update == resize_at:
                break
            ledger = ledger.committed_update(0, f"{number}.{update}", flat(ranks))
    ledger = ledger.closed(0)
    assert ledger.progress == fixed.progress == nominal
    assert rates == {cut: COSINE.rate(nominal * cut / len(lengths)) for cut in rates}


@given(lengths=LENGTHS, plan=PLANS, mode=st.sampled_from(LrMode), nominal=NOMINAL)
def test_a_restore_at_every_boundary_is_the_run_that_was_never_interrupted(
    lengths: list[int], plan: Plan, mode: LrMode, nominal: Fraction
) -> None:
    want, _ = train(new(mode=mode), 0, lengths, plan, nominal=nominal)
    ledger = restored(new(mode=mode)).opened(0, len(lengths), nominal=nominal)
    for number, ranks in enumerate(updates_of(range(len(lengths)), lengths, plan)):
        ledger = restored(ledger).committed_update(0, str(number), flat(ranks))
    assert restored(restored(ledger).closed(0)) == want


def restored(ledger: LrLedger) -> LrLedger:
    """Loaded twice, which has to be loading once."""
    text = encoded(ledger)
    assert encoded(decoded(text)) == text
    return decoded(encoded(decoded(text)))


@given(lengths=LENGTHS, plan=PLANS, random=st.randoms(use_true_random=False), mode=st.sampled_from(LrMode))
def test_repeated_and_reordered_reports_give_the_same_ledger(
    lengths: list[int], plan: Plan, random: Any, mode: LrMode
) -> None:
    told = [(str(n), flat(ranks)) for n, ranks in enumerate(updates_of(range(len(lengths)), lengths, plan))]
    want, _ = train(new(mode=mode), 0, lengths, plan)
    again = told + random.choices(told, k=len(told))
    random.shuffle(again)
    ledger = new(mode=mode).opened(0, len(lengths))
    for update, units in again:
        ledger = ledger.committed_update(0, update, units)
    ledger = ledger.closed(0)
    for update, units in again:
        ledger = ledger.committed_update(0, update, units)
    assert (ledger.progress, ledger.num_updates, ledger.next_batch) == (want.progress, want.num_updates, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", LrMode)
def test_static_batching_gives_the_rates_of_megatrons_own_scheduler_bit_for_bit(shape: str, mode: LrMode) -> None:
    """Both modes, against Megatron's class stepped as Megatron steps it, a little beyond the budget."""
    schedule = schedule_of(shape, budget=48, warm_up=5, minimum=1e-7)
    theirs, ours = Groups(), Groups()
    scheduler, driven = (param_scheduler(groups, schedule, weight_decay=0.0) for groups in (theirs, ours))
    ledger = new(schedule, mode=mode, logical_minibatch=6)
    for batch in range(13):
        ledger = ledger.opened(batch, 24, dp=2)
        for update in range(4):
            drive(driven, ledger)
            assert ours.param_groups == theirs.param_groups
            assert ledger.rate == theirs.param_groups[0]["lr"]
            ledger = ledger.committed_update(batch, str(update), range(6 * update, 6 * update + 6))
            scheduler.step(1)
        ledger = ledger.closed(batch)
    assert (ledger.progress, ledger.overshoot) == (Fraction(52), Fraction(4))


def test_lr_counted_in_updates_is_too_fast_with_8429_updates_of_2400_nominal_steps() -> None:
    """The counters that ROLL's issue 442 was opened with."""
    schedule = LrSchedule(1e-6, budget=2400, decay=Decay.COSINE, minimum=1e-8)
    num_batches, num_updates = 75, 8429
    for mode, want_progress, want_overshoot in (
        (LrMode.NOMINAL, Fraction(2400), Fraction(0)),
        (LrMode.OPTIMIZER_UPDATES, Fraction(8429), Fraction(6029)),
    ):
        ledger = new(schedule, mode=mode)
        for batch in range(num_batches):
            count = num_updates * (batch + 1) // num_batches - num_updates * batch // num_batches
            ledger = ledger.opened(batch, count, nominal=32)
            for unit in range(count):
                ledger = ledger.committed_update(batch, str(unit), [unit])
            ledger = ledger.closed(batch)
            assert mode is LrMode.OPTIMIZER_UPDATES or ledger.progress == 32 * (batch + 1)
        assert (ledger.progress, ledger.overshoot) == (want_progress, want_overshoot)
        assert (ledger.num_updates, ledger.nominal) == (8429, Fraction(2400))
    assert projected_overshoot(schedule, 8429) == 6029


def test_caps_of_32k_64k_and_128k_tokens_consume_the_same_32_steps() -> None:
    lengths = [8192] * 32
    runs = [train(new(), 0, lengths, Plan(cap, 1, 1), nominal=Fraction(32)) for cap in (2**15, 2**16, 2**17)]
    assert [ledger.num_updates for ledger, _ in runs] == [8, 4, 2]
    assert {ledger.progress for ledger, _ in runs} == {Fraction(32)}
    (_, often), (_, halved), (_, seldom) = runs
    assert halved.items() <= often.items()
    assert seldom.items() <= halved.items()


def test_a_token_cap_changes_no_rate_at_any_common_cut_though_it_changes_the_updates() -> None:
    """What ROLL's issue 442 expects of `max_tokens_per_microbatch_in_train`."""
    lengths = [100 + 37 * (index % 11) for index in range(64)]
    runs = [train(new(), 0, lengths, Plan(cap, 2, 4), nominal=Fraction(8)) for cap in (400, 800, 1600, 10**9)]
    assert len({ledger.num_updates for ledger, _ in runs}) == 4
    assert {ledger.progress for ledger, _ in runs} == {Fraction(8)}
    for _, rates in runs:
        assert rates == {cut: COSINE.rate(8 * cut) for cut in rates}


@pytest.mark.parametrize(("mode", "want_end"), [(LrMode.NOMINAL, 200), (LrMode.OPTIMIZER_UPDATES, 123)])
def test_agentic_turns_end_the_schedule_at_step_123_of_200_only_where_each_update_is_a_step(
    mode: LrMode, want_end: int
) -> None:
    """A sample a turn: a batch is as large as its trajectories are long, and owns the steps that it owns."""
    ledger = new(LrSchedule(1e-6, budget=800, decay=Decay.LINEAR), mode=mode)
    ends = []
    for step in range(200):
        num_turns = 24 if step % 2 else 26  # 6.5 updates on the average where 4 are nominal
        ledger = ledger.opened(step, num_turns, nominal=4)
        for first in range(0, num_turns, 4):
            ledger = ledger.committed_update(step, str(first), range(first, min(first + 4, num_turns)))
        ledger = ledger.closed(step)
        if ledger.rate == 0:
            ends.append(step + 1)
    assert ends[0] == want_end


@given(
    lengths=LENGTHS,
    plan=PLANS,
    skipped=st.sets(st.integers(0, 30)),
    on_skip=st.sampled_from(OnSkip),
    empty=st.sampled_from(EmptyBatch),
    nominal=NOMINAL,
)
def test_whatever_is_skipped_or_empty_every_step_is_accounted_for(
    lengths: list[int], plan: Plan, skipped: set[int], on_skip: OnSkip, empty: EmptyBatch, nominal: Fraction
) -> None:
    ledger = new(on_skip=on_skip, empty_batch=empty, max_consecutive_skips=99).emptied(0, nominal)
    ledger = ledger.opened(1, len(lengths), nominal=nominal)
    for number, ranks in enumerate(updates_of(range(len(lengths)), lengths, plan)):
        take = ledger.skipped_update if number in skipped else ledger.committed_update
        ledger = take(1, str(number), flat(ranks))
    ledger = ledger.closed(1)
    assert ledger.progress + ledger.skipped + ledger.shortfall == ledger.nominal == 2 * nominal
    assert (ledger.skipped > 0) == (on_skip is OnSkip.HOLD and ledger.num_skips > 0)
    assert (ledger.shortfall > 0) == (empty is EmptyBatch.HOLD)
    assert decoded(encoded(ledger)) == ledger


@given(lengths=LENGTHS, plan=PLANS, nominal=NOMINAL, mode=st.sampled_from(LrMode))
def test_no_float_is_in_the_ledger(lengths: list[int], plan: Plan, nominal: Fraction, mode: LrMode) -> None:
    ledger, _ = train(new(mode=mode), 0, lengths, plan, nominal=nominal)
    ledger = ledger.opened(1, 8).committed_update(1, "a", range(3)).skipped_update(1, "b", [3])
    values = [getattr(ledger, field.name) for field in dataclasses.fields(ledger) if field.name != "schedule"]
    assert not [value for value in leaves(values) if isinstance(value, float)]
    assert not [value for value in leaves([COSINE.budget, COSINE.warm_up]) if isinstance(value, float)]


@given(cuts=st.lists(st.integers(1, 10**12 - 1), unique=True, max_size=8), nominal=st.integers(1, 10**12))
def test_lr_progress_stays_exact_with_counts_to_a_million_millions(cuts: list[int], nominal: int) -> None:
    schedule = LrSchedule(1e-3, budget=10**12, decay=Decay.COSINE)
    ledger = new(schedule).opened(0, 10**12, nominal=nominal)
    edges = [0, *sorted(cuts), 10**12]
    for number, (first, stop) in enumerate(pairwise(edges)):
        assert ledger.rate == schedule.rate(Fraction(nominal * first, 10**12))
        ledger = decoded(encoded(ledger)).committed_update(0, str(number), range(first, stop))
    assert ledger.closed(0).progress == nominal


def flat(ranks: Iterable[Sequence[int]]) -> list[int]:
    return [unit for rank in ranks for unit in rank]


def leaves(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | frozenset):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value]
