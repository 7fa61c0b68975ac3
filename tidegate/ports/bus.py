"""The bus as the services see it: for each job a log of events, a stream of samples and dead letters; a fencing term.

Every implementation keeps these promises (tests/contract/test_bus_*.py check each implementation):
- Events of a job are totally ordered by their stream sequence. [test_bus_events: reading_the_log_gives_events_in_order]
- A repeated event id is stored once. [test_bus_events: repeated_event_is_stored_once]
- A group is stored once for (stage, incarnation, iteration, prompt), however often it is published.
  [test_bus_samples: group_is_stored_once]
- Delivery is at least once. A message that is neither acknowledged nor reported in progress within `ack_wait_s` comes
  again. [test_bus_samples: unsettled_group_is_delivered_again]
- Consumers are durable by name: they continue where they were after a crash, a reconnect or a restart of the server.
  [test_bus_server: go_on_after_the_server_was_killed]
- An acknowledgement removes no message. Samples stay until `purge`, dead letters until they are replayed or dropped.
  [test_bus_samples: prompts_of_an_iteration_are_exactly]
- An event stays until a copy of the state holds it, and among the newest for longer.
  [test_bus_copies: only_events_that_the_copy_holds_are_dropped]
- A figure (`tidegate.events.FIGURES`) stays until its source publishes the next of its kind and iteration. So figures
  do not fill the log, and sequences have gaps. [test_bus_events: figure_is_replaced_by_the_next]
- Consumers get no figures, so these wake nobody. [test_bus_events: consumer_gets_no_figures]
- A message that cannot be decoded, or was delivered too often, becomes a dead letter with its reason. The consumer's
  `on_dead_letter` gets it. It is delivered again only after a replay.
  [test_bus_dead_letters: undecodable_group_becomes_a_dead]
- Where it comes again after that, because its consumer died before it had settled it, it is settled without a report.
  [test_bus_dead_letters: comes_again_after_its_dead_letter]
- A response that ended is told at most once, to whoever listens then, and stored nowhere. To tell one waits for nobody.
  [test_bus_responses: response_that_is_told_reaches_those_who_listen]
- The fencing term only grows, by compare-and-set. [test_bus_term: term_grows_by_compare_and_set]
- What a stranger writes in the term's place is a term or none, and the next term replaces it.
  [test_bus_term: is_no_term_and_is_replaced]
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tidegate.types import JobId
from tidegate.v1.events_pb2 import Event
from tidegate.v1.samples_pb2 import SampleGroup


class Stage(StrEnum):
    """How far a group is: `generated` waits for the inference, `scored` waits for the actor."""

    GENERATED = "generated"
    SCORED = "scored"


class BusUnavailable(ConnectionError):
    """The bus did not answer within the deadline. The outcome of a publish is unknown; repeating it is safe."""


class JobNotOpen(LookupError):
    """The job has no streams on this bus: nothing has called `JobStreams.open_job` for it, or the bus lost its data."""


class MessageTooLarge(ValueError):
    """The message is larger than the server accepts. Nothing was sent. The text gives size, limit and remedy."""


class StreamFull(RuntimeError):
    """The stream is at its size limit and refuses the message rather than remove an older one. Or the disk has no room.

    A repeat does not help. The text names the config key that does.
    """


class StreamStuck(StreamFull):
    """The server could not write to its disk, and takes nothing for the stream before it is restarted."""


class UnknownDeadLetter(LookupError):
    """The job has no such dead letter: it was replayed or dropped, or never existed."""


class StaleTerm(RuntimeError):
    """Another writer advanced the term after it was read. Read again, then decide again."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message set aside. `id` grows with time within a job. `subject` says where the message came from."""

    id: int
    job: JobId
    subject: str
    reason: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BusLimits:
    """The limits of the bus. Every process of a job uses the same limits.

    - `event_ack_wait_s`: how long the event in flight of a killed scheduler waits for the next replica.
    - `sample_ack_wait_s`: the same for the groups of a killed lead.
    - `max_deliveries`: a group becomes a dead letter after so many deliveries. An event never does: an outage of the
      store must not lose one.
    """

    event_ack_wait_s: float = 5.0
    sample_ack_wait_s: float = 30.0
    max_deliveries: int = 10
    # How long the bus recognises a repeated event by its id. A call retries for `deadline_s`, and a consumer of events
    # drops older repeats. The server keeps every id in memory for as long: some 250 bytes an event.
    event_window_s: float = 120.0
    # The same for dead letters, which are few. One comes again when its consumer died over it and is started later.
    dead_letter_window_s: float = 3600.0
    # The bytes reserved on the server's disk. A full stream refuses messages and removes none.
    events_max_bytes: int = 256 * 2**20
    samples_max_bytes: int = 2 * 2**30
    dead_max_bytes: int = 256 * 2**20
    # JetStream changes leaders within 7 s (measured). A call gives up well after that.
    deadline_s: float = 15.0
    # The newest events stay, for those who read the log later. 2048 are those of some tens of iterations.
    kept_events: int = 2048
    # The copies of each stream. None: three where there are three servers, else one.
    num_replicas: int | None = None


