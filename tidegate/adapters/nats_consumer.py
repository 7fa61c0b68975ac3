"""Durable consumers on JetStream, and the dead letters: the messages that no consumer can settle.

A message that was delivered too often or cannot be decoded takes these steps:
1. `store` writes it as a dead letter.
2. `on_dead_letter` reports it.
3. One that cannot be decoded leaves its stream.
4. The server gets +TERM.

A crash in between repeats the steps; the dead letter is deduplicated. If a person has replayed or dropped it meanwhile,
there is nothing to report. The server's own delivery limit is off, because a
message past that limit would silently stay behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nats.aio.msg import Msg

from tidegate.adapters import subjects
from tidegate.adapters.nats_link import CONSUMER_NOT_FOUND, MAX_BYTES_EXCEEDED, NatsLink, NatsRefused, stored_sequence
from tidegate.codec import WireError
from tidegate.json_text import parse_json, typed
from tidegate.ports.bus import DeadLetter, OnDeadLetter, UnknownDeadLetter
from tidegate.types import JobId

M = TypeVar("M")

_NS = 10**9
# Longer reasons are cut. They must fit the headroom that every message leaves below the server's limit.
_MAX_REASON = 1000


class NatsDeadLetters:
    def __init__(self, link: NatsLink, *, max_bytes: int) -> None:
        self._link = link
        self._max_bytes = max_bytes

    async def store(self, job: JobId, message: Msg, *, consumer: str, reason: str) -> DeadLetter | None:
        """Sets the message aside. The same message again gives the same dead letter, or None once that was replayed or
        dropped. StreamFull."""
        reason = reason[:_MAX_REASON]
        origin = message.metadata
        stream = subjects.dead_stream(job)
        try:
            ack = await self._link.publish(
                subjects.dead_subject(job),
                message.data,
                stream=stream,
                message_id=f"{origin.stream}/{consumer}/{origin.sequence.stream}",
                # Header values are one line of ASCII. JSON turns any reason into one.
                headers={"Tg-Subject": message.subject, "Tg-Stream": origin.stream, "Tg-Reason": json.dumps(reason)},
            )
        except NatsRefused as refused:
            size_bytes = len(message.data)
            raise full_or_refused(refused, stream, max_bytes=self._max_bytes, size_bytes=size_bytes) from refused
        if ack.get("duplicate") and await self._find(job, ack["seq"]) is None:
            return None
        return DeadLetter(id=ack["seq"], job=job, subject=message.subject, reason=reason, size_bytes=len(message.data))

    async def list(self, job: JobId) -> list[DeadLetter]:
        stream = subjects.dead_stream(job)
        await self._link.require_stream(stream)
        found: list[DeadLetter] = []
        while page := await self._link.read(stream, from_sequence=found[-1].id + 1 if found else 1):
            found += [dead_letter_of(job, message) for message in page]
        return found

    async def replay(self, job: JobId, dead_letter: int) -> None:
        message = await self._get(job, dead_letter)
        headers = message.headers or {}
        if not {"Tg-Subject", "Tg-Stream"} <= headers.keys():
            raise UnknownDeadLetter(f"dead letter {dead_letter} of {job} says not whence it came: drop it")
        await self._link.publish(
            headers["Tg-Subject"],
            message.data,
            stream=headers["Tg-Stream"],
            message_id=f"replay/{dead_letter}",
        )
        await self._delete(job, dead_letter)

    async def drop(self, job: JobId, dead_letter: int) -> None:
        await self._get(job, dead_letter)
        await self._delete(job, dead_letter)

    async def _get(self, job: JobId, dead_letter: int) -> Msg:
        await self._link.require_stream(subjects.dead_stream(job))
        if (found := await self._find(job, dead_letter)) is not None:
            return found
        raise UnknownDeadLetter(
            f"job {job} has no dead letter {dead_letter}: it was replayed or dropped, or never was; list them to see"
        )

    async def _find(self, job: JobId, dead_letter: int) -> Msg | None:
        page = await self._link.read(subjects.dead_stream(job), from_sequence=dead_letter, num=1)
        return page[0] if page and stored_sequence(page[0]) == dead_letter else None

    async def _delete(self, job: JobId, dead_letter: int) -> None:
        await self._link.remove(subjects.dead_stream(job), dead_letter)


@dataclass(frozen=True, slots=True)
class Source(Generic[M]):
    """The stream of a job that a durable consumer reads, and how it checks messages."""

    job: JobId
    stream: str
    consumer: str
    filter_subject: str
    decode: Callable[[Msg], M]
    ack_wait_s: float
    max_ack_pending: int
    max_deliveries: int | None
    on_dead_letter: OnDeadLetter


class Delivery(Generic[M]):
    def __init__(self, consumer: DurableConsumer[M], raw: Msg, message: M) -> None:
        self._consumer = consumer
        self._raw = raw
        self._message = message

    @property
    def sequence(self) -> int:
        return self._raw.metadata.sequence.stream

    @property
    def num_deliveries(self) -> int:
        return self._raw.metadata.num_delivered

    async def ack(self) -> None:
        await self._consumer.settle(self._raw, b"+ACK")

    async def in_progress(self) -> None:
        await self._consumer.settle(self._raw, b"+WPI")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        delay = b' {"delay": %d}' % int(delay_s * _NS) if delay_s > 0 else b""
        await self._consumer.settle(self._raw, b"-NAK" + delay)

    async def dead_letter(self, reason: str) -> None:
        await self._consumer.bury(self._raw, reason)


class DurableConsumer(Generic[M]):
    """A durable pull consumer. It is created again whenever the server does not know it."""

    def __init__(self, link: NatsLink, source: Source[M], dead_letters: NatsDeadLetters) -> None:
        self._link = link
        self._source = source
        self._dead_letters = dead_letters

    async def ensure(self) -> None:
        source = self._source
        await self._link.require_stream(source.stream)
        config: dict[str, Any] = {
            "durable_name": source.consumer,
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_policy": "explicit",
            "ack_wait": int(source.ack_wait_s * _NS),
            "max_deliver": -1,
            "max_ack_pending": source.max_ack_pending,
            "filter_subject": source.filter_subject,
        }
        await self._link.api(
            f"CONSUMER.DURABLE.CREATE.{source.stream}.{source.consumer}",
            {"stream_name": source.stream, "config": config},
        )

    async def fetch(self, num: int, *, timeout_s: float) -> list[tuple[Msg, M]]:
        """Waits for one message that passes its checks. A message that fails them becomes a dead letter."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        while True:
            raws = await self._pull(num, timeout_s=max(ends - loop.time(), 0.0))
            admitted = [(raw, message) for raw in raws if (message := await self._admit(raw)) is not None]
            if admitted or not raws:
                return admitted

    async def info(self) -> dict[str, Any]:
        try:
            return await self._link.api(f"CONSUMER.INFO.{self._source.stream}.{self._source.consumer}", {})
        except NatsRefused as refused:
            if refused.err_code != CONSUMER_NOT_FOUND:
                raise
            await self.ensure()
            return await self._link.api(f"CONSUMER.INFO.{self._source.stream}.{self._source.consumer}", {})

    async def settle(self, raw: Msg, verdict: bytes) -> None:
        await self._link.settle(raw, verdict)

    async def bury(self, raw: Msg, reason: str, *, removes: bool = False) -> None:
        """`removes`: the message leaves its stream too, as its subject may be that of one to come."""
        source = self._source
        dead_letter = await self._dead_letters.store(source.job, raw, consumer=source.consumer, reason=reason)
        if dead_letter is not None:
            await source.on_dead_letter(dead_letter)
        if removes:
            await self._link.remove(source.stream, raw.metadata.sequence.stream)
        await self._link.settle(raw, b"+TERM")

    async def _pull(self, num: int, *, timeout_s: float) -> list[Msg]:
        source = self._source
        try:
            return await self._link.pull(source.stream, source.consumer, num=num, timeout_s=timeout_s)
        except NatsRefused:
            await self.ensure()
            return await self._link.pull(source.stream, source.consumer, num=num, timeout_s=timeout_s)

    async def _admit(self, raw: Msg) -> M | None:
        limit = self._source.max_deliveries
        if limit is not None and raw.metadata.num_delivered > limit:
            await self.bury(raw, f"delivered {limit} times and never acknowledged; see what its consumer logged")
            return None
        try:
            return self._source.decode(raw)
        except WireError as undecodable:  # dead-letter it: every further delivery would fail too
            await self.bury(raw, str(undecodable), removes=True)
            return None


def full_or_refused(refused: NatsRefused, stream: str, *, max_bytes: int, size_bytes: int) -> Exception:
    """The exception for a refused publish: StreamFull with its remedy, or the refusal itself."""
    if refused.err_code != MAX_BYTES_EXCEEDED:
        return refused
    return subjects.stream_full(stream, max_bytes=max_bytes, size_bytes=size_bytes)


def dead_letter_of(job: JobId, message: Msg) -> DeadLetter:
    """Any process may publish on the subject of dead letters: one that no consumer stored has no subject."""
    headers = message.headers or {}
    try:
        reason = typed(str, parse_json(headers["Tg-Reason"]), "Tg-Reason")
    except (KeyError, ValueError) as error:
        reason = f"no consumer set it aside ({type(error).__name__}: {error})"
    return DeadLetter(
        id=stored_sequence(message),
        job=job,
        subject=headers.get("Tg-Subject", ""),
        reason=reason,
        size_bytes=len(message.data),
    )
