"""Claims a job's folder for a run, and prepares it: from the start, in place of an older run, or where it ended.

Order:
1. the refusals that need no change;
2. the lock;
3. the check of the folder's contents;
4. the files that the run needs.

Invariants:
- One launcher at a time runs a job. Its lock dies with it. [test_claim: second_launcher_is_refused]
- A damaged config.json ends no job: each start has a copy. [test_claim: config_is_damaged]
- Every start has the tokenizer of the first. [test_claim: tokenizer_of_its_first_start]
- Files of an older run are removed only on request. [test_claim: fresh_start_over_an_older_run]
- A resumed run keeps everything that decides its samples. [test_claim: resumed_run_may_not_change_what_decides]
- It may have more iterations, and other GPUs and layouts. [test_claim: resumed_run_may_have_more_iterations]
- Each start of a job has its own, larger boot. [test_claim: every_start_has_a_larger_boot]
- A new job's folder is this user's alone. [test_claim: a_new_folder_is_this_users_alone]
- At the end no file of the job is left in host memory. The next start removes the files of a killed launcher.
  [test_claim: nothing_is_left_in_host_memory]
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tidegate.attempts import AttemptFolder, begin_attempt, newest_attempt, read_record
from tidegate.certs.job_credentials import issue_job_credentials, store_folders
from tidegate.checkpoint_names import set_aside
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.config.schedule import rules_of, schedule_of
from tidegate.config.sections.job import ServersSection
from tidegate.job import Job, JobFolder, tokenizer_file
from tidegate.launcher.checkpoint import FoundCheckpoint, newest_checkpoint
from tidegate.launcher.left_memory import Removals, own_name
from tidegate.launcher.lineage import changes_of_samples
from tidegate.launcher.lock import LOCK, RECORD_BYTES, held, launcher_pid, lock_record, machine_number
from tidegate.launcher.outcome import End, Outcome
from tidegate.launcher.readme import README
from tidegate.lr.checkpoint import decoded, resumed
from tidegate.lr.errors import ForeignCheckpoint, LrError
from tidegate.machines import versions
from tidegate.types import job_id

_TOKENIZER_SUM = "tokenizer_sha256"


class CannotStart(ConfigError):
    """The job cannot run here as requested. The message says what stands in the way and what would help."""


class Start(StrEnum):
    """How to treat the contents of the job's folder."""

    FRESH = "fresh"
    RESUME = "resume"
    FORCE = "force"
    """Start over: remove the older run."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job's folder, ready for a run. `config` lacks only the embedded servers' URLs.

    `checkpoint` is the newest one that a resumed run finds.
    """

    folder: JobFolder
    attempt: AttemptFolder
    config: JobConfig
    boot: int
    checkpoint: FoundCheckpoint | None


def host_memory_folder(config: JobConfig) -> Path:
    """The job's own folder in host memory. It is the same at every start of the job."""
    folder = str(JobFolder.of(config).root)
    digest = hashlib.blake2b(folder.encode(), digest_size=5).hexdigest()
    return Path(config.runtime.host_memory_root) / f"{own_name()}{digest}"


def saved_config(folder: JobFolder) -> JobConfig | None:
    """The config of the job's last start. None where there is no job.

    Where the file is damaged, the newest start's own copy counts. ConfigError: that one is damaged too.
    """
    try:
        return JobConfig.read(folder.config)
    except FileNotFoundError:
        return None
    except ConfigError:
        copy = newest_attempt(folder.root).config
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError):
            return parse_config(yaml.safe_load(copy.read_text()))
        raise