OnDeadLetter = Callable[[DeadLetter], Awaitable[None]]
"""Called after a dead letter is stored and before the message is settled. A crash in between repeats the call."""


class JobStreams(Protocol):
    async def open_job(self, job: JobId, *, after_sequence: int = 0) -> None:
        """Makes the job's streams or keeps existing ones. StreamFull when the disk has no room for them.

        A log of events that is made begins after this sequence: who knows a place of a log that is lost finds each
        event of the new one beyond it.
        """
        ...

    async def begin_anew(self, job: JobId, *, after_sequence: int) -> None:
        """Removes all events of the job. The next one gets a place after this sequence, which is beyond them."""
        ...

    async def remove_job(self, job: JobId) -> None:
        """Removes the job's streams with all that is in them. Does nothing where there are none."""
        ...

    async def require_job(self, job: JobId) -> None:
        """JobNotOpen when the job has no streams: nobody has opened it, or the bus has lost its data."""
        ...


class EventDelivery(Protocol):
    """One event to handle. Settling it twice is harmless."""

    @property
    def sequence(self) -> int: ...

    @property
    def event(self) -> Event: ...

    async def ack(self) -> None: ...

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Refuses the event for now. The bus delivers it again after the delay."""
        ...

    async def dead_letter(self, reason: str) -> None: ...


class EventConsumer(Protocol):
    async def next(self, *, timeout_s: float) -> EventDelivery | None:
        """The next event in order that is no figure, None when none came in time. One event is in flight at a time."""
        ...

    async def acknowledged(self) -> int:
        """The sequence up to which all that was to be delivered is settled. 0 before the first."""
        ...


class EventLog(Protocol):
    async def publish(self, event: Event) -> int:
        """Stores the event on the stream of `event.job` and returns its sequence there. Raises StreamFull.

        A repeat stores nothing and returns the sequence of the first event.
        """
        ...

    async def page(self, job: JobId, *, after_sequence: int) -> list[tuple[int, Event]]:
        """The next events that are there, with their sequences, as many as one answer holds; none where there are no
        more. It consumes nothing, and leaves out messages that cannot be decoded."""
        ...

    async def last_sequence(self, job: JobId) -> int:
        """The place of the last event that was stored, also where it is dropped. 0 before the first."""
        ...

    async def free_bytes(self, job: JobId) -> int:
        """About how many bytes the stream still accepts: a server adds some bytes to each event."""
        ...

    def read(
        self, job: JobId, *, after_sequence: int = 0, follow: bool = False
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """(sequence, event) in order, consuming nothing. Without `follow` it ends at the last event at the start."""
        ...

    async def consumer(self, job: JobId, name: str, *, on_dead_letter: OnDeadLetter) -> EventConsumer:
        """The durable consumer `name`, shared by all callers. A new one starts at the job's first event.

        It delivers no figures: `page` has them.
        """
        ...


class SampleDelivery(Protocol):
    """One group to handle. `num_deliveries` is 1 the first time. Settling it twice is harmless."""

    @property
    def group(self) -> SampleGroup: ...

    @property
    def num_deliveries(self) -> int: ...

    async def ack(self) -> None: ...

    async def in_progress(self) -> None:
        """Restarts `ack_wait_s`."""
        ...

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Refuses the group for now. The bus delivers it again after the delay."""
        ...

    async def dead_letter(self, reason: str) -> None: ...


