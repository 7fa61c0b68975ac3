"""A job's events, from which metrics are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.tracking.metrics import IterationMetrics, Row
from tidegate.v1 import events_pb2, types_pb2

ACTOR, ROLLOUT, INFERENCE = types_pb2.ROLE_ACTOR, types_pb2.ROLE_ROLLOUT, types_pb2.ROLE_INFERENCE
GRANTS = [types_pb2.Grant(gpu=f"n0/{index}") for index in range(4)]


def event(at_s: float, role: Any, body: Any, *, iteration: int = 0, incarnation: int = 1) -> events_pb2.Event:
    made = events_pb2.Event(
        role=role, iteration=iteration, incarnation=incarnation, occurred_unix_ns=int((100 + at_s) * 1e9)
    )
    (name,) = [
        field.name for field in made.DESCRIPTOR.oneofs_by_name["body"].fields if field.message_type is body.DESCRIPTOR
    ]
    getattr(made, name).SetInParent()
    getattr(made, name).CopyFrom(body)
    return made


def report(**fields: Any) -> events_pb2.IterationReported:
    metrics = {"reward_mean": 0.5, "loss": 0.01, "response_tokens_mean": 20.0}
    trained, fate = types_pb2.Fate(num_samples=12), types_pb2.Fate
    return events_pb2.IterationReported(
        trained=trained, filtered=[fate(num_samples=3), fate(num_samples=1)], metrics=metrics, **fields
    )


def begun(*, incarnation: int = 1, at_s: float = 0.0) -> list[events_pb2.Event]:
    """The start of an incarnation: the layouts, then the weights, which every component holds one second later."""
    bodies = [
        (0.0, ROLLOUT, events_pb2.LayoutCommitted(grants=GRANTS[:3])),
        (0.0, ACTOR, events_pb2.LayoutCommitted(grants=GRANTS)),
        (0.5, ACTOR, events_pb2.WeightsPublished()),
        (0.75, ROLLOUT, events_pb2.WeightsLoaded()),
        (1.0, INFERENCE, events_pb2.WeightsLoaded()),
    ]
    return [event(at_s + after_s, role, body, incarnation=incarnation) for after_s, role, body in bodies]


def rows(*events: events_pb2.Event) -> list[Row]:
    metrics = IterationMetrics()
    return [row for each in events if (row := metrics.take(each)) is not None]


def evaluation(at_s: float, version: int, metrics: Mapping[str, float], *, incarnation: int = 1) -> events_pb2.Event:
    body = events_pb2.EvaluationReported(version=version, metrics=metrics)
    # No iteration follows the last version.
    return event(at_s, ROLLOUT, body, iteration=min(version, 1), incarnation=incarnation)
