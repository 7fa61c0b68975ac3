"""The queue in files, on the storage of the jobs: it outlives both stores, and the machine that keeps the cluster.

    queue/records/JOB.json    a job's record
    queue/configs/JOB.json    the text of its config, until it has ended
    queue/cluster.json        the drained nodes, a pause, and the term of the ownership map

The store decides. These files follow it, each written whole, and only where something has changed. What the store has
lost is written back to it from them (`services.scheduler.cluster.loop`). Of several writers one may fail, and is called
again.

Invariants:
- What was kept is read again, byte for byte. [test_kept_queue: read_again]
- Only what has changed is written. [test_kept_queue: only_what_has_changed]
- A job that is waiting or runs keeps its files, also where the store has lost it. [test_kept_queue: the_store_has_lost]
- A damaged file spoils no other. [test_kept_queue: a_damaged_file]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.cluster.drained import drained_fields, drained_of
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.json_text import parse_json, typed, whole_number
from tidegate.launcher.claim import sync_folder, write_private
from tidegate.types import Drain, JobId, NodeId


@dataclass(frozen=True, slots=True)
class KeptJob:
    """Texts. `config` is empty where there is none."""

    record: bytes
    config: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What the files have. `faults`: those that cannot be read, each with the reason."""

    jobs: Mapping[JobId, KeptJob] = field(default_factory=dict)
    drained: Mapping[NodeId, Drain] = field(default_factory=dict)
    paused: str = ""
    term: int = 0
    faults: tuple[str, ...] = ()


class KeptQueue:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[JobId, bytes] = {}
        """As the files have them."""
        self._config_of: dict[JobId, str] = {}
        """The name in the store of each config that is kept: its SHA-256."""
        self._cluster = ""

    def read(self) -> Kept:
        """OSError: the storage does not answer."""
        jobs: dict[JobId, KeptJob] = {}
        faults = []
        for path in sorted(self._path("records").glob("*.json")):
            config = self._path("configs") / path.name
            try:
                each = Submission.parse(text := path.read_bytes())
                if path.stem != each.job:
                    raise ValueError(f"it is of job {each.job}")
                jobs[each.job] = KeptJob(text, config.read_text() if config.exists() else "")
                self._records[each.job] = text
                self._config_of[each.job] = hashlib.sha256(jobs[each.job].config.encode()).hexdigest()
                if self.lacks_config(each):
                    faults.append(f"{config} is damaged or missing: cancel job {each.job}, and submit it again")
            except (ValueError, IsADirectoryError) as error:
                faults.append(f"{path} cannot be read ({error})")
        drained, paused, term = dict[NodeId, Drain](), "", 0
        if (path := self._path("cluster.json")).exists():
            try:
                fields = typed(dict, parse_json(path.read_bytes()), "the queue's file of the cluster")
                term = whole_number(fields["term"], "term")
                paused = typed(str, fields.get("paused", ""), "paused")
                drained = drained_of(fields)
            except (ValueError, KeyError) as error:
                faults.append(f"{path} cannot be read ({error!r})")
        return Kept(jobs, drained, paused, term, tuple(faults))

    def changed(self, texts: Mapping[JobId, bytes], records: Mapping[JobId, Submission]) -> list[Submission]:
        """The records, which the texts say, that differ from their files."""
        return [records[job] for job, text in texts.items() if self._records.get(job) != text]

    def lacks_config(self, each: Submission) -> bool:
        """Whether the config of this record has to be written with it."""
        return each.state is not SubmissionState.ENDED and self._config_of.get(each.job) != each.config

    def write(
        self,
        texts: Mapping[JobId, bytes],
        changed: Collection[Submission],
        configs: Mapping[JobId, str],
        *,
        drained: Mapping[NodeId, Drain],
        paused: str,
        term: int,
    ) -> None:
        """Brings the files to what the store has: all records in `texts`. OSError: nothing is known of what was written
        then, and the next call writes it."""
        # Each with its mode, which a mkdir with parents does not give these.
        for folder in (self.folder.parent, self.folder, self._path("records"), self._path("configs")):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
                sync_folder(folder.parent)
        cluster = json.dumps({**drained_fields(drained), "paused": paused, "term": term})
        if cluster != self._cluster:
            write_private(self._path("cluster.json"), cluster, is_durable=True)
            self._cluster = cluster
        for each in changed:
            if (config := configs.get(each.job)) is not None:
                write_private(self._path("configs", each.job), config, is_durable=True)
                self._config_of[each.job] = each.config
            write_private(self._path("records", each.job), texts[each.job].decode(), is_durable=True)
            self._records[each.job] = texts[each.job]
            if each.state is SubmissionState.ENDED:
                self._forget_config(each.job)
        for job in self._records.keys() - texts.keys():
            # A job that has not ended is in the store, or the store has lost it.
            if Submission.parse(self._records[job]).state is SubmissionState.ENDED:
                self._path("records", job).unlink(missing_ok=True)
                del self._records[job]

    def _forget_config(self, job: JobId) -> None:
        self._path("configs", job).unlink(missing_ok=True)
        self._config_of.pop(job, None)

    def _path(self, name: str, job: JobId | None = None) -> Path:
        return self.folder / name if job is None else self.folder / name / f"{job}.json"
