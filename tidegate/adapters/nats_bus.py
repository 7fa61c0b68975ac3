"""The bus on NATS JetStream (server 2.11 or newer).

A response that ended is told in core NATS, without a stream. The rest of a job is in streams.

A job has three file-backed streams (see `subjects`): events, samples, dead letters. All streams keep messages until a
call removes them (limits retention), and refuse new ones when full. Events are deduplicated by id within a window. A
figure rolls its subject up: the server stores it and drops those before it, in one step.
Samples are deduplicated for good by subject: a subject takes a message only while it has none.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg

from tidegate.adapters import subjects
from tidegate.adapters.nats_consumer import (
    Delivery,
    DurableConsumer,
    NatsDeadLetters,
    Source,
    full_or_refused,
)
from tidegate.adapters.nats_copies import ROLL_UP, NatsStateCopies
from tidegate.adapters.nats_link import (
    STREAM_NOT_FOUND,
    WRONG_LAST_SEQUENCE,
    NatsLink,
    NatsRefused,
    num_replicas,
    stored_sequence,
)
from tidegate.adapters.nats_term import NatsTermRegister
from tidegate.adapters.response_feed import ResponseFeed
from tidegate.codec import WireError, check_event, check_group, check_response, decode_event
from tidegate.ports.bus import BusLimits, OnDeadLetter, Stage, StreamFull
from tidegate.types import JobId
from tidegate.v1.events_pb2 import Event
from tidegate.v1.samples_pb2 import SampleGroup

_NS = 10**9
# A follower reads again after this time, in case that it missed a hint.
_FOLLOW_S = 2.0
# A hint may come before its event can be read, where the stream has copies. A follower reads again after this time, and
# then each time after twice as long.
_AFTER_HINT_S = 0.05
# Groups that are read together: some have megabytes.
_LOOKS_AT_ONCE = 16


class NatsBus:
    """All ports of `tidegate.ports.bus` on one connection.

    They are `streams`, `events`, `copies`, `samples`, `dead_letters` and `term`."""

    def __init__(self, link: NatsLink, limits: BusLimits) -> None:
        self._link = link
        self.streams = NatsJobStreams(link, limits)
        self.dead_letters = NatsDeadLetters(link, max_bytes=limits.dead_max_bytes)
        self.events = NatsEventLog(link, limits, self.dead_letters)
        self.copies = NatsStateCopies(link, limits)
        self.samples = NatsSampleStream(link, limits, self.dead_letters)
        self.term = NatsTermRegister(link, limits, writer=uuid.uuid4().hex)

    @classmethod
    async def connect(
        cls, url: str, *, name: str, limits: BusLimits | None = None, credential: Path | None = None
    ) -> NatsBus:
        """The server lists this client under `name`. `credential`: the folder of who connects. BusUnavailable when the
        server does not answer in time. CertsError."""
        limits = limits or BusLimits()
        link = await NatsLink.connect(url, name=name, deadline_s=limits.deadline_s, credential=credential)
        return cls(link, limits)

    async def close(self) -> None:
        await self._link.close()


class NatsJobStreams:
    def __init__(self, link: NatsLink, limits: BusLimits) -> None:
        self._link = link
        self._limits = limits

    async def open_job(self, job: JobId, *, after_sequence: int = 0) -> None:
        limits, replicas = self._limits, num_replicas(self._link, self._limits)
        streams = (
            (subjects.events_stream(job), _event_subjects(job), "events_max_bytes", limits.event_window_s),
            (subjects.samples_stream(job), [subjects.job_samples(job)], "samples_max_bytes", limits.event_window_s),
            (subjects.dead_stream(job), [subjects.dead_subject(job)], "dead_max_bytes", limits.dead_letter_window_s),
        )
        for stream, names, key, window_s in streams:
            max_bytes = getattr(limits, key)
            config = _stream_config(stream, names, max_bytes, window_s) | {"num_replicas": replicas}
            if after_sequence and stream == subjects.events_stream(job):
                config["first_seq"] = after_sequence + 1
            try:
                await self._link.ensure_stream(config)
            except NatsRefused as refused:
                raise StreamFull(
                    f"NATS does not keep {max_bytes} bytes for stream {stream}: {refused}; "
                    f"free disk space in the server's store_dir, or lower runtime.{key}"
                ) from refused

    async def begin_anew(self, job: JobId, *, after_sequence: int) -> None:
        await self._link.api(f"STREAM.PURGE.{subjects.events_stream(job)}", {"seq": after_sequence + 1})

    async def remove_job(self, job: JobId) -> None:
        for stream in (subjects.events_stream(job), subjects.samples_stream(job), subjects.dead_stream(job)):
            try:
                await self._link.api(f"STREAM.DELETE.{stream}", {})
            except NatsRefused as refused:
                if refused.err_code != STREAM_NOT_FOUND:
                    raise

    async def require_job(self, job: JobId) -> None:
        await self._link.require_stream(subjects.events_stream(job))


def _stream_config(stream: str, names: list[str], max_bytes: int, window_s: float) -> dict[str, Any]:
    return {
        "name": stream,
        "subjects": names,
        "retention": "limits",
        "discard": "new",
        "storage": "file",
        "max_bytes": max_bytes,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_consumers": -1,
        "duplicate_window": int(window_s * _NS),
        "allow_direct": True,
        "allow_rollup_hdrs": True,
    }


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
        for raw, event in await self._consumer.fetch(1, timeout_s=timeout_s):
            return _EventDelivery(self._consumer, raw, event)
        return None

    async def acknowledged(self) -> int:
        return int((await self._consumer.info())["ack_floor"]["stream_seq"])


class NatsEventLog:
    def __init__(self, link: NatsLink, limits: BusLimits, dead_letters: NatsDeadLetters) -> None:
        self._link = link
        self._limits = limits
        self._dead_letters = dead_letters

    async def publish(self, event: Event) -> int:
        check_event(event)
        job = JobId(event.job)
        payload = event.SerializeToString()
        self._link.check_size(payload, what=f"event {event.id}", remedy="publish less in one event")
        stream, subject = subjects.events_stream(job), subjects.subject_of_event(event)
        headers = ROLL_UP if subject != subjects.event_subject(job) else None
        try:
            ack = await self._link.publish(subject, payload, stream=stream, message_id=event.id, headers=headers)
        except NatsRefused as refused:
            raise full_or_refused(
                refused, stream, max_bytes=self._limits.events_max_bytes, size_bytes=len(payload)
            ) from refused
        return int(ack["seq"])

    async def page(self, job: JobId, *, after_sequence: int) -> list[tuple[int, Event]]:
        while raws := await self._link.read(subjects.events_stream(job), from_sequence=after_sequence + 1):
            after_sequence = stored_sequence(raws[-1])
            found = [(stored_sequence(raw), event) for raw in raws if (event := _read_event(job, raw)) is not None]
            if found:
                return found
        return []

    async def last_sequence(self, job: JobId) -> int:
        return int((await self._link.require_stream(subjects.events_stream(job)))["state"]["last_seq"])

    async def free_bytes(self, job: JobId) -> int:
        stream = await self._link.require_stream(subjects.events_stream(job))
        return int(stream["config"]["max_bytes"]) - int(stream["state"]["bytes"])

    async def read(
        self, job: JobId, *, after_sequence: int = 0, follow: bool = False
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Leaves out messages that cannot be decoded: they are among the dead letters."""
        stream = subjects.events_stream(job)
        last = int((await self._link.require_stream(stream))["state"]["last_seq"])
        arrived = asyncio.Event()

        async def hint(_: Msg) -> None:
            arrived.set()

        heard = (subjects.event_subject(job), subjects.figures(job)) if follow else ()
        subscriptions = [await self._link.subscribe(subject, hint) for subject in heard]
        wait_s = _FOLLOW_S
        try:
            while follow or after_sequence < last:
                if arrived.is_set():
                    wait_s = _AFTER_HINT_S
                arrived.clear()
                page = await self._link.read(stream, from_sequence=after_sequence + 1)
                for message in page:
                    after_sequence = stored_sequence(message)
                    if not follow and after_sequence > last:
                        return
                    if (event := _read_event(job, message)) is not None:
                        yield after_sequence, event
                if not page and not follow:
                    return
                if not page:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(arrived.wait(), wait_s)
                    wait_s = min(2 * wait_s, _FOLLOW_S)
        finally:
            for end in subscriptions:
                await end()

    async def consumer(self, job: JobId, name: str, *, on_dead_letter: OnDeadLetter) -> _EventConsumer:
        source = Source(
            job=job,
            stream=subjects.events_stream(job),
            consumer=subjects.consumer_name(name),
            filter_subject=subjects.event_subject(job),
            decode=_decode_event_message,
            ack_wait_s=self._limits.event_ack_wait_s,
            max_ack_pending=1,
            max_deliveries=None,
            on_dead_letter=on_dead_letter,
        )
        consumer = DurableConsumer(self._link, source, self._dead_letters)
        await consumer.ensure()
        return _EventConsumer(consumer)


