"""What each party may do on NATS and in Redis: the subjects and keys of a role and a job, in the servers' own terms.
Pure.

- A scheduler: all subjects, and all of Tidegate's keys.
- A job: its subjects, streams and consumers, but the copy of the scheduler's state; in Redis its own tables, and those
  of GPUs and open transitions. It reads the store's session.
- A node, an operator, a viewer: nothing.

A job writes GPUs and open transitions because its actor's lead commits a change of layout there, in one step with its
own ranks.

Invariants:
- Nobody but a scheduler adopts a store, or writes a job's state. [test_permissions: no_other_party_than_a_scheduler]
- A job reaches no subject, stream or key of another job. [test_permissions: nothing_of_another_job]
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.adapters import subjects, tables
from tidegate.adapters.redis_keys import STORE_KEY, table_key
from tidegate.certs.identity import Identity, Party
from tidegate.types import JobId, job_id

_COMMANDS = "-@all +evalsha +evalsha_ro +hdel +hget +hgetall +hmget +hset +info +ping +script|load +time +wait"
"""Those of the scripts, and those that call them."""


@dataclass(frozen=True, slots=True)
class SubjectRights:
    """Subjects, with the wildcards of NATS."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def subject_rights(identity: Identity) -> SubjectRights | None:
    """None: NATS does not let this party in."""
    match identity.party:
        case Party.SCHEDULER:
            return SubjectRights((">",), (">",))
        case Party.JOB:
            return _rights_of_job(job_id(identity.name), inbox=inbox_prefix(identity))
        case _:
            return None


def inbox_prefix(identity: Identity) -> str:
    """The beginning of the subjects on which this party gets answers. Nobody else may listen there."""
    return f"_INBOX.{identity.party}.{identity.name}"


def store_user(identity: Identity) -> str:
    """The name of this party's user in Redis."""
    return f"{identity.party}/{identity.name}"


def store_rules(identity: Identity) -> str | None:
    """The rights of the party's user, as a line of an ACL file has them. None: Redis does not let this party in."""
    match identity.party:
        case Party.SCHEDULER:
            return f"~{table_key('*')} {_COMMANDS}"
        case Party.JOB:
            job = job_id(identity.name)
            keys = " ".join(f"~{table_key(table)}" for table in (*tables.tables_of(job), "gpus", "open"))
            return f"%R~{STORE_KEY} {keys} {_COMMANDS}"
        case _:
            return None


def _rights_of_job(job: JobId, *, inbox: str) -> SubjectRights:
    streams = subjects.events_stream(job), subjects.samples_stream(job), subjects.dead_stream(job)
    talks = (
        subjects.event_subject(job),
        subjects.figures(job),
        subjects.job_samples(job),
        subjects.dead_subject(job),
        subjects.responses_subject(job),
    )
    calls = tuple(
        f"$JS.API.{call}.{stream}" for stream in streams for call in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
    )
    removals = tuple(f"$JS.API.STREAM.{call}.{subjects.samples_stream(job)}" for call in ("PURGE", "MSG.DELETE"))
    consumers = tuple(
        f"$JS.API.CONSUMER.{call}.{stream}.*" for stream in streams for call in ("DURABLE.CREATE", "INFO", "MSG.NEXT")
    )
    answers = tuple(f"$JS.ACK.{stream}.>" for stream in streams)
    return SubjectRights((*talks, *calls, *removals, *consumers, *answers), (*talks, f"{inbox}.>"))
