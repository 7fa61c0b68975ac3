"""A message decodes to its picture, and a message that is no legal picture is refused at the edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.shell.codecs.state_codec import event_of
from services.scheduler.state import events as ev
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
from tidegate.codec import WireError, decode_event, encode_layout
from tidegate.events import EventBody, EventSource
from tidegate.types import JobId, Layout, Role
from tidegate.v1 import events_pb2, types_pb2

WHOLE = Generation(
    engines=(Engine(gpus(0, 2), 1, 1, 300, 1000, 8, 50.5), Engine(gpus(2, 4), 0, 0, 0, 1000, 8, 0.0)),
    group_size=2,
    lengths=(10, 20, 30, 0, 2**20, 60),
    places=(0, 0, AWAY, QUEUED, CUT, ENDED),
    queue=(3,),
    hints=(12.5, 0.0, 80_000.25),
)
WHOLE_MESSAGE = events_pb2.Generation(
    engines=[
        events_pb2.Engine(
            gpus=gpus(0, 2),
            num_running=1,
            num_waiting=1,
            num_kv_tokens=300,
            kv_capacity_tokens=1000,
            max_running=8,
            rate_tokens_per_s=50.5,
        ),
        events_pb2.Engine(gpus=gpus(2, 4), kv_capacity_tokens=1000, max_running=8),
    ],
    group_size=2,
    lengths=[10, 20, 30, 0, 2**20, 60],
    places=[0, 0, AWAY, QUEUED, CUT, ENDED],
    queue=[3],
    hints=[12.5, 0.0, 80_000.25],
)
PICTURES: dict[str, tuple[EventBody, ev.Body]] = {
    "a rollout at work": (WHOLE_MESSAGE, WHOLE),
    "a rollout without engines": (
        events_pb2.Generation(group_size=1, lengths=[0], places=[QUEUED], queue=[0]),
        Generation((), 1, (0,), (QUEUED,), (0,)),
    ),
    "an inference at work": (events_pb2.Inferring(ready=[4, 0, 2], is_busy=True), Inferring((4, 0, 2), True)),
    "an inference that has measured": (
        events_pb2.Inferring(ready=[1], rate_tokens_per_s_per_gpu=25_000.5),
        Inferring((1,), rate_tokens_per_s_per_gpu=25_000.5),
    ),
    "an inference that is ahead": (events_pb2.Inferring(num_tokens_ahead=900), Inferring(num_tokens_ahead=900)),
    "an inference with nothing done": (events_pb2.Inferring(), Inferring()),
    "an actor between two updates": (
        events_pb2.Training(is_at_boundary=True),
        Training(0, 0, is_at_boundary=True, closes_at_ms=None),
    ),
    "an actor that closes at the epoch": (events_pb2.Training(closes_at_ms=0), Training(0, 0, False, 0)),
    "an actor in a portion": (events_pb2.Training(portion_ends_at_ms=0), Training(0, 0, False, portion_ends_at_ms=0)),
    "an actor that has measured": (
        events_pb2.Training(
            num_minibatches_done=2,
            num_taken=8,
            closes_at_ms=1_700_000,
            measured=[events_pb2.TrainerRate(layout=encode_layout(Layout(tp=2, dp=3)), rate_tokens_per_s=1e5)],
            update_s=0.0,
        ),
        Training(2, 8, False, 1_700_000, (TrainerRate(Layout(tp=2, dp=3), 1e5),), update_s=0.0),
    ),
}


def travelled(body: EventBody) -> ev.Body:
    source = EventSource("rollout@n0", role=Role.ROLLOUT, boot=1, now_ns=lambda: 0)
    message = source.event(body, job=JobId("tide"), incarnation=1, iteration=3)
    return event_of(decode_event(message.SerializeToString())).body


@pytest.mark.parametrize("case", PICTURES)
def test_a_message_decodes_to_the_value_of_its_picture(case: str) -> None:
    message, want = PICTURES[case]
    assert travelled(message) == want


def generation(**fields: Any) -> events_pb2.Generation:
    message = events_pb2.Generation()
    message.CopyFrom(WHOLE_MESSAGE)
    for name, value in fields.items():
        message.ClearField(name)  # type: ignore[arg-type]  # the cases name their fields
        getattr(message, name).extend(value)
    return message


def engine(**fields: Any) -> events_pb2.Generation:
    usual: dict[str, Any] = {"gpus": ["n0/0"], "kv_capacity_tokens": 10, "max_running": 1}
    return events_pb2.Generation(engines=[events_pb2.Engine(**usual | fields)], group_size=1)


REFUSED: dict[str, tuple[Callable[[], EventBody], str]] = {
    "groups of nothing": (
        events_pb2.Generation,
        "Generation: the rollout's picture: 0 lengths and 0 places for groups",
    ),
    "a place too few": (lambda: generation(places=[0]), "Generation: the rollout's picture: 6 lengths and 1 places"),
    "an engine that there is not": (
        lambda: generation(places=[5, 0, -2, -1, -4, -3]),
        "on engine 5, but there are 2 engines",
    ),
    "a queue that is not": (lambda: generation(queue=[]), "0 sequences are in the queue, but 1 have it as their place"),
    "an engine on no GPU": (lambda: engine(gpus=[]), "Engine.gpus is missing"),
    "an engine on what is no GPU": (lambda: engine(gpus=["n0"]), "Engine.gpus names 'n0'; it must be <node>/<index>"),
    "an engine without memory": (lambda: engine(kv_capacity_tokens=0), "an engine has no room for a sequence"),
    "an engine that is no number fast": (
        lambda: engine(rate_tokens_per_s=float("nan")),
        "a rate that is not a finite number of at least 0",
    ),
    "a group ready twice": (lambda: events_pb2.Inferring(ready=[1, 1]), "Inferring: inference's picture: 2 groups"),
    "an inference without a rate": (
        lambda: events_pb2.Inferring(rate_tokens_per_s_per_gpu=0.0),
        "Inferring: inference's picture: 0.0 tokens/s measured of a GPU",
    ),
    "an update before it began": (
        lambda: events_pb2.Training(update_s=-1.0),
        "Training: the actor's picture: update_s",
    ),
    "a rate of no layout": (
        lambda: events_pb2.Training(measured=[events_pb2.TrainerRate(rate_tokens_per_s=1.0)]),
        "TrainerRate.layout is missing",
    ),
    "a rate of nothing": (
        lambda: events_pb2.Training(measured=[events_pb2.TrainerRate(layout=types_pb2.Layout(dp=2))]),
        "Training: the actor's picture: 0.0 tokens/s measured in dp2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_message_that_cannot_be_a_picture_is_refused_at_the_edge(case: str) -> None:
    make, want = REFUSED[case]
    with pytest.raises(WireError) as refused:
        travelled(make())
    assert want in str(refused.value)
