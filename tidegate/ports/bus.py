"""The bus as the services see it: a log of events and a stream of samples a job, its dead letters, the fencing term.

What every implementation promises (tests/contract/test_bus.py asks it of each):
- Events of a job are totally ordered by their stream sequence; a repeated event id is stored once.
- A group is stored once for (stage, incarnation, iteration, prompt), however often it is published.
- Delivery is at least once: what is neither acknowledged nor reported in progress within `ack_wait_s` comes again.
  Consumers are durable by name: they go on where they were after a crash, a reconnect or a restart of the server.
- Nothing is removed by an acknowledgement. Samples stay until `purge`, dead letters until replayed or dropped, events
  for good.
- A message that cannot be decoded, or was delivered too often, is kept as a dead letter with its reason, told to the
  consumer's `on_dead_letter`, and not delivered again until it is replayed.
- The fencing term only grows, by compare-and-set.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tidegate.types import JobId
from tidegate.v1.events_pb2 import Event
from tidegate.v1.samples_pb2 import SampleGroup


class Stage(StrEnum):
    """How far a group is: `generated` waits for the inference, `scored` for the actor."""

    GENERATED = "generated"
    SCORED = "scored"


class BusUnavailable(ConnectionError):
    """The bus did not answer within the deadline; the outcome of a publish is unknown, repeating it is safe."""


class JobNotOpen(LookupError):
    """The job has no streams on this bus: `JobStreams.open_job` was not called for it."""


class MessageTooLarge(ValueError):
    """The message is larger than the server takes; the text gives size, limit and remedy. Nothing was sent."""


class StreamFull(RuntimeError):
    """The stream refused the message at its size limit, rather than forget an older one; or has no room for one.

    Asking again does not help: the text says which key of the config would.
    """


class UnknownDeadLetter(LookupError):
    """No such dead letter: it was replayed or dropped already."""


class StaleTerm(RuntimeError):
    """Another writer advanced the term since it was read: read again, decide again."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message set aside. `id` grows with time within a job; `subject` says where it came from."""

    id: int
    job: JobId
    subject: str
    reason: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BusLimits:
    """What bounds the bus. Every process of a job uses the same ones.

    `event_ack_wait_s` is how long the event in flight of a killed scheduler waits for the next replica;
    `sample_ack_wait_s` the same for the groups of a killed lead. An event is never dead-lettered for being delivered
    often (an outage of the store must not cost one), a group after `max_deliveries`.
    """

    event_ack_wait_s: float = 5.0
    sample_ack_wait_s: float = 30.0
    max_deliveries: int = 10
    # How long a repeat of an event is known as such, by its id; far above any retry and any restart.
    duplicate_window_s: float = 3600.0
    # Reserved on the server's disk; a full stream refuses messages and forgets none.
    events_max_bytes: int = 256 * 2**20
    samples_max_bytes: int = 2 * 2**30
    dead_max_bytes: int = 256 * 2**20
    # JetStream changes leaders within 7 s (measured); a call gives up well after that.
    deadline_s: float = 15.0


OnDeadLetter = Callable[[DeadLetter], Awaitable[None]]
"""Told after a dead letter is stored and before the message is settled; repeated when a crash comes between."""


class JobStreams(Protocol):
    async def open_job(self, job: JobId) -> None:
        """Makes the job's streams, or keeps those that exist. StreamFull when the disk has no room for them."""
        ...


class EventDelivery(Protocol):
    """One event in hand. Settling it twice is harmless."""

    @property
    def sequence(self) -> int: ...

    @property
    def event(self) -> Event: ...

    async def ack(self) -> None: ...

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Not now: it is delivered again, after the delay."""
        ...

    async def dead_letter(self, reason: str) -> None: ...


class EventConsumer(Protocol):
    async def next(self, *, timeout_s: float) -> EventDelivery | None:
        """The next event in order, None when none came in time. Only one event of a consumer is in flight at a time."""
        ...


class EventLog(Protocol):
    async def publish(self, event: Event) -> int:
        """Stores it on the stream of `event.job`; the sequence it has there, a repeat's own included. StreamFull."""
        ...

    async def free_bytes(self, job: JobId) -> int:
        """What the stream still takes, about: a server adds some bytes to each event."""
        ...

    def read(
        self, job: JobId, *, after_sequence: int = 0, follow: bool = False
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """(sequence, event) in order, consuming nothing; without `follow` it ends at what was last at the start."""
        ...

    async def consumer(self, job: JobId, name: str, *, on_dead_letter: OnDeadLetter) -> EventConsumer:
        """The durable consumer `name`, shared by all who ask for it; made at the job's first event when new."""
        ...


class SampleDelivery(Protocol):
    """One group in hand. `num_deliveries` is 1 the first time. Settling it twice is harmless."""

    @property
    def group(self) -> SampleGroup: ...

    @property
    def num_deliveries(self) -> int: ...

    async def ack(self) -> None: ...

    async def in_progress(self) -> None:
        """Starts `ack_wait_s` anew."""
        ...

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Not now: it is delivered again, after the delay."""
        ...

    async def dead_letter(self, reason: str) -> None: ...


class SampleConsumer(Protocol):
    async def fetch(self, max_groups: int, *, timeout_s: float) -> Sequence[SampleDelivery]:
        """Waits for the first group, then takes what is there; empty when none came in time."""
        ...

    async def num_waiting(self) -> int:
        """Groups not settled yet: never delivered, or delivered and unacknowledged."""
        ...


class SampleStream(Protocol):
    async def publish(self, stage: Stage, group: SampleGroup) -> bool:
        """True when it was stored, False when the stream has this (stage, incarnation, iteration, prompt) already."""
        ...

    async def consumer(self, job: JobId, stage: Stage, name: str, *, on_dead_letter: OnDeadLetter) -> SampleConsumer:
        """The durable consumer `name` of a stage, shared by all who ask for it."""
        ...

    async def published(self, job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> frozenset[int]:
        """Exactly the prompts that the stream holds for this iteration, acknowledged or not."""
        ...

    async def held(
        self, job: JobId, stage: Stage, *, incarnation: int, iteration: int, prompt: int
    ) -> SampleGroup | None:
        """The group that the stream holds, acknowledged or not; None where there is none that can be read."""
        ...

    async def purge(self, job: JobId, *, incarnation: int, iteration: int) -> None:
        """Removes, in both stages, what comes before (incarnation, iteration): what a checkpoint covers."""
        ...


class DeadLetters(Protocol):
    async def list(self, job: JobId) -> list[DeadLetter]: ...

    async def replay(self, job: JobId, dead_letter: int) -> None:
        """Puts the message back at the end of its stream and forgets the dead letter; UnknownDeadLetter if gone."""
        ...

    async def drop(self, job: JobId, dead_letter: int) -> None:
        """Forgets it for good; UnknownDeadLetter if gone."""
        ...


class TermRegister(Protocol):
    async def read(self) -> tuple[int, int]:
        """(term, revision); (0, 0) before the first."""
        ...

    async def advance(self, *, expected_revision: int, term: int) -> int:
        """The new revision; StaleTerm when `expected_revision` is not the last, ValueError when no growth."""
        ...