class SampleConsumer(Protocol):
    async def fetch(self, max_groups: int, *, timeout_s: float) -> Sequence[SampleDelivery]:
        """Waits for the first group, then takes those that are there. Empty when none came in time."""
        ...

    async def num_waiting(self) -> int:
        """How many groups are not settled: never delivered, or delivered and not acknowledged."""
        ...


class SampleStream(Protocol):
    async def publish(self, stage: Stage, group: SampleGroup) -> bool:
        """True when the group was stored, False when the stream has this (stage, incarnation, iteration, prompt)."""
        ...

    async def consumer(self, job: JobId, stage: Stage, name: str, *, on_dead_letter: OnDeadLetter) -> SampleConsumer:
        """The durable consumer `name` of a stage, shared by all callers of this name."""
        ...

    async def published(self, job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> frozenset[int]:
        """Exactly the prompts that the stream stores for this iteration, acknowledged or not."""
        ...

    async def stored_group(
        self, job: JobId, stage: Stage, *, incarnation: int, iteration: int, prompt: int
    ) -> SampleGroup | None:
        """The group that the stream stores, acknowledged or not. None when there is none that can be read."""
        ...

    async def tell_response(self, response: SampleGroup) -> None:
        """Tells those who listen of a response that ended ahead of its group.

        `response` is a group with this one sample, of which the id and the tokens are enough. Raises WireError for any
        other. A response that the bus cannot take now, or that is too large for it, is not told.
        """
        ...

    def responses(self, job: JobId) -> AbstractAsyncContextManager[AsyncIterator[SampleGroup]]:
        """The responses that are told within the context, in any order. The iteration ends with the context.

        Messages that cannot be decoded are left out.
        """
        ...

    async def purge(self, job: JobId, *, incarnation: int, iteration: int) -> None:
        """Removes the samples of both stages before (incarnation, iteration): a checkpoint covers them."""
        ...


class DeadLetters(Protocol):
    async def list(self, job: JobId) -> list[DeadLetter]: ...

    async def replay(self, job: JobId, dead_letter: int) -> None:
        """Puts the message back at the end of its stream and removes the dead letter. UnknownDeadLetter."""
        ...

    async def drop(self, job: JobId, dead_letter: int) -> None:
        """Removes the dead letter for good. UnknownDeadLetter."""
        ...


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A state of a job, as its scheduler writes it, that holds all events up to the sequence `through`."""

    through: int
    state: bytes


class StateCopies(Protocol):
    """For each job a copy of its state, in its log of events. With it, older events are not needed."""

    async def keep(self, job: JobId, copy: StateCopy) -> None:
        """Keeps this copy in place of the one before. MessageTooLarge, StreamFull, JobNotOpen."""
        ...

    async def newest(self, job: JobId) -> StateCopy | None:
        """None before the first. Also where what is there is no copy: some stranger published it."""
        ...

    async def drop_events(self, job: JobId, *, until: int) -> None:
        """Removes the events up to this sequence that the newest copy holds, once they are many. `kept_events` stay."""
        ...


class TermRegister(Protocol):
    async def read(self) -> tuple[int | None, int]:
        """(term, revision). (0, 0) before the first term. None: what is there is no term, some stranger wrote it."""
        ...

    async def advance(self, *, expected_revision: int, term: int) -> int:
        """Writes over what is there, and logs where that is no term. Returns the new revision.

        StaleTerm: `expected_revision` is not the last. ValueError: `term` does not grow.
        """
        ...
