"""The folder of a cluster on this machine: `<folder of the jobs' folders>/.cluster`. Its files are this user's alone.

    cluster.json     what the cluster is; it is there while the cluster is up, once everybody can use it
    endpoint.json    the address of its Cluster API, and the credential for it
    queue/           the jobs, as `tidegate.cluster.kept_queue` has them
    gates/           the gates of the nodes
    agent.lock       held by the agent, with its pid
    servers/         the data of NATS and Redis
    jobs/            of each job: the config of its last start, how that ended, and which submission has begun
    logs/            of the agent, the scheduler and the jobs' launchers

Several machines may keep a cluster, one at a time. Then the folder is on storage that they share:

    keepers/         whose turn it is (`tidegate.cluster.keepers`)
    state            a link to a folder of each machine's own disk, which has the lock and the servers' data

Keys are in host memory alone (`tidegate.cluster.credentials`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tidegate.cluster.slots import Slots
from tidegate.json_text import parse_json, typed
from tidegate.types import JobId

NAME = ".cluster"
_FORGOTTEN_S = 7 * 24 * 3600.0
_PROBE_BYTES = 4096


def _digest(root: Path) -> str:
    return hashlib.blake2b(str(root).encode(), digest_size=5).hexdigest()


def state_of(output_dir: Path) -> str:
    """The name of the folder of what is one machine's own, of a cluster that several may keep. No node has it."""
    return f".cluster-{_digest(output_dir / NAME)}"


@dataclass(frozen=True, slots=True)
class ClusterFolder:
    root: Path

    @classmethod
    def of(cls, output_dir: Path) -> ClusterFolder:
        """The cluster whose jobs have their folders in `output_dir`."""
        return cls(output_dir.resolve() / NAME)

    def make(self) -> None:
        """Makes the folder for this user alone, before anything in it is made: the mode of a mkdir is not that of the
        parents which it makes too. OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def description(self) -> Path:
        return self.root / "cluster.json"

    @property
    def endpoint(self) -> Path:
        return self.root / "endpoint.json"

    @property
    def keepers(self) -> Path:
        return self.root / "keepers"

    @property
    def queue(self) -> Path:
        return self.root / "queue"

    @property
    def is_of_several(self) -> bool:
        """Whether several machines may keep the cluster."""
        return self.link.is_symlink()

    @property
    def state(self) -> Path:
        """The folder of what is one machine's own."""
        return Path(os.readlink(self.link)) if self.is_of_several else self.root

    @property
    def lock(self) -> Path:
        return self.state / "agent.lock"

    @property
    def servers(self) -> Path:
        return self.state / "servers"

    @property
    def operator(self) -> Path:
        """It names the folder of this machine's operator's credential, for commands to a keeper elsewhere."""
        return self.state / "operator"

    def share(self, local: Path) -> None:
        """Lets several machines keep the cluster. `local` is on a disk of each machine's own, at the same path.
        ValueError: it is another folder already, or the queue is not in files. OSError."""
        own = local / state_of(self.root.parent)
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.make()
        before = self.root / "servers"
        if before.exists() and not self.queue.exists():
            raise ValueError(
                f"the queue of an earlier release is in {before} alone: start the cluster once without --standby, "
                f"which writes {self.queue}; or remove {before} with the queue"
            )
        if before.exists():
            # What it has is in the queue's files. After the cluster was shared it would be old.
            before.rename(self.root / f"servers-before-{time.strftime('%Y%m%d-%H%M%S')}")
        with suppress(FileExistsError):
            self.link.symlink_to(own)
        if self.state != own:
            raise ValueError(
                f"{self.link} names {self.state}, and --gate-root would make it {own}: give the same --gate-root on "
                "all machines, or end them all and remove the link"
            )

    def check_writing(self) -> None:
        """OSError, with the path: a file cannot be written where the cluster writes some."""
        own = (self.root, self.logs, self.keepers, self.queue, self.queue / "records", self.queue / "configs")
        for folder in own:
            if folder.exists():
                probe = folder / f".{secrets.token_hex(8)}"
                try:
                    with probe.open("xb") as stream:
                        stream.write(bytes(_PROBE_BYTES))
                        stream.flush()
                        os.fsync(stream.fileno())
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(folder)) from error
                finally:
                    with suppress(OSError):
                        probe.unlink()

    def keep_alone(self) -> None:
        """One machine keeps the cluster from now on. No other one may."""
        self.link.unlink(missing_ok=True)

    @property
    def link(self) -> Path:
        """It names `state`, where several machines may keep the cluster."""
        return self.root / "state"

    @property
    def gates(self) -> Path:
        return self.root / "gates"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def job_config(self, job: JobId) -> Path:
        return self.root / "jobs" / f"{job}.json"

    def job_end(self, job: JobId) -> Path:
        return self.root / "jobs" / f"{job}.end.json"

    def job_begun(self, job: JobId) -> Path:
        # Its name in earlier releases, which wrote it for --force alone: a job may go on under another release.
        return self.root / "jobs" / f"{job}.forced"

    def job_output(self, job: JobId) -> Path:
        """What its launchers print."""
        return self.logs / f"job-{job}.out"

    def remove_forgotten(self, known: Collection[JobId]) -> None:
        """What is here of jobs that neither the agent nor the queue knows, and that is old: a queue that is just now
        written may lack one for a moment."""
        old_s = time.time() - _FORGOTTEN_S
        with suppress(OSError):
            kept = {*known, *(path.stem for path in (self.queue / "records").iterdir())}
            for path in [*(self.root / "jobs").iterdir(), *self.logs.glob("job-*.out")]:
                job = path.name.removeprefix("job-") if path.suffix == ".out" else path.name
                if job.partition(".")[0] not in kept and path.stat().st_mtime < old_s:
                    path.unlink(missing_ok=True)

    def host_memory(self, root: Path) -> Path:
        """The cluster's own folder in host memory. It is the same at every start."""
        return root / f"tidegate-cluster-{os.getuid()}-{_digest(self.root)}"


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """What the processes of a cluster have to know. `credentials`: the folder of `tidegate.cluster.credentials`.
    `address`: where commands of other machines are answered, with the credential in `node_credentials`; empty: they are
    not. `command_port`: the port there; 0: any. `program`: the words of the `tidegate` that the agent takes anew.
    `handover_form`: of what it leaves for it; 0: the agent is of an earlier release, and leaves nothing. `release`, and
    its `python`: what the agent is now."""

    slots: Slots
    nats_url: str
    redis_url: str
    agent: str
    credentials: str
    address: str = ""
    node_credentials: str = ""
    command_port: int = 0
    program: tuple[str, ...] = ()
    handover_form: int = 0
    release: str = ""
    python: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> ClusterDescription:
        """ValueError."""
        fields = typed(dict, parse_json(text), "a cluster's description")
        try:
            slots = Slots.of(typed(dict, fields["slots"], "slots"))
            names = ("nats_url", "redis_url", "agent", "credentials", "address", "node_credentials")
            texts = {name: typed(str, fields[name], name) for name in names}
            own_release, python = (typed(str, fields.get(name, ""), name) for name in ("release", "python"))
            program = tuple(typed(str, word, "program") for word in fields.get("program", []))
            port, form = (typed(int, fields.get(name, 0), name) for name in ("command_port", "handover_form"))
        except KeyError as error:
            raise ValueError(f"a cluster's description has no {error}") from error
        return cls(
            slots,
            **texts,
            command_port=port,
            program=program,
            handover_form=form,
            release=own_release,
            python=python,
        )
