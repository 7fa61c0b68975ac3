"""A message decodes to its picture, and a message that is no legal picture is refused at the edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.shell.codecs.state_codec import event_of
from services.scheduler.state import events as ev
from tests.unit.scheduler.shell.wire_pictures import PICTURES, WHOLE_MESSAGE
from tidegate.codec import WireError, decode_event
from tidegate.events import EventBody, EventSource
from tidegate.types import JobId, Role
from tidegate.v1 import events_pb2, types_pb2


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
    "an engine on what is no GPU": (lambda: engine(gpus=["n0"]), "Engine.gpus is 'n0'; it must be <node>/<index>"),
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
