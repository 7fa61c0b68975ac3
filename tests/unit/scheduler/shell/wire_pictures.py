"""Pictures of an iteration as the wire has them, and as the scheduler reads them."""

from __future__ import annotations

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
from tidegate.codec import encode_layout
from tidegate.events import EventBody
from tidegate.types import Layout
from tidegate.v1 import events_pb2

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
