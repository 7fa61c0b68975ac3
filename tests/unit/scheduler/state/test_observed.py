"""A picture that contradicts itself is refused when it is constructed."""

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


def generation(**fields: Any) -> Generation:
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
    return generation(engines=(replace(ENGINES[0], **fields), ENGINES[1]))


def test_a_whole_picture_counts_by_sequence_and_by_group() -> None:
    whole = generation()
    assert (whole.num_groups, whole.num_submitted, whole.num_unfinished) == (5, 4, 7)
    assert whole.unfinished_by_group.tolist() == [2, 2, 2, 1, 0]
    assert whole.engines[0].kv_use == 0.3


def test_pictures_with_equal_fields_are_equal_whichever_properties_were_read() -> None:
    picture = generation()
    assert picture.num_unfinished
    assert picture == generation()


def test_a_picture_without_generated_sequences_is_valid() -> None:
    empty = generation(engines=(), lengths=(), places=(), queue=(), hints=())
    assert (empty.num_groups, empty.num_unfinished, empty.num_submitted) == (0, 0, 0)


REFUSED: dict[str, tuple[Callable[[], Generation], str]] = {
    "groups of no sequences": (lambda: generation(group_size=0), "10 lengths and 10 places for groups of 0"),
    "a group that lacks a sequence": (lambda: generation(group_size=4), "10 lengths and 10 places for groups of 4"),
    "a sequence without a place": (lambda: generation(places=PLACES[:-1]), "10 lengths and 9 places for groups of 2"),
    "a prompt without a hint": (lambda: generation(hints=(1.0,)), "1 hints for 5 groups"),
    "a length below 0": (
        lambda: generation(lengths=(-1, *LENGTHS[1:])),
        "the least length is -1 and the least place -4",
    ),
    "a place that does not exist": (
        lambda: generation(places=(*PLACES[:-1], -5)),
        "the least length is 0 and the least place -5",
    ),
    "an engine that does not exist": (
        lambda: generation(places=(2, *PLACES[1:])),
        "a sequence is on engine 2, but there are 2 engines",
    ),
    "an engine that counts more sequences than have it as their place": (
        lambda: with_engine(num_waiting=5),
        "engine 0 counts 7 sequences, but 3 have it as their place",
    ),
    "a queue that is too short": (
        lambda: generation(queue=(4,)),
        "1 sequences are in the queue, but 2 have it as their place",
    ),
    "a queue of sequences with another place": (
        lambda: generation(queue=(4, 6)),
        "2 sequences are in the queue, but 2 have it as their place",
    ),
    "a sequence twice in the queue": (
        lambda: generation(queue=(4, 4)),
        "2 sequences are in the queue, but 2 have it as their place",
    ),
    "a GPU in two engines": (lambda: with_engine(gpus=gpus(1, 3)), "n0/2 in two engines"),
    "an engine with a rate below 0": (
        lambda: with_engine(rate_tokens_per_s=-1.0),
        "a rate that is not a finite number of at least 0",
    ),
    "an engine whose rate is no number": (
        lambda: with_engine(rate_tokens_per_s=nan),
        "a rate that is not a finite number of at least 0",
    ),
    "a hint that is no number": (
        lambda: generation(hints=(nan, 0.0, 0.0, 0.0, 0.0)),
        "a hint is not a finite number of at least 0",
    ),
    "an engine without KV memory": (lambda: with_engine(kv_capacity_tokens=0), "an engine has no room for a sequence"),
    "an engine that runs nothing": (lambda: with_engine(max_running=0), "an engine has no room for a sequence"),
}


REFUSED_OF_INFERENCE_OR_ACTOR: dict[str, tuple[Callable[[], object], str]] = {
    "a group in the list twice": (lambda: Inferring((0, 1, 0)), "3 groups are ready, 2 different ones from 0 on"),
    "a group before the first": (lambda: Inferring((0, -1)), "2 groups are ready, 2 different ones from -1 on"),
    "fewer than 0 tokens ahead": (lambda: Inferring(num_tokens_ahead=-1), "-1 tokens ahead; give at least 0"),
    "fewer than 0 minibatches": (lambda: Training(num_minibatches_done=-1), "-1 minibatches done and 0 groups"),
    "fewer than 0 groups": (lambda: Training(num_taken=-2), "0 minibatches done and -2 groups taken"),
    "a rate of 0": (
        lambda: Training(measured=(TrainerRate(Layout(dp=2), 0.0),)),
        "0.0 tokens/s measured in dp2; a measured rate is finite and above 0",
    ),
    "an inference rate of 0": (
        lambda: Inferring(rate_tokens_per_s_per_gpu=0.0),
        "0.0 tokens/s measured of a GPU; a measured rate is finite and above 0",
    ),
    "an inference rate that is no number": (
        lambda: Inferring(rate_tokens_per_s_per_gpu=nan),
        "nan tokens/s measured of a GPU",
    ),
    "an update time below 0": (
        lambda: Training(update_s=-0.1),
        "update_s=-0.1; a measured time is finite and at least 0",
    ),
    "an infinite update time": (lambda: Training(update_s=inf), "update_s=inf"),
    "an infinite rate": (lambda: Training(measured=(TrainerRate(Layout(dp=2), inf),)), "inf tokens/s"),
}


@pytest.mark.parametrize("name", REFUSED_OF_INFERENCE_OR_ACTOR)
def test_a_picture_of_inference_or_of_the_actor_that_cannot_be_is_refused(name: str) -> None:
    make, want = REFUSED_OF_INFERENCE_OR_ACTOR[name]
    with pytest.raises(ValueError, match="picture: ") as refused:
        make()
    assert want in str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_picture_that_contradicts_itself_is_refused(name: str) -> None:
    make, want = REFUSED[name]
    with pytest.raises(ValueError, match="the rollout's picture: ") as refused:
        make()
    assert want in str(refused.value)
