"""The bus in memory, for tests and the simulator's shells. One object is the server; all clients share it.

It keeps the promises of `tidegate.ports.bus` like the NATS version: one contract suite checks both. Messages are stored
as the bytes that would travel. Time is injected: a consumer reads `now` and awaits `sleep` while it waits for a
redelivery, so that a test may move the clock instead of waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import structlog

from tidegate.adapters import subjects
from tidegate.adapters.memory_streams import (
    Delivery,
    DurableConsumer,
    MemoryDeadLetters,
    MemoryServer,
    Progress,
    Source,
    Stored,
    Stream,
)
from tidegate.adapters.response_feed import ResponseFeed
from tidegate.codec import WireError, check_event, check_group, check_response, decode_event
from tidegate.ports.bus import BusLimits, OnDeadLetter, Stage, StaleTerm, StateCopy
from tidegate.types import JobId
from tidegate.v1.events_pb2 import Event
from tidegate.v1.samples_pb2 import SampleGroup


class MemoryBus:
    """All ports of `tidegate.ports.bus`: `streams`, `events`, `copies`, `samples`, `dead_letters`, `term`."""

    def __init__(
        self,
        limits: BusLimits | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        max_message_bytes: int = 8 * 2**20,
    ) -> None:
        server = MemoryServer(limits or BusLimits(), now=now, sleep=sleep, max_message_bytes=max_message_bytes)
        self._server = server
        self.streams = MemoryJobStreams(server)
        self.events = MemoryEventLog(server)
        self.copies = MemoryStateCopies(server)
        self.samples = MemorySampleStream(server)
        self.dead_letters = MemoryDeadLetters(server)
        self.term = MemoryTermRegister()

    async def close(self) -> None:
        """Does nothing: the messages stay for the other clients of this object."""

    def publish_raw(self, job: JobId, subject: str, payload: bytes) -> None:
        """Publishes any bytes on a subject of the job, or on the term's, as a foreign client of a real server could."""
        if subject == subjects.TERM_SUBJECT:
            self.term.write_raw(payload)
            return
        if subject == subjects.responses_subject(job):
            self._server.tell(subject, payload)
            return
        name = (
            subjects.events_stream(job)
            if subject.startswith(("tg.events.", "tg.state."))
            else subjects.samples_stream(job)
        )
        self._server.stream(name).append(Stored(subject, payload))
        self._server.wake()


class MemoryJobStreams:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def open_job(self, job: JobId, *, after_sequence: int = 0) -> None:
        limits = self._server.limits
        sizes = {
            subjects.events_stream(job): limits.events_max_bytes,
            subjects.samples_stream(job): limits.samples_max_bytes,
        }
        for name, max_bytes in sizes.items():
            first = after_sequence if name == subjects.events_stream(job) else 0
            self._server.streams.setdefault(name, Stream(name, max_bytes, last_sequence=first))
        self._server.dead.setdefault(job, {})

    async def begin_anew(self, job: JobId, *, after_sequence: int) -> None:
        stream = self._server.stream(subjects.events_stream(job))
        stream.messages.clear()
        stream.last_sequence = after_sequence

    async def remove_job(self, job: JobId) -> None:
        for stream in (subjects.events_stream(job), subjects.samples_stream(job)):
            self._server.streams.pop(stream, None)
        self._server.dead.pop(job, None)

    async def require_job(self, job: JobId) -> None:
        self._server.stream(subjects.events_stream(job))


class _EventDelivery(Delivery[Event]):
    @property
    def event(self) -> Event:
        return self._message


class _SampleDelivery(Delivery[SampleGroup]):
    @property
    def group(self) -> SampleGroup:
        return self._message


class _EventConsumer:
    def __init__(self, consumer: DurableConsumer[Event]) -> None:
        self._consumer = consumer

    async def next(self, *, timeout_s: float) -> _EventDelivery | None:
        for sequence, event in await self._consumer.fetch(1, timeout_s=timeout_s):
            return _EventDelivery(self._consumer, sequence, event)
        return None

    async def acknowledged(self) -> int:
        return self._consumer.settled_until()


