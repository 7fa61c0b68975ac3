"""The node's gate. For each GPU it knows the process that may use it now, and the highest token that ever passed.

The gate is a library on a folder of the node's local disk (a volume shared by the node's containers; not NFS).
Each GPU has two files, named by its percent-encoded name:
- `<gpu>.lock` is never replaced. The holder's open file locks byte 0. The service passes the descriptor to the worker,
  so that the GPU is held exactly as long as the worker lives. `acquire` locks byte 1 for the moment in which it passes,
  so that of two attempts at once the second sees the outcome of the first.
- `<gpu>.json` holds the highest token and the process that passed with it. It is replaced as a whole under both locks
  and synced to disk.

Invariants:
- At most one open file holds a GPU. [test_gate: of_many_at_once_exactly_one_passes]
- The highest token of a GPU only grows, through any crash. [test_gate: survives_a_kill_at_any_moment]
- An attempt passes only with a token larger than all before. [test_gate: token_that_is_not_larger]
- A refused attempt changes nothing. [test_gate: refused_attempt_changes_nothing]
- A report takes no lock and disturbs nobody. [test_gate: report_never_makes_an_attempt_fail]
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from tidegate.gate.lock import is_locked_by_another, lock, try_lock, unlock
from tidegate.json_text import parse_json, whole_number
from tidegate.ownership.records import GateState, StaleToken
from tidegate.types import LARGEST_TERM, GpuId, Grant, Token

_HOLD, _PASSING = 0, 1
_RELEASE_POLL_S = 0.005


class GateClosed(RuntimeError):
    """Another open file holds the GPU. Try again when the holder has released it or is dead."""


class GateDamaged(RuntimeError):
    """The record of a GPU cannot be read. No attempt passes, because one with a lower token could."""


@dataclass(frozen=True, slots=True)
class _Record:
    token: Token
    pid: int

    def to_json(self) -> str:
        return json.dumps({"term": self.token.term, "counter": self.token.counter, "pid": self.pid})

    @classmethod
    def parse(cls, text: str) -> _Record:
        fields = parse_json(text)
        # Strict: a number that is read too small would let an old token pass.
        token = Token(*(whole_number(fields[name], name, most=LARGEST_TERM) for name in ("term", "counter")))
        return cls(token, whole_number(fields["pid"], "pid"))


class GateHold:
    """A hold on a GPU. It lasts until every process has closed its copy of the descriptor."""

    def __init__(self, grant: Grant, fd: int) -> None:
        self.grant = grant
        self._fd: int | None = fd

    def fileno(self) -> int:
        """The descriptor to pass to the worker. ValueError after `close` in this process."""
        if self._fd is None:
            raise ValueError(f"the hold of {self.grant.gpu} is closed in this process")
        return self._fd

    def close(self) -> None:
        """Closes this process's copy. Closing twice is harmless."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Gate:
    """The gate of one node. Two objects on the same folder, in any processes, are the same gate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def acquire(self, grant: Grant) -> GateHold:
        """Passes with the grant's token. Waits milliseconds at most, for other attempts, and never for a release.

        Raises StaleToken, GateClosed or GateDamaged and then changes nothing.
        """
        fd = os.open(self._lock_path(grant.gpu), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with _locked(fd, _PASSING):
                self._pass(fd, grant)
        except BaseException:
            os.close(fd)
            raise
        return GateHold(grant, fd)

    def is_held(self, gpu: GpuId) -> bool:
        """Whether a living process holds the GPU."""
        try:
            fd = os.open(self._lock_path(gpu), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return is_locked_by_another(fd, _HOLD)
        finally:
            os.close(fd)

    def highest_token(self, gpu: GpuId) -> Token | None:
        """None when no attempt ever passed. Raises GateDamaged."""
        record = self._record(gpu)
        return None if record is None else record.token

    def report(self) -> list[GateState]:
        """The state of every GPU that an attempt ever named, in order of name."""
        gpus = sorted(GpuId(unquote(path.stem)) for path in self._folder.glob("*.lock"))
        return [GateState(gpu, self.highest_token(gpu), self.is_held(gpu)) for gpu in gpus]

    def passed(self) -> list[Grant]:
        """The highest token that ever passed, by GPU. Leaves out damaged records."""
        found: list[Grant] = []
        for gpu in sorted(GpuId(unquote(path.stem)) for path in self._folder.glob("*.json")):
            with suppress(GateDamaged):
                if (token := self.highest_token(gpu)) is not None:
                    found.append(Grant(gpu, token))
        return found

    def wait_until_free(self, gpu: GpuId, *, timeout_s: float) -> bool:
        """Whether the GPU became free within `timeout_s`. Blocks its thread."""
        deadline = time.monotonic() + timeout_s
        while self.is_held(gpu):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RELEASE_POLL_S)
        return True

    def _pass(self, fd: int, grant: Grant) -> None:
        record = self._record(grant.gpu)
        if record is not None and grant.token <= record.token:
            raise StaleToken(
                f"{grant.gpu} cannot be acquired with token {grant.token}: {record.token} has passed its gate; "
                "ask the scheduler who owns it now"
            )
        if not try_lock(fd, _HOLD):
            # The very first holder may have died, or may be stopped, between its lock and its record.
            holder = f"token {record.token}, acquired by pid {record.pid}" if record else "a process without a record"
            raise GateClosed(
                f"{grant.gpu} cannot be acquired with token {grant.token}: it is held by {holder}; "
                "release it there first, or end its worker"
            )
        self._write(grant.gpu, _Record(grant.token, os.getpid()))

    def _record(self, gpu: GpuId) -> _Record | None:
        path = self._record_path(gpu)
        try:
            return _Record.parse(path.read_text())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise GateDamaged(
                f"gate record {path} cannot be read ({error}): stop all workers of this node, then write into it "
                'the highest token that the scheduler knows for the GPU, {"term": T, "counter": C, "pid": 0}'
            ) from error

    def _write(self, gpu: GpuId, record: _Record) -> None:
        path = self._record_path(gpu)
        # Only one process passes at a time, so the name is free, or a crash left the file.
        partial = path.with_suffix(".partial")
        with partial.open("w") as stream:
            stream.write(record.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _lock_path(self, gpu: GpuId) -> Path:
        return self._folder / f"{_file_name(gpu)}.lock"

    def _record_path(self, gpu: GpuId) -> Path:
        return self._folder / f"{_file_name(gpu)}.json"


def _file_name(gpu: GpuId) -> str:
    """Contains no separator and is never "." or "..". The encoding is reversible, so each GPU has its own file."""
    return quote(gpu, safe="").replace(".", "%2E")


@contextmanager
def _locked(fd: int, byte: int) -> Iterator[None]:
    lock(fd, byte)
    try:
        yield
    finally:
        unlock(fd, byte)
