"""Between the wire's pictures of an iteration and their values, both ways.

Invariants: `x_of(x_message(value)) == value`; a picture that the value refuses is refused with a WireError that names
the message, what is wrong of it and the numbers, and never reaches `evolve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.scheduler.observed import Engine, Generation, Inferring, TrainerRate, Training
from tidegate.codec import WireError, decode_layout, encode_layout, require
from tidegate.types import GpuId
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


def generation_message(told: Generation) -> events_pb2.Generation:
    return events_pb2.Generation(
        engines=[
            events_pb2.Engine(
                gpus=each.gpus,
                num_running=each.num_running,
                num_waiting=each.num_waiting,
                num_kv_tokens=each.num_kv_tokens,
                kv_capacity_tokens=each.kv_capacity_tokens,
                max_running=each.max_running,
                rate_tokens_per_s=each.rate_tokens_per_s,
            )
            for each in told.engines
        ],
        group_size=told.group_size,
        lengths=told.lengths,
        places=told.places,
        queue=told.queue,
        hints=told.hints,
    )


def inferring_of(message: events_pb2.Inferring) -> Inferring:
    with _refused("Inferring"):
        return Inferring(ready=tuple(message.ready), is_busy=message.is_busy)


def inferring_message(told: Inferring) -> events_pb2.Inferring:
    return events_pb2.Inferring(ready=told.ready, is_busy=told.is_busy)


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
        )


def training_message(told: Training) -> events_pb2.Training:
    return events_pb2.Training(
        num_minibatches_done=told.num_minibatches_done,
        num_taken=told.num_taken,
        is_at_boundary=told.is_at_boundary,
        closes_at_ms=told.closes_at_ms,
        measured=[
            events_pb2.TrainerRate(layout=encode_layout(each.layout), rate_tokens_per_s=each.rate_tokens_per_s)
            for each in told.measured
        ],
    )


def _engine_of(message: events_pb2.Engine) -> Engine:
    require(message, "gpus")
    for gpu in message.gpus:
        node, slash, index = gpu.rpartition("/")
        if not (node and slash and index.isdecimal()):
            raise WireError(f"Engine.gpus names {gpu!r}; it must be <node>/<index>")
    return Engine(
        gpus=tuple(GpuId(gpu) for gpu in message.gpus),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_kv_tokens=message.num_kv_tokens,
        kv_capacity_tokens=message.kv_capacity_tokens,
        max_running=message.max_running,
        rate_tokens_per_s=message.rate_tokens_per_s,
    )


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """What the value refuses, the wire refuses."""
    try:
        yield
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error
