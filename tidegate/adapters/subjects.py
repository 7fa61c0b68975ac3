"""The names on the bus: streams and subjects of a job. Each part is checked, so that no name reaches past its place.

    events    TG_EVENTS_<JOB>    tg.events.<job>
              the same           tg.figures.<job>.<source>.<kind>.<iteration>
              the same           tg.state.<job>
    samples   TG_SAMPLES_<JOB>   tg.samples.<job>.<stage>.<incarnation>.<iteration>.<prompt>
    dead      TG_DEAD_<JOB>      tg.dead.<job>
    responses no stream          tg.responses.<job>
    term      KV_TG_TERM         $KV.TG_TERM.store

A job's id is lower case, so its upper case in a stream's name keeps two jobs apart.

A figure is an event that the next one of its kind replaces. Its subject keeps only the last one: whoever publishes it
has the stream drop the others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

from tidegate.codec import WireError, decode_group
from tidegate.events import is_figure
from tidegate.ports.bus import Stage, StateCopy, StreamFull
from tidegate.types import JobId, job_id
from tidegate.v1.events_pb2 import Event
from tidegate.v1.samples_pb2 import SampleGroup

_TOKEN = re.compile(r"[A-Za-z0-9_@-]+")
"""A text that is one part of a subject: no dot, no wildcard."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_CONSUMER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHECKSUM_BYTES, _THROUGH_BYTES = 16, 8
TERM_STREAM, TERM_SUBJECT = "KV_TG_TERM", "$KV.TG_TERM.store"
"""The key-value bucket of the fencing term and its one key, for all jobs of the servers."""
_TERM = re.compile(rb"0|[1-9][0-9]{0,8}")
"""Nine digits: no store is adopted a billion times. So a stranger's number leaves room for the terms above it, up to
`LARGEST_TERM`."""
_WHEN_FULL = {
    "TG_EVENTS_": "raise runtime.events_max_bytes and resume; events that the state and the folder hold are dropped",
    "TG_SAMPLES_": "raise runtime.samples_max_bytes and resume, or save more often (checkpoint.every): samples that a "
    "checkpoint covers are purged",
    "TG_DEAD_": "drop or replay dead letters, or raise runtime.dead_max_bytes and resume",
}


def events_stream(job: JobId) -> str:
    return f"TG_EVENTS_{job_id(job).upper()}"


def samples_stream(job: JobId) -> str:
    return f"TG_SAMPLES_{job_id(job).upper()}"


def dead_stream(job: JobId) -> str:
    return f"TG_DEAD_{job_id(job).upper()}"


def stream_full(stream: str, *, max_bytes: int, size_bytes: int) -> StreamFull:
    """The exception when `size_bytes` more do not fit, with the remedy for this kind of stream."""
    remedy = next(text for kind, text in _WHEN_FULL.items() if stream.startswith(kind))
    return StreamFull(f"stream {stream} is full: {size_bytes} bytes more do not fit its {max_bytes}; {remedy}")


def event_subject(job: JobId) -> str:
    return f"tg.events.{job_id(job)}"


def figures(job: JobId) -> str:
    """Matches every figure of the job."""
    return f"tg.figures.{job_id(job)}.>"


def subject_of_event(event: Event) -> str:
    """The subject that an event belongs on. An iteration's last figure of a kind stays: `calibrate` reads it."""
    job, body = JobId(event.job), event.WhichOneof("body")
    kind: str = body or ""
    match body:
        case "progress":
            kind = f"progress-{event.progress.phase}"
        case "backlog":
            kind = f"backlog-{event.backlog.queue}"
    # A name that is no part of a subject has none of its own: its figures stay like other events.
    if not is_figure(event) or not (_TOKEN.fullmatch(event.source) and _TOKEN.fullmatch(kind)):
        return event_subject(job)
    return f"tg.figures.{job_id(job)}.{event.source}.{kind}.{_count(event.iteration)}"


def copy_subject(job: JobId) -> str:
    """The subject of the copy of the scheduler's state. It is no event."""
    return f"tg.state.{job_id(job)}"