@contextmanager
def claim_folder(
    job: Job,
    start: Start,
    *,
    now_unix_s: float,
    fresh_command: str = "--force",
    resume_command: str = "--resume",
    claimed: Callable[[], None] = lambda: None,
) -> Iterator[Claim]:
    """Claims the job's folder within the block. CannotStart, with nothing changed, when its contents forbid the start.

    `fresh_command` is what a person types to remove the older run and start over, `resume_command` to go on with it.
    `claimed` is called once the folder is this run's: what --force removes and the end of an earlier run are gone, and
    there is no config of this run yet.
    """
    folder = JobFolder.of(job.config)
    refuse_claim(job.config, start, fresh_command=fresh_command, resume_command=resume_command)
    _make_folder(folder.root)
    with held(folder.root / LOCK, lambda pid: CannotStart(_running(folder, pid))) as lock_fd:
        # Check again under the lock: another launcher may have been here in between.
        if start is Start.FRESH:
            _refuse_occupied(folder, fresh_command, resume_command)
        checkpoint = (
            newest_checkpoint(folder.checkpoints, fresh_command=fresh_command) if start is Start.RESUME else None
        )
        for fault in checkpoint.passed_over if checkpoint is not None else ():
            # A save of the same name would find it, and a pruning would take it for the newest.
            set_aside(folder.checkpoints / fault.partition(" ")[0])
        boot = _next_boot(lock_fd, now_unix_s=now_unix_s)
        if start is Start.FORCE:
            _empty(folder)
        with _host_memory(host_memory_folder(job.config)):
            try:
                _issue_credentials(host_memory_folder(job.config), job)
                config = _prepare_folder(folder, job, claimed)
                record = _record(start, boot, checkpoint, folder.tokenizer)
                attempt = begin_attempt(
                    folder.root, config=config.model_dump(mode="json"), record=record, now_unix_s=now_unix_s
                )
                yield Claim(folder, attempt, config, boot, checkpoint)
            finally:
                folder.endpoint.unlink(missing_ok=True)


def refuse_claim(
    config: JobConfig, start: Start, *, fresh_command: str = "--force", resume_command: str = "--resume"
) -> None:
    """CannotStart where `claim_folder` would refuse the folder as it is now. Changes nothing."""
    folder = JobFolder.of(config)
    _refuse_without_memory(config)
    if start is Start.FRESH:
        _refuse_occupied(folder, fresh_command, resume_command)
    elif start is Start.RESUME:
        _refuse_other_lineage(folder, config, fresh_command)
    elif folder.root.exists() and any(folder.root.iterdir()) and not (folder.root / LOCK).exists():
        raise CannotStart(f"{folder.root} is not a job's folder, so it is not removed: choose another output folder")
    _refuse_unmakeable(folder.root)
    _refuse_others_memory(host_memory_folder(config))


def refuse_running(folder: JobFolder) -> None:
    """CannotStart while a launcher runs the job. Check this first: other refusals may only follow from it."""
    pid = launcher_pid(folder)
    if pid is not None:
        raise CannotStart(_running(folder, pid))


