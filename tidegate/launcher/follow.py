"""Follows a job from its submission to its end.

Only the scheduler says when the job ends (`Control.GetJob`, which answers at a change of the job). Events only feed the
view. So a scheduler that restarts, moves to another port or is slow delays the end and never hides it.

Invariants:
- The end of an earlier run is never taken for this run's end: a report counts once it takes the submission into
  account. [test_submitting: an_earlier_runs_end_is_not_taken_for_this_ones]
- Every event is written to the job's folder, as it comes or, where that failed, at the end.
  [test_submitting: the_file_of_events]
- No event is dropped from the stream before it is written. [test_submitting: that_the_file_has_is_dropped]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from tidegate.adapters.nats_bus import NatsBus
from tidegate.config.job_config import JobConfig
from tidegate.events import EventSource
from tidegate.job import JobFolder
from tidegate.launcher.checkpoint import FoundCheckpoint
from tidegate.launcher.control import NotRunning, control_of
from tidegate.launcher.event_file import EventFile, is_log_of
from tidegate.launcher.gpu_wait import GpuWait
from tidegate.launcher.journal import newest_incarnation
from tidegate.launcher.outcome import End
from tidegate.launcher.view import View
from tidegate.ports.bus import BusUnavailable
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.cancellation import end_task, raise_if_cancelled
from tidegate.types import JobId
from tidegate.v1 import control_pb2, events_pb2

BEAT_S = 0.5
"""The least time from one answer of the scheduler to the next question."""
CHANGE_WAIT_S = 4.0
"""The scheduler answers after this time without a change: shorter than a call's deadline. A job that waits for GPUs
tells its reason by such an answer."""
LEAST_ROOM_BYTES = 256 * 2**10
"""The least room on the stream of events. Below it the services would soon fail to publish, each at another point.

