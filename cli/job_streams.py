"""A job's events and logs, past ones or as they come. A live job's Control API gives them, or else the job's folder.

Invariants:
- A follower sees every row once, across restarts of the scheduler. [test_job_streams: events_go_on_after_the_last_one]
- The job's end ends the stream and is no error. Rows that came after the scheduler left are read from the folder once
  the launcher has left too. [test_job_streams: events_that_are_followed_end_with_the_job]
- A line without a time stays behind the line before it. [test_job_streams: a_line_without_a_time]
- A follower that begins at the last rows misses none and repeats none after them.
  [test_job_streams: follower_of_the_tail_sees_the_last_row]
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import suppress
from operator import itemgetter

from cli.job_access import control_of
from cli.jobs import UnknownJob
from cli.selection import Selection
from tidegate.attempts import AttemptFolder, attempts_in
from tidegate.job import JobFolder
from tidegate.json_text import parse_json
from tidegate.launcher.control import FOLLOW_TIMEOUT_S, NotRunning
from tidegate.launcher.event_file import read_events
from tidegate.launcher.lock import launcher_pid
from tidegate.launcher.outcome import Outcome
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.v1 import control_pb2

_BEAT_S = 0.3


async def chosen_events(
    folder: JobFolder, chosen: Selection, *, follow: bool
) -> AsyncIterator[control_pb2.ListEventsResponse]:
    """As `events`, but only the chosen ones. Who follows a tail sees the tail of those that the folder has by now."""
    last = 0
    if chosen.tail is not None:
        past = _events_so_far(folder) if follow else [row async for row in events(folder, follow=False)]
        for row in chosen.last(filter(chosen.has_event, past)):
            yield row
        if not follow:
            return
        last = past[-1].stream_sequence if past else 0
    async for row in events(folder, follow=follow, after_sequence=last):
        if chosen.has_event(row):
            yield row


async def chosen_logs(
    folder: JobFolder, chosen: Selection, *, source: str, follow: bool, attempt: int | None = None
) -> AsyncIterator[str]:
    """As `logs`, or `logs_of_attempt` where one is named, but only the chosen lines. A tail is in order of time."""
    shown: Counter[str] = Counter()
    if attempt is not None:
        for line in chosen.last(filter(chosen.has_line, logs_of_attempt(folder, attempt, source=source))):
            yield line
        return
    if chosen.tail is not None:
        lines = _logs_so_far(folder, source) if follow else [line async for line in logs(folder, source=source)]
        for line in chosen.last(filter(chosen.has_line, _by_time(_with_times(lines)))):
            yield line
        if not follow:
            return
        shown.update(lines)
    async for line in logs(folder, source=source, follow=follow, shown=shown):
        if chosen.has_line(line):
            yield line


async def events(
    folder: JobFolder, *, follow: bool, after_sequence: int = 0
) -> AsyncGenerator[control_pb2.ListEventsResponse, None]:
    """The events in the stream's order. A killed run has those that it wrote. NotRunning when there are none.

    The stream has the newest events of a live job, its folder the older ones."""
    last, has_failed = after_sequence, False
    for row in _events_so_far(folder):
        if row.stream_sequence > last:
            last = row.stream_sequence
            yield row
    while not _is_written(folder):
        try:
            async with control_of(folder) as control:
                request = control_pb2.ListEventsRequest(job=folder.root.name, after_sequence=last, follow=follow)
                async for row in control.ListEvents(request, timeout=FOLLOW_TIMEOUT_S):
                    last = row.stream_sequence
                    yield row
        except (NotRunning, PeerUnavailable):
            if not (follow and goes_on_or_is_over(folder)):
                raise
        except PeerRefused:
            # A stopping scheduler may lose its bus before the stream. Accept that once; a second time it is a fault.
            if not follow or has_failed:
                raise
            has_failed = True
        if not follow:
            return
        await asyncio.sleep(_BEAT_S)
    for row in _written_events(folder):
        if row.stream_sequence > last:
            yield row


async def logs(
    folder: JobFolder, *, source: str, follow: bool = False, shown: Counter[str] | None = None
) -> AsyncIterator[str]:
    """JSON lines of one source, or of all, of the newest attempt. UnknownJob when the source has no log.

    `shown` are lines that are left out, each as often as it is counted.
    """
    shown = Counter(shown)
    while not folder.result.exists():
        again = Counter(shown)
        try:
            async with control_of(folder) as control:
                request = control_pb2.ReadLogsRequest(job=folder.root.name, source=source, follow=follow)
                async for row in control.ReadLogs(request, timeout=FOLLOW_TIMEOUT_S):
                    if _is_new(row.line, again):
                        shown[row.line] += 1
                        yield row.line
        except (NotRunning, PeerUnavailable):
            if not (follow and goes_on_or_is_over(folder)):
                break
        else:
            if not follow:
                return
        await asyncio.sleep(_BEAT_S)
    for line in _written_logs(folder.attempt(), source):
        if _is_new(line, shown):
            yield line


def logs_of_attempt(folder: JobFolder, number: int, *, source: str) -> Iterator[str]:
    """The lines so far. UnknownJob when there is no such attempt, or the source has no log in it."""
    attempts = {attempt.number: attempt for attempt in attempts_in(folder.root)}
    if number not in attempts:
        known = ", ".join(map(str, attempts)) or "none"
        raise UnknownJob(f"job {folder.root.name} has no attempt {number}; there are {known}")
    return _written_logs(attempts[number], source)


def end_line(folder: JobFolder) -> str:
    """A line that says how the job ended, for the end of its stream."""
    job = folder.root.name
    if not folder.result.exists():
        return f"job {job} is not running: its run was killed; start it again with --resume"
    outcome = Outcome.read(folder.result)
    return f"job {job} {outcome.end}" + (f": {outcome.reason}" if outcome.reason else "")


def _is_new(line: str, shown: Counter[str]) -> bool:
    """Whether a line of a log that is read from its beginning is new. Equal lines are counted."""
    if shown[line]:
        shown[line] -= 1
        return False
    return True


def goes_on_or_is_over(folder: JobFolder) -> bool:
    """False when the run was killed. It checks the lock first: its holder writes the result before it leaves."""
    return launcher_pid(folder) is not None or folder.result.exists()


def _is_written(folder: JobFolder) -> bool:
    """Whether the folder has all its events: the result is written after them."""
    return folder.result.exists() or (folder.events.exists() and launcher_pid(folder) is None)


def _events_so_far(folder: JobFolder) -> list[control_pb2.ListEventsResponse]:
    """Those that the launcher has written. A job that starts has none yet."""
    return list(read_events(folder.events)) if folder.events.exists() else []


def _logs_so_far(folder: JobFolder, source: str) -> list[str]:
    """The lines that are in the files by now. A process that starts has no file yet."""
    with suppress(UnknownJob):
        return list(_written_logs(folder.attempt(), source))
    return []


def _written_events(folder: JobFolder) -> Iterator[control_pb2.ListEventsResponse]:
    try:
        yield from read_events(folder.events)
    except FileNotFoundError as error:
        raise NotRunning(
            f"job {folder.root.name} has no events: its run ended before the first one; a resumed run (--resume) "
            "will write new ones"
        ) from error


def _written_logs(attempt: AttemptFolder, source: str) -> Iterator[str]:
    files = sorted(attempt.logs.glob("*.jsonl"))
    chosen = [path for path in files if source in ("", path.stem)]
    if not chosen:
        known = ", ".join(path.stem for path in files) or "none"
        raise UnknownJob(f"attempt {attempt.number} has no log of {source!r}; there are {known}")
    texts = [path.read_text(errors="replace") for path in chosen]
    yield from _by_time(line for text in texts for line in _with_times(text.splitlines()))


def _with_times(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The lines of one source in its order, each behind its time. A line without one has that of the line before it."""
    time = ""
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            time = str(parse_json(line)["time"])
        yield time, line


def _by_time(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of the same time stay in their order."""
    return [line for _, line in sorted(lines, key=itemgetter(0))]