class _SampleConsumer:
    def __init__(self, consumer: DurableConsumer[SampleGroup]) -> None:
        self._consumer = consumer

    async def fetch(self, max_groups: int, *, timeout_s: float) -> list[_SampleDelivery]:
        fetched = await self._consumer.fetch(max_groups, timeout_s=timeout_s)
        return [_SampleDelivery(self._consumer, raw, group) for raw, group in fetched]

    async def num_waiting(self) -> int:
        info = await self._consumer.info()
        return int(info["num_pending"]) + int(info["num_ack_pending"])


class NatsSampleStream:
    def __init__(self, link: NatsLink, limits: BusLimits, dead_letters: NatsDeadLetters) -> None:
        self._link = link
        self._limits = limits
        self._dead_letters = dead_letters

    async def publish(self, stage: Stage, group: SampleGroup) -> bool:
        check_group(group, scored=stage is Stage.SCORED)
        subject = subjects.sample_subject(stage, group)
        payload = group.SerializeToString()
        self._link.check_size(payload, what=f"group {subject}", remedy="lower group_size or the longest response")
        stream = subjects.samples_stream(JobId(group.job))
        last = 0
        while True:
            try:
                # Deduplicate by subject, not by id: ids are remembered only for a window.
                await self._link.publish(subject, payload, stream=stream, last_on_subject=last)
            except NatsRefused as refused:
                if refused.err_code != WRONG_LAST_SEQUENCE:
                    raise full_or_refused(
                        refused, stream, max_bytes=self._limits.samples_max_bytes, size_bytes=len(payload)
                    ) from refused
                stored, last = await self._look(stage, stream, subject)
                if stored is not None:
                    return False
            else:
                return True

    async def _look(self, stage: Stage, stream: str, subject: str) -> tuple[SampleGroup | None, int]:
        """The group on a subject, if it is there, and the sequence of the last message looked at. Anybody may have
        published something else on the subject, before the group or after it."""
        last = 0
        while (found := await self._link.next_on(stream, subject, from_sequence=last + 1)) is not None:
            last, payload = found
            with suppress(WireError):
                return subjects.decode_sample(stage, subject, payload), last
        return None, last

    async def consumer(self, job: JobId, stage: Stage, name: str, *, on_dead_letter: OnDeadLetter) -> _SampleConsumer:
        def decode(raw: Msg) -> SampleGroup:
            return subjects.decode_sample(stage, raw.subject, raw.data)

        source = Source(
            job=job,
            stream=subjects.samples_stream(job),
            consumer=subjects.consumer_name(name),
            filter_subject=subjects.stage_samples(job, stage),
            decode=decode,
            ack_wait_s=self._limits.sample_ack_wait_s,
            # The caller of fetch bounds what is in flight: the actor keeps a whole iteration until its commits.
            max_ack_pending=-1,
            max_deliveries=self._limits.max_deliveries,
            on_dead_letter=on_dead_letter,
        )
        consumer = DurableConsumer(self._link, source, self._dead_letters)
        await consumer.ensure()
        return _SampleConsumer(consumer)

    async def published(self, job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> frozenset[int]:
        pattern = subjects.iteration_samples(job, stage, incarnation=incarnation, iteration=iteration)
        prompts = sorted(prompt for _, _, _, prompt in subjects.groups_of(await self._subjects(job, pattern)))
        found: set[int] = set()
        for at in range(0, len(prompts), _LOOKS_AT_ONCE):
            some = prompts[at : at + _LOOKS_AT_ONCE]
            groups = await asyncio.gather(
                *(
                    self.stored_group(job, stage, incarnation=incarnation, iteration=iteration, prompt=prompt)
                    for prompt in some
                )
            )
            found.update(prompt for prompt, group in zip(some, groups, strict=True) if group is not None)
        return frozenset(found)

    async def stored_group(
        self, job: JobId, stage: Stage, *, incarnation: int, iteration: int, prompt: int
    ) -> SampleGroup | None:
        subject = subjects.group_subject(job, stage, incarnation=incarnation, iteration=iteration, prompt=prompt)
        return (await self._look(stage, subjects.samples_stream(job), subject))[0]

    async def tell_response(self, response: SampleGroup) -> None:
        check_response(response)
        await self._link.tell(subjects.responses_subject(JobId(response.job)), response.SerializeToString())

    @asynccontextmanager
    async def responses(self, job: JobId) -> AsyncIterator[AsyncIterator[SampleGroup]]:
        feed = ResponseFeed(job)

        async def offer(raw: Msg) -> None:
            feed.offer(raw.data)

        end = await self._link.subscribe(subjects.responses_subject(job), offer)
        try:
            yield feed
        finally:
            feed.end()
            await end()

    async def purge(self, job: JobId, *, incarnation: int, iteration: int) -> None:
        stored = {group[:3] for group in subjects.groups_of(await self._subjects(job, subjects.job_samples(job)))}
        for stage, its_incarnation, its_iteration in sorted(stored):
            if (its_incarnation, its_iteration) < (incarnation, iteration):
                pattern = subjects.iteration_samples(job, stage, incarnation=its_incarnation, iteration=its_iteration)
                await self._link.api(f"STREAM.PURGE.{subjects.samples_stream(job)}", {"filter": pattern})

    async def _subjects(self, job: JobId, pattern: str) -> set[str]:
        """Every subject that matches and has a message. The server answers by pages."""
        stream = subjects.samples_stream(job)
        await self._link.require_stream(stream)
        found: set[str] = set()
        while True:
            info = await self._link.api(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(found)})
            page = info["state"].get("subjects") or {}
            found |= page.keys()
            if not page or len(found) >= int(info.get("total", 0)):
                return found


def _event_subjects(job: JobId) -> list[str]:
    return [subjects.event_subject(job), subjects.figures(job), subjects.copy_subject(job)]


def _read_event(job: JobId, raw: Msg) -> Event | None:
    """The event of a message of the log. None for a copy of the state, and for what cannot be decoded."""
    if (raw.headers or {}).get("Nats-Subject") != subjects.copy_subject(job):
        with suppress(WireError):
            return decode_event(raw.data)
    return None


def _decode_event_message(raw: Msg) -> Event:
    event = decode_event(raw.data)
    if raw.subject not in (subjects.event_subject(JobId(event.job)), subjects.subject_of_event(event)):
        raise WireError(f"Event.job {event.job!r} does not belong on subject {raw.subject}")
    return event