It is room for about a thousand events, or for one with the largest config.
"""
_LOOK_AT_ROOM_S = 2.0
_DROP_EVERY = 256
"""Events from one look at how many can be dropped to the next."""
_ENDS = {"finished": End.FINISHED, "failed": End.FAILED, "cancelled": End.CANCELLED}


class JobFollower:
    """One run of a job as its launcher sees it. `status` is the scheduler's last report."""

    def __init__(
        self,
        bus: NatsBus,
        config: JobConfig,
        folder: JobFolder,
        view: View,
        *,
        now_s: Callable[[], float] = time.monotonic,
        gives_up_after_s: float | None = None,
    ) -> None:
        """`gives_up_after_s`: without an answer of NATS for so long, the run is over. None: it is waited for."""
        self._gives_up_after_s = gives_up_after_s
        self._now_s = now_s
        self._gpu_wait = GpuWait()
        self._bus = bus
        self._config = config
        self._job = JobId(config.job)
        self._folder = folder
        self._view = view
        self._file = EventFile(folder.events)
        self._is_writing = True
        self._written_to = 0
        """The sequence on the stream. Known after the stream was read."""
        self._has_read = False
        """The file's last event is of this stream."""
        self._submitted = 0
        self._incarnation = 1
        self._last_note = ""
        self._log = structlog.get_logger("follow")
        self.status = control_pb2.GetJobResponse(job=config.job)

    async def submit(self, source: EventSource, *, resume: bool, checkpoint: FoundCheckpoint | None) -> None:
        """Publishes the checkpoint that was found in the folder, then the submission of the job.

        The incarnation is above each in the stream, in the folder's events and journal, and above the checkpoint's: ids
        of samples never come again. A scheduler that kept its state already knows the checkpoint.
        """
        self._incarnation = 1 + max(self._file.incarnation, newest_incarnation(self._folder.journal))
        async for sequence, event in self._bus.events.read(self._job):
            self._incarnation = max(self._incarnation, event.incarnation + 1)
            self._note_place(sequence, event)
        if checkpoint is not None:
            self._incarnation = max(self._incarnation, checkpoint.incarnation + 1)
            saved = events_pb2.CheckpointSaved(
                next_iteration=checkpoint.next_iteration,
                version=checkpoint.version,
                name=checkpoint.name,
                num_samples_trained=checkpoint.num_samples_trained,
            )
            await self._bus.events.publish(source.event(saved, job=self._job, incarnation=self._incarnation))
        submitted = events_pb2.JobSubmitted(config_json=self._config.to_json(), resume=resume)
        event = source.event(submitted, job=self._job, incarnation=self._incarnation)
        self._submitted = await self._bus.events.publish(event)

    async def end(self) -> End:
        """Waits until the scheduler says that the job is over."""
        showing = asyncio.create_task(self._take_events(), name="take-events")
        try:
            while True:
                raise_if_cancelled()
                try:
                    return await self._follow_control()
                except (NotRunning, PeerUnavailable):  # it starts or restarts: ask again at the next beat
                    await asyncio.sleep(BEAT_S)
                except PeerRefused as refusal:  # a fault of the scheduler: report it and ask again
                    self._note(f"the scheduler cannot say how the job is: {refusal}")
                    await asyncio.sleep(BEAT_S)
        finally:
            await end_task(showing)

    async def look_once_more(self) -> None:
        """Fetches the iterations reported since the last beat, when a run is stopped before its end."""
        if self.status.phase in _ENDS:
            return
        with suppress(NotRunning, PeerUnavailable, PeerRefused):  # the scheduler is gone: its last report must do
            async with control_of(self._folder) as control:
                self._accept(await control.GetJob(control_pb2.GetJobRequest(job=self._job)))

    async def until_unusable(self) -> str:
        """Waits until the stream of events has too little room, has lost events, or gives no answer for too long.
        Returns a message with the cause.

        A stream that came back with less gives new events places that the scheduler knows as applied."""
        answered_s = self._now_s()
        while True:
            try:  # another task notices the death of the server
                kept = self._file.kept if self._has_read else None
                if kept is not None and not await is_log_of(kept, self._bus.events, self._job):
                    return (
                        f"NATS came back with older data: its stream of events lacks event {kept[0]}, which the job's "
                        "folder has, so everything was stopped"
                    )
                if (free := await self._bus.events.free_bytes(self._job)) < LEAST_ROOM_BYTES:
                    return (
                        f"the stream of events has {free} bytes left of {self._config.runtime.events_max_bytes}, too "
                        "few to go on: raise runtime.events_max_bytes, which may change between runs"
                    )
                answered_s = self._now_s()
            except BusUnavailable:
                silent_s = self._now_s() - answered_s
                if self._gives_up_after_s is not None and silent_s > self._gives_up_after_s:
                    return (
                        f"NATS lives and has told nothing of the stream of events for {silent_s:.0f} s, so everything "
                        f"was stopped: its disk may be full; make room in {self._folder.servers}"
                    )
            raise_if_cancelled()
            await asyncio.sleep(_LOOK_AT_ROOM_S)

    async def write_last_events(self) -> None:
        """Writes the events that the file lacks. None of a stream that came back with less: a resume begins it anew."""
        kept = self._file.kept
        if kept is not None and not await is_log_of(kept, self._bus.events, self._job):
            self._log.warning("last events not written", error=f"the stream lacks event {kept[0]} of the file")
            return
        rows = [row async for row in self._bus.events.read(self._job)]
        for sequence, event in rows:
            self._note_place(sequence, event)
        try:
            for sequence, event in rows:
                if sequence > self._written_to:
                    self._file.append(sequence, event)
        except OSError as error:  # the events stay in the server's data, and a resumed run writes them
            self._log.warning("last events not written", error=str(error))

    async def _follow_control(self) -> End:
        async with control_of(self._folder) as control:
            while True:
                raise_if_cancelled()
                known = self.status.state_version
                request = control_pb2.GetJobRequest(job=self._job, known_state_version=known, wait_s=CHANGE_WAIT_S)
                status = await control.GetJob(request)
                if self._accept(status) and status.phase in _ENDS:
                    return _ENDS[status.phase]
                await asyncio.sleep(BEAT_S)

    def _accept(self, status: control_pb2.GetJobResponse) -> bool:
        is_of_this_run = status.applied_sequence >= self._submitted
        if is_of_this_run:
            self.status = status
            self._view.job(status)
            if (message := self._gpu_wait.message(status, now_s=self._now_s())) is not None:
                self._log.warning("no GPUs", message=message)
                self._note(message)
        return is_of_this_run

    def _note(self, message: str) -> None:
        if message != self._last_note:
            self._last_note = message
            self._view.note(message)

    def _note_place(self, sequence: int, event: events_pb2.Event) -> None:
        """Notes how far the file is, if it is of this stream, while the stream is read from its beginning."""
        if (sequence, event.id) == self._file.kept:
            self._written_to = self._file.sequence

    async def _take_events(self) -> None:
        at, num_taken = self._written_to, 0
        while True:
            with suppress(BusUnavailable):  # wait for the server: another task notices its death
                async for sequence, event in self._bus.events.read(self._job, after_sequence=at, follow=True):
                    at = sequence
                    self._write(sequence, event)
                    if sequence >= self._submitted:
                        self._view.event(event)
                    num_taken += 1
                    if num_taken % _DROP_EVERY == 0 and self._file.kept is not None:
                        # The last one that the file has stays: it tells this stream from another one.
                        await self._bus.copies.drop_events(self._job, until=self._file.kept[0] - 1)
            await asyncio.sleep(BEAT_S)

    def _write(self, sequence: int, event: events_pb2.Event) -> None:
        """Writes until a write fails. Then `write_last_events` writes the rest at the end, so that the order stays."""
        if not self._is_writing:
            return
        try:
            self._file.append(sequence, event)
            self._has_read = True
        except OSError as error:
            self._is_writing = False
            self._log.warning("events not written until the end", error=str(error))
