"""A bus server in memory: streams, durable consumers, dead letters, and waiting for arrivals."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidegate.adapters import subjects
from tidegate.adapters.response_feed import ResponseFeed
from tidegate.codec import WireError
from tidegate.ports.bus import (
    BusLimits,
    DeadLetter,
    JobNotOpen,
    MessageTooLarge,
    OnDeadLetter,
    UnknownDeadLetter,
)
from tidegate.types import JobId

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Stored:
    subject: str
    payload: bytes


@dataclass(slots=True)
class Progress:
    """The place of a durable consumer: for each message its deliveries, its due time, whether it is settled, and the
    number of its dead letter."""

    num_delivered: dict[int, int] = field(default_factory=dict)
    due: dict[int, float] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    buried: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Stream:
    name: str
    max_bytes: int
    messages: dict[int, Stored] = field(default_factory=dict)
    sequence_of_id: dict[str, int] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    last_sequence: int = 0

    @property
    def free_bytes(self) -> int:
        return self.max_bytes - sum(len(stored.payload) for stored in self.messages.values())

    def append(self, message: Stored) -> int:
        if len(message.payload) > self.free_bytes:
            raise subjects.stream_full(self.name, max_bytes=self.max_bytes, size_bytes=len(message.payload))
        self.last_sequence += 1
        self.messages[self.last_sequence] = message
        return self.last_sequence

    def keep_last(self, subject: str) -> None:
        """Drops the messages of the subject but the last."""
        *others, _ = [sequence for sequence, stored in self.messages.items() if stored.subject == subject]
        for sequence in others:
            del self.messages[sequence]

    def of(self, pattern: str) -> Iterator[int]:
        """Sequences, in order, of the messages whose subject starts like the pattern before its wildcard."""
        start = pattern.rstrip(">*")
        return (sequence for sequence, stored in self.messages.items() if stored.subject.startswith(start))


@dataclass(slots=True)
class Dead:
    letter: DeadLetter
    stream: Stream
    message: Stored


class MemoryServer:
    """The streams of all jobs, and the waiting for arrivals in them."""

    def __init__(
        self,
        limits: BusLimits,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        max_message_bytes: int,
    ) -> None:
        self.limits = limits
        self.now = now
        self.dead: dict[JobId, dict[int, Dead]] = {}
        self.streams: dict[str, Stream] = {}
        self.feeds: dict[str, list[ResponseFeed]] = {}
        """Those who listen to responses, by subject."""
        self._sleep = sleep
        self._max_message_bytes = max_message_bytes
        self._arrived = asyncio.Event()
        self._dead_ids = itertools.count(1)

    def stream(self, name: str) -> Stream:
        found = self.streams.get(name)
        if found is None:
            raise JobNotOpen(f"there is no stream {name}: the job was not opened on this bus; call open_job first")
        return found

    def fits(self, payload: bytes) -> bool:
        return len(payload) <= self._max_message_bytes

    def tell(self, subject: str, payload: bytes) -> None:
        for feed in self.feeds.get(subject, []):
            feed.offer(payload)

    def check_size(self, payload: bytes, *, what: str, remedy: str) -> None:
        if not self.fits(payload):
            raise MessageTooLarge(
                f"{what} is {len(payload)} bytes; this bus takes {self._max_message_bytes}: "
                f"raise max_message_bytes, or {remedy}"
            )

    def bury(self, job: JobId, stream: Stream, sequence: int, reason: str) -> DeadLetter:
        message = stream.messages[sequence]
        letter = DeadLetter(
            id=next(self._dead_ids),
            job=job,
            subject=message.subject,
            reason=reason,
            size_bytes=len(message.payload),
        )
        self.dead[job][letter.id] = Dead(letter, stream, message)
        return letter

    def wake(self) -> None:
        """Wakes the consumers and readers that wait for an arrival."""
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()

    async def wait(self, until: float) -> None:
        """Returns at `until`, or earlier when something arrives."""
        tasks = [
            asyncio.ensure_future(self._sleep(max(until - self.now(), 0.0))),
            asyncio.create_task(self._arrived.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def wait_for_arrival(self) -> None:
        await self._arrived.wait()


class MemoryDeadLetters:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def list(self, job: JobId) -> list[DeadLetter]:
        return [dead.letter for dead in self._of(job).values()]

    async def replay(self, job: JobId, dead_letter: int) -> None:
        dead = self._get(job, dead_letter)
        dead.stream.append(dead.message)
        del self._of(job)[dead_letter]
        self._server.wake()

    async def drop(self, job: JobId, dead_letter: int) -> None:
        self._get(job, dead_letter)
        del self._of(job)[dead_letter]

    def _of(self, job: JobId) -> dict[int, Dead]:
        self._server.stream(subjects.events_stream(job))
        return self._server.dead[job]

    def _get(self, job: JobId, dead_letter: int) -> Dead:
        found = self._of(job).get(dead_letter)
        if found is None:
            raise UnknownDeadLetter(
                f"job {job} has no dead letter {dead_letter}: it was replayed or dropped, or never was; "
                "list them to see"
            )
        return found


@dataclass(frozen=True, slots=True)
class Source(Generic[M]):
    """The stream that a durable consumer reads, and how it checks messages."""

    job: JobId
    stream: Stream
    progress: Progress
    pattern: str
    decode: Callable[[Stored], M]
    ack_wait_s: float
    one_at_a_time: bool
    max_deliveries: int | None
    on_dead_letter: OnDeadLetter


class DurableConsumer(Generic[M]):
    def __init__(self, server: MemoryServer, source: Source[M]) -> None:
        self._server = server
        self._source = source

    async def fetch(self, num: int, *, timeout_s: float) -> list[tuple[int, M]]:
        ends = self._server.now() + timeout_s
        while True:
            admitted = []
            for sequence in self._take(num):
                message = await self._admit(sequence)
                if message is not None:
                    admitted.append((sequence, message))
            now = self._server.now()
            if admitted or now >= ends:
                return admitted
            due = [when for sequence, when in self._source.progress.due.items() if sequence in self._unsettled()]
            await self._server.wait(min([ends, *due]))

    def num_delivered(self, sequence: int) -> int:
        return self._source.progress.num_delivered[sequence]

    def num_waiting(self) -> int:
        return len(self._unsettled())

    def settled_until(self) -> int:
        """The last message that is settled, with all before it."""
        first = min(self._unsettled(), default=None)
        return max((each for each in self._source.progress.settled if first is None or each < first), default=0)

    def settle(self, sequence: int) -> None:
        self._source.progress.settled.add(sequence)
        self._source.progress.due.pop(sequence, None)
        self._server.wake()

    def due_again(self, sequence: int, *, in_s: float) -> None:
        if sequence not in self._source.progress.settled:
            self._source.progress.due[sequence] = self._server.now() + in_s
            self._server.wake()

    def in_progress(self, sequence: int) -> None:
        self.due_again(sequence, in_s=self._source.ack_wait_s)

    async def bury(self, sequence: int, reason: str, *, removes: bool = False) -> None:
        """`removes`: the message leaves its stream too, as its subject may be that of one to come."""
        source = self._source
        if sequence in source.progress.settled or sequence not in source.stream.messages:
            return
        buried = source.progress.buried
        if sequence not in buried:
            buried[sequence] = self._server.bury(source.job, source.stream, sequence, reason).id
        # None: a person has replayed or dropped it since the message was here before.
        if (dead := self._server.dead[source.job].get(buried[sequence])) is not None:
            await source.on_dead_letter(dead.letter)
        if removes:
            del source.stream.messages[sequence]
        self.settle(sequence)

    def _unsettled(self) -> set[int]:
        source = self._source
        return set(source.stream.of(source.pattern)) - source.progress.settled

    def _take(self, num: int) -> list[int]:
        """The messages to deliver now, in order; each is due again after the ack wait."""
        progress, now = self._source.progress, self._server.now()
        unsettled = self._unsettled()
        ready = sorted(sequence for sequence in unsettled if progress.due.get(sequence, now) <= now)
        if self._source.one_at_a_time and any(progress.due.get(sequence, now) > now for sequence in unsettled):
            return []
        taken = ready[:num]
        for sequence in taken:
            progress.num_delivered[sequence] = progress.num_delivered.get(sequence, 0) + 1
            progress.due[sequence] = now + self._source.ack_wait_s
        return taken

    async def _admit(self, sequence: int) -> M | None:
        limit = self._source.max_deliveries
        if limit is not None and self.num_delivered(sequence) > limit:
            await self.bury(sequence, f"delivered {limit} times and never acknowledged; see what its consumer logged")
            return None
        try:
            return self._source.decode(self._source.stream.messages[sequence])
        except WireError as undecodable:  # dead-letter it: every further delivery would fail too
            await self.bury(sequence, str(undecodable), removes=True)
            return None


class Delivery(Generic[M]):
    def __init__(self, consumer: DurableConsumer[M], sequence: int, message: M) -> None:
        self._consumer = consumer
        self._sequence = sequence
        self._message = message
        self._num_deliveries = consumer.num_delivered(sequence)

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def num_deliveries(self) -> int:
        return self._num_deliveries

    async def ack(self) -> None:
        self._consumer.settle(self._sequence)

    async def in_progress(self) -> None:
        self._consumer.in_progress(self._sequence)

    async def nak(self, *, delay_s: float = 0.0) -> None:
        self._consumer.due_again(self._sequence, in_s=delay_s)

    async def dead_letter(self, reason: str) -> None:
        await self._consumer.bury(self._sequence, reason)
