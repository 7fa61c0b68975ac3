"""The picture of an iteration's training: its updates, and the rates that they give."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress

import pytest

from services.actor.minibatches import MinibatchAssembly
from services.actor.rates import TrainingRates
from services.actor.training_picture import EARLY, TrainingPicture
from tests.component_bench import ManualClock
from tidegate.candidates import Candidates
from tidegate.runtime.crew import WorkerGone
from tidegate.types import Layout, MinibatchOrder


def opened(clock: ManualClock) -> TrainingPicture:
    assembly = MinibatchAssembly(Candidates(0, 4, 0), num_minibatches=2, order=MinibatchOrder.FIXED)
    return TrainingPicture(assembly, TrainingRates(assumed_s=0.0), now_s=clock.now)


def portion(picture: TrainingPicture, num_tokens: int, *, is_last: bool) -> AbstractContextManager[None]:
    """A portion of one response, without its prompt."""
    return picture.in_portion(Layout(), num_tokens=num_tokens, lengths=[num_tokens], is_last=is_last)


async def test_an_interrupted_portion_counts_for_no_rate() -> None:
    clock = ManualClock()
    picture = opened(clock)
    with suppress(WorkerGone), portion(picture, 10, is_last=True):
        clock.now_s += 100.0
        assert not (await picture.paint()).is_at_boundary
        raise WorkerGone("a rank died")
    painted = await picture.paint()
    assert (list(painted.measured), painted.is_at_boundary) == ([], True)
    with portion(picture, 10, is_last=True):
        clock.now_s += 2.0
    (measured,) = (await picture.paint()).measured
    assert measured.rate_tokens_per_s == pytest.approx(10 / 2.0)


async def test_the_time_in_which_a_minibatch_waits_for_groups_counts_for_no_rate() -> None:
    clock = ManualClock()
    picture = opened(clock)
    with portion(picture, 10, is_last=False):
        clock.now_s += 1.0
    painted = await picture.paint()
    assert not painted.is_at_boundary
    clock.now_s += 300.0
    with portion(picture, 30, is_last=True):
        clock.now_s += 3.0
    (measured,) = (await picture.paint()).measured
    assert measured.rate_tokens_per_s == pytest.approx((10 + 30) / (1.0 + 3.0))


async def test_the_end_of_an_update_is_foretold_only_in_its_last_portion() -> None:
    clock = ManualClock()
    picture = opened(clock)
    with portion(picture, 10, is_last=True):
        assert not (await picture.paint()).HasField("closes_at_ms")
        clock.now_s += 5.0
    with portion(picture, 20, is_last=False):
        assert not (await picture.paint()).HasField("closes_at_ms")
        clock.now_s += 10.0
    before_ms = time.time_ns() // 1_000_000
    with portion(picture, 20, is_last=True):
        painted = await picture.paint()
    assert painted.closes_at_ms - before_ms == pytest.approx(EARLY * 10_000, abs=1000)
