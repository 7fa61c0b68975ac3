"""Decode the wire's pictures of an iteration.

Invariant: a picture that is no legal value is refused with a WireError that names the message, the fault and the
numbers. It never reaches `evolve`. [test_observed_codec: cannot_be_a_picture_is_refused]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.scheduler.state.observed import Engine, Generation, Inferring, TrainerRate, Training
from tidegate.codec import WireError, decode_gpus, decode_layout, require
from tidegate.v1 import events_pb2


def generation_of(message: events_pb2.Generation) -> Generation:
    engines = tuple(_engine_of(each) for each in message.engines)
    with _refused("Generation"):
        return Generation(
            engines=engines,
            group_size=message.group_size,
            lengths=tuple(message.lengths),
            places=tuple(message.places),
            queue=tuple(message.queue),
            hints=tuple(message.hints),
        )


def inferring_of(message: events_pb2.Inferring) -> Inferring:
    with _refused("Inferring"):
        return Inferring(
            ready=tuple(message.ready),
            is_busy=message.is_busy,
            rate_tokens_per_s_per_gpu=(
                message.rate_tokens_per_s_per_gpu if message.HasField("rate_tokens_per_s_per_gpu") else None
            ),
            num_tokens_ahead=message.num_tokens_ahead,
        )


def training_of(message: events_pb2.Training) -> Training:
    for each in message.measured:
        require(each, "layout")
    with _refused("Training"):
        return Training(
            num_minibatches_done=message.num_minibatches_done,
            num_taken=message.num_taken,
            is_at_boundary=message.is_at_boundary,
            closes_at_ms=message.closes_at_ms if message.HasField("closes_at_ms") else None,
            measured=tuple(
                TrainerRate(decode_layout(each.layout), each.rate_tokens_per_s) for each in message.measured
            ),
            update_s=message.update_s if message.HasField("update_s") else None,
        )


def _engine_of(message: events_pb2.Engine) -> Engine:
    require(message, "gpus")
    return Engine(
        gpus=decode_gpus(message.gpus, field="Engine.gpus"),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_kv_tokens=message.num_kv_tokens,
        kv_capacity_tokens=message.kv_capacity_tokens,
        max_running=message.max_running,
        rate_tokens_per_s=message.rate_tokens_per_s,
    )


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Raise a WireError where the value's constructor raises a ValueError."""
    try:
        yield
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error