def copy_payload(copy: StateCopy) -> bytes:
    content = copy.through.to_bytes(_THROUGH_BYTES, "big") + copy.state
    return _checksum(content) + content


def copy_of(payload: bytes) -> StateCopy | None:
    """Inverse of `copy_payload`. None for anything else, which some stranger published."""
    checksum, content = payload[:_CHECKSUM_BYTES], payload[_CHECKSUM_BYTES:]
    if len(content) < _THROUGH_BYTES or checksum != _checksum(content):
        return None
    return StateCopy(int.from_bytes(content[:_THROUGH_BYTES], "big"), content[_THROUGH_BYTES:])


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


def term_payload(term: int) -> bytes:
    return b"%d" % term


def term_of(payload: bytes) -> int | None:
    """Inverse of `term_payload`. None for anything else, which some stranger published."""
    return int(payload) if _TERM.fullmatch(payload) else None


def last_dropped(first: int, last: int, *, kept: int) -> int | None:
    """The last sequence that may be dropped of a log with these first and last ones, of which the newest `kept` stay.
    None while it is not worth a call."""
    return last - kept if last - first >= kept + kept // 4 else None


def responses_subject(job: JobId) -> str:
    """The subject of responses that ended ahead of their groups. No stream keeps them."""
    return f"tg.responses.{job_id(job)}"


def dead_subject(job: JobId) -> str:
    return f"tg.dead.{job_id(job)}"


def job_samples(job: JobId) -> str:
    """Matches every sample message of the job."""
    return f"tg.samples.{job_id(job)}.>"


def stage_samples(job: JobId, stage: Stage) -> str:
    """Matches every sample message of one stage."""
    return f"tg.samples.{job_id(job)}.{stage}.>"


def iteration_samples(job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> str:
    """Matches every sample message of one stage of one iteration."""
    return f"tg.samples.{job_id(job)}.{stage}.{_count(incarnation)}.{_count(iteration)}.*"


def sample_subject(stage: Stage, group: SampleGroup) -> str:
    return group_subject(
        JobId(group.job), stage, incarnation=group.incarnation, iteration=group.iteration, prompt=group.prompt
    )


def decode_sample(stage: Stage, subject: str, payload: bytes) -> SampleGroup:
    """The group on a subject. WireError: it is no group, or another subject's."""
    group = decode_group(payload, scored=stage is Stage.SCORED)
    if sample_subject(stage, group) != subject:
        raise WireError(f"SampleGroup does not belong on subject {subject}")
    return group


def group_subject(job: JobId, stage: Stage, *, incarnation: int, iteration: int, prompt: int) -> str:
    """The subject of the one message that carries a group at a stage."""
    return f"tg.samples.{job_id(job)}.{stage}.{_count(incarnation)}.{_count(iteration)}.{_count(prompt)}"


def parse_sample_subject(subject: str) -> tuple[Stage, int, int, int] | None:
    """(stage, incarnation, iteration, prompt). None for any other subject, which some stranger published."""
    tokens = subject.split(".")
    stages = [stage.value for stage in Stage]
    if len(tokens) != 7 or tokens[3] not in stages or not all(map(_NUMBER.fullmatch, tokens[4:])):
        return None
    incarnation, iteration, prompt = map(int, tokens[4:])
    return Stage(tokens[3]), incarnation, iteration, prompt


def groups_of(found: Iterable[str]) -> Iterator[tuple[Stage, int, int, int]]:
    """`parse_sample_subject` of each that names a group."""
    return (group for subject in found if (group := parse_sample_subject(subject)) is not None)


def consumer_name(name: str) -> str:
    """Returns the name. ValueError unless it is 1-64 characters of letters, digits, '-' and '_'."""
    if not _CONSUMER.fullmatch(name):
        raise ValueError(f"consumer name {name!r} must be 1-64 characters of letters, digits, '-' and '_'")
    return name


def _count(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} counts incarnations or iterations, so it is at least 0")
    return number
