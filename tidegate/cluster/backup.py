"""A backup of a cluster's jobs, and its JSON. Pure.

It has what nothing but the store knows: the records of all jobs, with their configs, and the drained nodes. The rest
of NATS and Redis is made again: the gates tell who has which GPU (`tidegate.ownership.adoption`), and a job goes on
from its checkpoint, with streams of its own.

Records and configs are texts here: one that this release cannot read is refused by itself, and spoils no other.

Invariants:
- A job that is restored has no GPUs, and goes on from its checkpoint where it has one. [test_backup: goes_on_from]
- A job that would first remove files is not started: since the backup it may have made them.
  [test_backup: removes_files]
- Decoding an encoded backup gives an equal one; another text is refused. [test_backup: survives_its_json]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidegate.cluster.drained import drained_fields, drained_of
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.config.job_config import JobConfig
from tidegate.json_text import parse_json, typed, whole_number
from tidegate.launcher.outcome import End
from tidegate.types import Drain, NodeId

FORMAT = 1


@dataclass(frozen=True, slots=True)
class BackedUpJob:
    """The texts of its record and of its config. `config` is empty for a job that has ended."""

    record: str
    config: str

    def restored(self) -> Submission:
        """The record that a cluster without this job gets. What has become of the job since the backup is not known.

        ValueError: this release cannot read it, or the config is another one than the record names.
        """
        each = Submission.parse(self.record.encode())
        if each.state is SubmissionState.ENDED:
            return replace(each, is_cleared=True)
        if not self.config:
            return _ended(each, End.FAILED, "its config was lost before the backup: submit it again")
        if hashlib.sha256(self.config.encode()).hexdigest() != each.config:
            raise ValueError(f"the config of job {each.job} is not the one that its record names")
        if (named := JobConfig.from_json(self.config).job) != each.job:
            raise ValueError(f"the config of job {each.job} is of job {named}")
        if each.treatment is Treatment.FORCE and each.state is not SubmissionState.RUNNING:
            why = "since the backup --force may have begun it anew: submit it again, with --resume or with --force"
            return _ended(each, End.INTERRUPTED, why)
        return replace(
            each,
            state=SubmissionState.QUEUED,
            gpus=(),
            treatment=Treatment.RESUME,
            # Its next start is no first one: it goes on where it finds a folder, and begins where it does not.
            starts=max(1, each.starts),
            message="restored from a backup",
            leaves="",
            resumes_unix_ms=0,
        )


def _ended(each: Submission, end: End, message: str) -> Submission:
    return replace(each, state=SubmissionState.ENDED, gpus=(), end=end, message=message, leaves="", is_cleared=True)


@dataclass(frozen=True, slots=True)
class Backup:
    """`jobs`: those that wait or run in the order of the queue, then those that have ended."""

    made_unix_ms: int
    jobs: tuple[BackedUpJob, ...]
    drained: Mapping[NodeId, Drain] = field(default_factory=dict)

    def to_json(self) -> str:
        jobs = [{"record": each.record, "config": each.config} for each in self.jobs]
        fields = {"format": FORMAT, "made_unix_ms": self.made_unix_ms, "jobs": jobs, **drained_fields(self.drained)}
        return json.dumps(fields, indent=1, sort_keys=True)

    @classmethod
    def parse(cls, text: bytes) -> Backup:
        """ValueError."""
        fields = typed(dict, parse_json(text), "a backup")
        try:
            if (form := fields["format"]) != FORMAT:
                raise ValueError(f"it has format {form}, and this release reads {FORMAT}")
            jobs = [typed(dict, each, "a job") for each in typed(list, fields["jobs"], "jobs")]
            return cls(
                whole_number(fields["made_unix_ms"], "made_unix_ms"),
                tuple(BackedUpJob(*(typed(str, each[name], name) for name in ("record", "config"))) for each in jobs),
                drained_of(fields),
            )
        except KeyError as error:
            raise ValueError(f"a backup has no {error}") from error
