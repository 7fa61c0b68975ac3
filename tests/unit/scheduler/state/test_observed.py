"""A picture of an iteration is whole: what a component tells wrongly is refused when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from services.scheduler.state.observed import (
    AWAY,
    CUT,
    ENDED,
    QUEUED,
    Engine,
    Generation,
    Inferring,
    TrainerRate,
    Training,
)
from tests.unit.scheduler.situations import gpus
from tidegate.types import Layout

ENGINES = (Engine(gpus(0, 2), 2, 1, 300, 1000, 8, 50.0), Engine(gpus(2, 4), 1, 0, 100, 1000, 8, 50.0))
PLACES = (0, 0, 0, 1, QUEUED, QUEUED, AWAY, ENDED, CUT, ENDED)
LENGTHS = (10, 20, 0, 30, 0, 40, 50, 60, 70, 80)


def told(**fields: Any) -> Generation:
    usual: dict[str, Any] = {
        "engines": ENGINES,
        "group_size": 2,
        "lengths": LENGTHS,
        "places": PLACES,
        "queue": (5, 4),
        "hints": (1.0, 0.0, 2.0, 3.0, 4.0),
    }
    return Generation(**usual | fields)


def with_engine(**fields: Any) -> Generation:
    return told(engines=(replace(ENGINES[0], **fields), ENGINES[1]))


def test_a_whole_picture_counts_by_sequence_and_by_group() -> None:
    whole = told()
    assert (whole.num_groups, whole.num_submitted, whole.num_unfinished) == (5, 4, 7)
    assert whole.unfinished_by_group.tolist() == [2, 2, 2, 1, 0]
    assert whole.engines[0].kv_use == 0.3


def test_two_pictures_of_the_same_are_equal_whatever_was_asked_of_them() -> None:
    asked = told()
    assert asked.num_unfinished
    assert asked == told()


def test_a_picture_without_generated_sequences_is_valid() -> None:
    empty = told(engines=(), lengths=(), places=(), queue=(), hints=())
    assert (empty.num_groups, empty.num_unfinished, empty.num_submitted) == (0, 0, 0)


REFUSED: dict[str, tuple[Callable[[], Generation], str]] = {
    "groups of nothing": (lambda: told(group_size=0), "10 lengths and 10 places for groups of 0"),
    "a group that lacks a sequence": (lambda: told(group_size=4), "10 lengths and 10 places for groups of 4"),
    "a sequence without a place": (lambda: told(places=PLACES[:-1]), "10 lengths and 9 places for groups of 2"),
    "a prompt without a hint": (lambda: told(hints=(1.0,)), "1 hints for 5 groups"),
    "a length below nothing": (lambda: told(lengths=(-1, *LENGTHS[1:])), "a length of -1 or a place of -4"),
    "a place that there is not": (lambda: told(places=(*PLACES[:-1], -5)), "a length of 0 or a place of -5"),
    "an engine that there is not": (lambda: told(places=(2, *PLACES[1:])), "sequences on engine 2, there are 2"),
    "an engine that tells of more": (
        lambda: with_engine(num_waiting=5),
        "engine 0 tells of 7 sequences, the places of 3",
    ),
    "a queue that is too short": (lambda: told(queue=(4,)), "1 sequences in the queue, 2 places say so"),
    "a queue of others": (lambda: told(queue=(4, 6)), "2 sequences in the queue, 2 places say so"),
    "a sequence twice in the queue": (lambda: told(queue=(4, 4)), "2 sequences in the queue, 2 places say so"),
    "a GPU in two engines": (lambda: with_engine(gpus=gpus(1, 3)), "n0/2 in two engines"),
    "an engine that is slower than still": (
        lambda: with_engine(rate_tokens_per_s=-1.0),
        "whose rate is below 0 or no number",
    ),
    "an engine of no known speed": (lambda: with_engine(rate_tokens_per_s=nan), "whose rate is below 0 or no number"),
    "a hint that is no number": (
        lambda: told(hints=(nan, 0.0, 0.0, 0.0, 0.0)),
        "a hint that is below 0 or no number",
    ),
    "an engine without KV memory": (lambda: with_engine(kv_capacity_tokens=0), "an engine without room for a sequence"),
    "an engine that runs nothing": (lambda: with_engine(max_running=0), "an engine without room for a sequence"),
}


REFUSED_OF_OTHERS: dict[str, tuple[Callable[[], object], str]] = {
    "a group handed on twice": (lambda: Inferring((0, 1, 0)), "3 groups are ready, 2 different ones from 0 on"),
    "a group before the first": (lambda: Inferring((0, -1)), "2 groups are ready, 2 different ones from -1 on"),
    "fewer minibatches than none": (lambda: Training(num_minibatches_done=-1), "-1 minibatches done and 0 groups"),
    "fewer groups than none": (lambda: Training(num_taken=-2), "0 minibatches done and -2 groups taken"),
    "a rate of nothing": (
        lambda: Training(measured=(TrainerRate(Layout(dp=2), 0.0),)),
        "0.0 tokens/s measured in dp2; a measured rate is finite and above 0",
    ),
    "an inference that computes nothing": (
        lambda: Inferring(rate_tokens_per_s_per_gpu=0.0),
        "0.0 tokens/s measured of a GPU; a measured rate is finite and above 0",
    ),
    "an inference of no number": (lambda: Inferring(rate_tokens_per_s_per_gpu=nan), "nan tokens/s measured of a GPU"),
    "an update that takes less than nothing": (
        lambda: Training(update_s=-0.1),
        "update_s=-0.1; a measured time is finite and at least 0",
    ),
    "an update without an end": (lambda: Training(update_s=inf), "update_s=inf"),
    "a rate without an end": (lambda: Training(measured=(TrainerRate(Layout(dp=2), inf),)), "inf tokens/s"),
}


@pytest.mark.parametrize("name", REFUSED_OF_OTHERS)
def test_a_picture_of_inference_or_of_the_actor_that_cannot_be_is_refused(name: str) -> None:
    make, want = REFUSED_OF_OTHERS[name]
    with pytest.raises(ValueError, match="picture: ") as refused:
        make()
    assert want in str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_picture_that_contradicts_itself_is_refused(name: str) -> None:
    make, want = REFUSED[name]
    with pytest.raises(ValueError, match="the rollout's picture: ") as refused:
        make()
    assert want in str(refused.value)