class MemoryEventLog:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def publish(self, event: Event) -> int:
        check_event(event)
        job = JobId(event.job)
        payload = event.SerializeToString()
        self._server.check_size(payload, what=f"event {event.id}", remedy="publish less in one event")
        stream = self._server.stream(subjects.events_stream(job))
        if event.id not in stream.sequence_of_id:
            subject = subjects.subject_of_event(event)
            stream.sequence_of_id[event.id] = stream.append(Stored(subject, payload))
            if subject != subjects.event_subject(job):
                stream.keep_last(subject)
            self._server.wake()
        return stream.sequence_of_id[event.id]

    async def page(self, job: JobId, *, after_sequence: int) -> list[tuple[int, Event]]:
        found: list[tuple[int, Event]] = []
        for sequence, stored in sorted(self._server.stream(subjects.events_stream(job)).messages.items()):
            if sequence > after_sequence and stored.subject != subjects.copy_subject(job):
                with suppress(WireError):
                    found.append((sequence, decode_event(stored.payload)))
        return found

    async def last_sequence(self, job: JobId) -> int:
        return self._server.stream(subjects.events_stream(job)).last_sequence

    async def free_bytes(self, job: JobId) -> int:
        return self._server.stream(subjects.events_stream(job)).free_bytes

    async def read(
        self, job: JobId, *, after_sequence: int = 0, follow: bool = False
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Leaves out messages that cannot be decoded: they are among the dead letters."""
        stream = self._server.stream(subjects.events_stream(job))
        last = stream.last_sequence
        while True:
            for sequence, message in list(stream.messages.items()):
                if after_sequence < sequence and (follow or sequence <= last):
                    after_sequence = sequence
                    if message.subject == subjects.copy_subject(job):
                        continue
                    with suppress(WireError):
                        yield sequence, decode_event(message.payload)
            if not follow:
                return
            if after_sequence == stream.last_sequence:
                await self._server.wait_for_arrival()

    async def consumer(self, job: JobId, name: str, *, on_dead_letter: OnDeadLetter) -> _EventConsumer:
        def decode(message: Stored) -> Event:
            event = decode_event(message.payload)
            if event.job != job:
                raise WireError(f"Event.job {event.job!r} does not belong on subject {message.subject}")
            return event

        stream = self._server.stream(subjects.events_stream(job))
        source = Source(
            job=job,
            stream=stream,
            progress=stream.progress.setdefault(subjects.consumer_name(name), Progress()),
            pattern=subjects.event_subject(job),
            decode=decode,
            ack_wait_s=self._server.limits.event_ack_wait_s,
            one_at_a_time=True,
            max_deliveries=None,
            on_dead_letter=on_dead_letter,
        )
        return _EventConsumer(DurableConsumer(self._server, source))


class MemoryStateCopies:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def keep(self, job: JobId, copy: StateCopy) -> None:
        payload, stream = subjects.copy_payload(copy), self._server.stream(subjects.events_stream(job))
        self._server.check_size(payload, what=f"the state of job {job}", remedy="use fewer GPUs in one job")
        stream.append(Stored(subjects.copy_subject(job), payload))
        stream.keep_last(subjects.copy_subject(job))

    async def newest(self, job: JobId) -> StateCopy | None:
        stored = self._server.stream(subjects.events_stream(job)).messages.values()
        payloads = [each.payload for each in stored if each.subject == subjects.copy_subject(job)]
        return subjects.copy_of(payloads[-1]) if payloads else None

    async def drop_events(self, job: JobId, *, until: int) -> None:
        stream = self._server.stream(subjects.events_stream(job))
        first = min(stream.messages, default=stream.last_sequence + 1)
        last = subjects.last_dropped(first, stream.last_sequence, kept=self._server.limits.kept_events)
        copy = await self.newest(job)
        if last is None or copy is None:
            return
        for sequence in [each for each in stream.messages if each <= min(until, last, copy.through)]:
            del stream.messages[sequence]


class _SampleConsumer:
    def __init__(self, consumer: DurableConsumer[SampleGroup]) -> None:
        self._consumer = consumer

    async def fetch(self, max_groups: int, *, timeout_s: float) -> list[_SampleDelivery]:
        fetched = await self._consumer.fetch(max_groups, timeout_s=timeout_s)
        return [_SampleDelivery(self._consumer, sequence, group) for sequence, group in fetched]

    async def num_waiting(self) -> int:
        return self._consumer.num_waiting()


def _stored_group(stream: Stream, stage: Stage, subject: str) -> SampleGroup | None:
    """The group on a subject. Anybody may have published something else there."""
    for stored in stream.messages.values():
        if stored.subject == subject:
            with suppress(WireError):
                return subjects.decode_sample(stage, subject, stored.payload)
    return None


class MemorySampleStream:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def publish(self, stage: Stage, group: SampleGroup) -> bool:
        check_group(group, scored=stage is Stage.SCORED)
        subject = subjects.sample_subject(stage, group)
        payload = group.SerializeToString()
        self._server.check_size(payload, what=f"group {subject}", remedy="lower group_size or the longest response")
        stream = self._server.stream(subjects.samples_stream(JobId(group.job)))
        if _stored_group(stream, stage, subject) is not None:
            return False
        stream.append(Stored(subject, payload))
        self._server.wake()
        return True

    async def consumer(self, job: JobId, stage: Stage, name: str, *, on_dead_letter: OnDeadLetter) -> _SampleConsumer:
        def decode(message: Stored) -> SampleGroup:
            return subjects.decode_sample(stage, message.subject, message.payload)

        stream = self._server.stream(subjects.samples_stream(job))
        source = Source(
            job=job,
            stream=stream,
            progress=stream.progress.setdefault(subjects.consumer_name(name), Progress()),
            pattern=subjects.stage_samples(job, stage),
            decode=decode,
            ack_wait_s=self._server.limits.sample_ack_wait_s,
            one_at_a_time=False,
            max_deliveries=self._server.limits.max_deliveries,
            on_dead_letter=on_dead_letter,
        )
        return _SampleConsumer(DurableConsumer(self._server, source))

    async def published(self, job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> frozenset[int]:
        pattern = subjects.iteration_samples(job, stage, incarnation=incarnation, iteration=iteration)
        stream = self._server.stream(subjects.samples_stream(job))
        stored = {stream.messages[sequence].subject for sequence in stream.of(pattern)}
        groups = (subject for subject in stored if _stored_group(stream, stage, subject) is not None)
        return frozenset(prompt for _, _, _, prompt in subjects.groups_of(groups))

    async def stored_group(
        self, job: JobId, stage: Stage, *, incarnation: int, iteration: int, prompt: int
    ) -> SampleGroup | None:
        subject = subjects.group_subject(job, stage, incarnation=incarnation, iteration=iteration, prompt=prompt)
        return _stored_group(self._server.stream(subjects.samples_stream(job)), stage, subject)

    async def tell_response(self, response: SampleGroup) -> None:
        check_response(response)
        if self._server.fits(payload := response.SerializeToString()):
            self._server.tell(subjects.responses_subject(JobId(response.job)), payload)

    @asynccontextmanager
    async def responses(self, job: JobId) -> AsyncIterator[AsyncIterator[SampleGroup]]:
        feed, listening = ResponseFeed(job), self._server.feeds.setdefault(subjects.responses_subject(job), [])
        listening.append(feed)
        try:
            yield feed
        finally:
            listening.remove(feed)
            feed.end()

    async def purge(self, job: JobId, *, incarnation: int, iteration: int) -> None:
        stream = self._server.stream(subjects.samples_stream(job))
        for sequence in list(stream.of(subjects.job_samples(job))):
            group = subjects.parse_sample_subject(stream.messages[sequence].subject)
            if group is not None and group[1:3] < (incarnation, iteration):
                del stream.messages[sequence]


class MemoryTermRegister:
    def __init__(self) -> None:
        self._payload = subjects.term_payload(0)
        self._revision = 0

    async def read(self) -> tuple[int | None, int]:
        return subjects.term_of(self._payload), self._revision

    async def advance(self, *, expected_revision: int, term: int) -> int:
        if expected_revision != self._revision:
            raise StaleTerm(
                f"the term was advanced since revision {expected_revision} was read "
                f"(it is {self._revision} now); read again"
            )
        now, _ = await self.read()
        if now is not None and term <= now:
            raise ValueError(f"the term only grows: it is {now} and cannot become {term}; take at least {now + 1}")
        if now is None:
            structlog.get_logger("term").warning("the term register held no term", replaced_by=term)
        return self.write_raw(subjects.term_payload(term))

    def write_raw(self, payload: bytes) -> int:
        """Writes any bytes in the term's place, as a foreign client of a real server could."""
        self._payload = payload
        self._revision += 1
        return self._revision