def write_private(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Writes the file atomically, for this user only. `is_durable`: it is on the disk when this returns."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
        if is_durable:
            stream.flush()
            os.fsync(stream.fileno())
    os.replace(partial, path)
    if is_durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Until the names in the folder are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _running(folder: JobFolder, pid: str) -> str:
    return (
        f"job {folder.root.name} already runs, in the launcher with pid {pid}: wait for its end or cancel it "
        f"({folder.command('cancel')})"
    )


def _refuse_without_memory(config: JobConfig) -> None:
    root = Path(config.runtime.host_memory_root)
    if not (root.is_dir() and os.access(root, os.W_OK)):
        raise CannotStart(
            f"runtime.host_memory_root={root} is not a folder that can be written to: name one in memory "
            "(/dev/shm), or any local folder where there is none"
        )


def _refuse_occupied(folder: JobFolder, fresh_command: str, resume_command: str) -> None:
    if not folder.config.exists():
        return
    name, where = folder.root.name, folder.root
    if _has_finished(folder):
        state, goes_on = "has finished", f"train on by {resume_command}, with more algorithm.iterations"
    else:
        state, goes_on = "was started before", f"go on with it ({resume_command})"
    raise CannotStart(
        f"job {name} {state} in {where}: {goes_on}, give the config another job name, or remove the older run with all "
        f"that it trained ({fresh_command})"
    )


def _has_finished(folder: JobFolder) -> bool:
    """Whether the record of the end says so. A damaged one says nothing: the start replaces it."""
    with suppress(FileNotFoundError, ValueError):
        return Outcome.read(folder.result).end is End.FINISHED
    return False


def _refuse_other_lineage(folder: JobFolder, config: JobConfig, fresh_command: str) -> None:
    """CannotStart where the config cannot go on with the folder's job."""
    saved = saved_config(folder)
    if saved is None:
        raise CannotStart(f"there is nothing to resume: {folder.root} holds no job; start it without --resume")
    if changed := changes_of_samples(saved, config):
        rates = (
            ", or say by actor.lr_schedule.budget_mismatch whose learning-rate schedule holds"
            if any(each.startswith(("actor.learning_rate", "actor.lr_")) for each in changed)
            else ""
        )
        raise CannotStart(
            f"job {config.job} cannot go on with {', '.join(changed)}: a resume keeps what decides the samples; set it "
            f"back{rates}, or give the config another job name"
        )
    num_iterations, was = config.algorithm.iterations, saved.algorithm.iterations
    if _has_finished(folder) and num_iterations <= was:
        raise CannotStart(
            f"job {config.job} has finished its {was} iterations, there is nothing to resume: "
            f"{folder.command('describe')} shows its result; to train on, set algorithm.iterations above {was} (is "
            f"{num_iterations})"
        )
    if (found := newest_checkpoint(folder.checkpoints, fresh_command=fresh_command)) is not None:
        _refuse_other_course(config, found)


def _refuse_other_course(config: JobConfig, found: FoundCheckpoint) -> None:
    """CannotStart where the checkpoint has more iterations than the config, or another schedule of the rate."""
    num_iterations = config.algorithm.iterations
    if num_iterations < found.next_iteration:
        raise CannotStart(
            f"job {config.job} cannot go on with algorithm.iterations={num_iterations}: checkpoint {found.name} has "
            f"{found.next_iteration} iterations; set it to {found.next_iteration} or more"
        )
    on_mismatch = config.actor.lr_schedule.budget_mismatch
    try:
        if found.lr is not None:
            resumed(decoded(found.lr), schedule_of(config), rules_of(config), on_mismatch=on_mismatch)
    except ForeignCheckpoint:
        # The actor adopts such a checkpoint as the config's legacy_policy says.
        return
    except LrError as error:
        raise CannotStart(f"job {config.job} cannot go on from checkpoint {found.name}: {error}") from error


def _refuse_unmakeable(root: Path) -> None:
    """Try it with a folder that is removed at once: rights alone do not tell of /proc, or of a disk that is full."""
    try:
        nearest = next(path for path in (root, *root.parents) if path.exists())
        with TemporaryDirectory(prefix=".tidegate-", dir=nearest):
            pass
    except OSError as error:
        raise _unmakeable(root, error) from error


def _refuse_others_memory(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise CannotStart(f"{folder} is another user's: remove it, or set runtime.host_memory_root to another folder")


def _make_folder(root: Path) -> None:
    try:
        # What others make in it follows the umask.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unmakeable(root, error) from error


def _unmakeable(root: Path, error: OSError) -> CannotStart:
    return CannotStart(f"the job's folder {root} cannot be made ({error.strerror}): choose another output folder")


def _next_boot(lock_fd: int, *, now_unix_s: float) -> int:
    """A boot larger than any before. The clock keeps it larger when the folder was removed but the servers stayed."""
    boot = max(lock_record(lock_fd).get("boot", 0) + 1, int(now_unix_s))
    record = json.dumps({"boot": boot, "pid": os.getpid(), "machine": machine_number()}).encode()
    os.pwrite(lock_fd, record.ljust(RECORD_BYTES), 0)
    os.fsync(lock_fd)  # other machines may ask whose it is
    return boot


def _empty(folder: JobFolder) -> None:
    """Its config last: where this is cut off, the folder still is one of a job that was started."""
    for entry in sorted(folder.root.iterdir(), key=lambda each: each == folder.config):
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def _host_memory(folder: Path) -> Iterator[None]:
    _refuse_others_memory(folder)
    removals = Removals()
    removals.go_on(folder.parent)
    removals.begin(folder)
    removals.finish()
    folder.mkdir(mode=0o700)
    try:
        # It tells the machine's agent that this is of a launcher that lives.
        with held(folder / LOCK, lambda pid: CannotStart(f"{folder} was taken by the process {pid}")):
            yield
    finally:
        removals.begin(folder)
        removals.finish()


def _issue_credentials(host_memory: Path, job: Job) -> None:
    try:
        issue_job_credentials(host_memory, job_id(job.config.job))
    except OSError as error:
        raise CannotStart(
            f"the job's credentials cannot be written to {host_memory} ({error}): make room there, or set "
            "runtime.host_memory_root to another folder"
        ) from error


def _prepare_folder(folder: JobFolder, job: Job, claimed: Callable[[], None]) -> JobConfig:
    """Writes the files that a run needs into the folder. Returns the config with every path resolved."""
    _keep_tokenizer(folder, job)
    for stale in (folder.result, folder.endpoint):
        stale.unlink(missing_ok=True)
    claimed()
    folder.checkpoints.mkdir(exist_ok=True)
    folder.readme.write_text(README)
    config = job.config
    config = config.model_copy(
        update={
            "output_dir": str(folder.root.parent),
            "model": config.model.model_copy(update={"tokenizer": str(folder.tokenizer)}),
            "runtime": config.runtime.model_copy(update={"host_memory_root": str(host_memory_folder(config))}),
            "servers": _that_travel(config),
        }
    )
    write_private(folder.config, config.to_json())
    return config


def _that_travel(config: JobConfig) -> ServersSection:
    """Those of the servers' credentials that travel go into the job's folder in host memory, and from there on."""
    servers, found = config.servers, {}
    if not (config.cluster.machines and servers.credentials_travel):
        return servers
    for key, own in store_folders(host_memory_folder(config)).items():
        if folder := getattr(servers, key):
            shutil.copytree(folder, own)
            found[key] = str(own)
    return servers.model_copy(update=found)


def _keep_tokenizer(folder: JobFolder, job: Job) -> None:
    """Leaves the tokenizer in the folder with which the job began. The config's own replaces one that is missing or
    damaged. CannotStart: it is another one."""
    began_with = read_record(newest_attempt(folder.root)).get(_TOKENIZER_SUM)
    kept = _sum(folder.tokenizer)
    if kept is not None and began_with in (None, kept):
        return
    partial = folder.tokenizer.with_suffix(".partial")
    if (file := tokenizer_file(job.config)) is not None:
        # Copy the same bytes, which an export writes again.
        shutil.copyfile(file, partial)
    else:
        job.tokenizer.save(partial)
    if began_with not in (None, _sum(partial)):
        partial.unlink()
        raise CannotStart(
            f"{folder.tokenizer} is not the tokenizer with which job {job.config.job} began, nor is that of the config "
            f"(sha256 {kept and kept[:12]}, was {began_with[:12]}): put it back from a copy, then start with --resume"
        )
    os.replace(partial, folder.tokenizer)


def _sum(path: Path) -> str | None:
    with suppress(FileNotFoundError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def _record(start: Start, boot: int, checkpoint: FoundCheckpoint | None, tokenizer: Path) -> dict[str, Any]:
    """The first entries of an attempt's record: how it starts, who runs it, and the versions of its packages."""
    return {
        "start": start,
        _TOKENIZER_SUM: _sum(tokenizer),
        "checkpoint": checkpoint.name if checkpoint else None,
        "boot": boot,
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "packages": {name: found or None for name, found in versions().items()},
    }
