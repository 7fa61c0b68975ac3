"""A picture of an iteration is one line for a person, however many sequences it has."""

from __future__ import annotations

import pytest

from cli.jobs import event_line
from tidegate.v1 import control_pb2, events_pb2

GENERATION = events_pb2.Generation(
    engines=[events_pb2.Engine(gpus=["n0/0"], rate_tokens_per_s=1200.4), events_pb2.Engine(rate_tokens_per_s=800.0)],
    group_size=2,
    lengths=[9] * 4000,
    places=[-3, -4, 0, -1] * 1000,
)
LINES: dict[str, tuple[events_pb2.Event, str]] = {
    "a rollout's": (events_pb2.Event(generation=GENERATION), "2000/4000 responses, 2 engines at 2000 tokens/s"),
    "an inference's at work": (
        events_pb2.Event(inferring=events_pb2.Inferring(ready=[3, 1], is_busy=True)),
        "2 groups ready, at work",
    ),
    "an inference's at rest": (events_pb2.Event(inferring=events_pb2.Inferring()), "0 groups ready"),
    "an actor's at an update": (
        events_pb2.Event(training=events_pb2.Training(num_minibatches_done=2, num_taken=12)),
        "2 minibatches, 12 groups taken, at an update",
    ),
    "an actor's between two": (
        events_pb2.Event(training=events_pb2.Training(is_at_boundary=True)),
        "0 minibatches, 0 groups taken, between two updates",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_a_picture_is_a_line(case: str) -> None:
    event, want = LINES[case]
    assert event_line(control_pb2.ListEventsResponse(event=event)).endswith(f"iteration 0  {want}")
