"""Which machine keeps a cluster: a file for each term, on the storage that all machines share.

    keepers/7.json      of term 7: who keeps the cluster, and the last beat

A keeper writes a beat into its own file every `BEAT_S`. A term is over when its keeper has said so, or has been silent
for `SILENT_S` by the clock of whoever looks. The next term is claimed by a link with its name, which one machine can
make. A keeper that could not write for `LOST_S` ends itself, so that none is left when another one begins.

Files are opened for each look and written in place: a client of NFS then asks the server, and shows nothing old. A list
of a folder may be old. It delays a look, and who claims a term lists once more. The second half of a file is for later
keepers: it tells one that stood still for long, and cannot tell by its own beats, that its term is over.

Invariants:
- Of machines that claim a term, one has it. [test_keepers: one_of_many]
- A keeper whose term was taken is told so at its next beat, by each later one. [test_keepers: whose_term_was_taken]
  [test_keepers: could_not_tell]
- No term comes back: numbers only grow. [test_keepers: numbers_only_grow] [test_keepers: removed_is_not_claimed]
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tidegate.json_text import parse_json, typed, whole_number

BEAT_S = 2.0
LOST_S = 15.0
SILENT_S = 40.0
"""A keeper's processes on other machines hear nothing for `tidegate.machines.LOST_S` after its end, and then have 10 s
to end: they are gone 35 s after its last beat."""
KEEPS = "keeps"
"""In the record of an agent's lock: 0 for one that waits for its turn."""
_HALF = 512
_KEPT = 20
"""The files of earlier terms that stay: for people, and for keepers that stood still."""


class TermTaken(RuntimeError):
    """Another machine keeps the cluster."""


@dataclass(frozen=True, slots=True)
class Term:
    """`name` and `address`: of the machine. `cluster`: a digest of the nodes and machines that it was told; empty in an
    earlier release. `beat` counts."""

    number: int
    name: str
    address: str
    cluster: str = ""
    beat: int = 0
    has_ended: bool = False

    def is_other_than(self, cluster: str) -> bool:
        """Whether its keeper was told of other nodes or machines, where both are known."""
        return bool(self.cluster and cluster and self.cluster != cluster)


class Keepers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    def newest(self, *, least: int = 0) -> Term | None:
        """The newest term, and not one before `least`, which is known to be there. OSError: the storage does not
        answer. A file that is being written counts as a beat of nobody."""
        number = max([least, *self._numbers()])
        return self._read(number) if number else None

    def silent_s(self, number: int) -> float:
        """The time since the last beat of a term, as far as the clocks of this machine and the storage agree.
        OSError."""
        return max(0.0, time.time() - self.path(number).stat().st_mtime)

    def claim(self, number: int, *, name: str, address: str, cluster: str = "") -> Term | None:
        """The term, if nobody else has it or a later one. Those before are over. OSError: it may have been made."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = Term(number, name, address, cluster)
        partial = self._folder / f".{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(_encoded(own) + b" " * _HALF)
                os.fsync(stream.fileno())
            os.link(partial, self.path(number))
        except (FileExistsError, FileNotFoundError):  # another one was quicker, and has cleaned up
            return None
        finally:
            partial.unlink(missing_ok=True)
        others = [other for other in self._numbers() if other != number]
        if any(other > number for other in others):
            # This one was over, and its file removed, while this machine stood still.
            self.path(number).unlink(missing_ok=True)
            return None
        for other in others:
            with suppress(FileNotFoundError):
                if other < number - _KEPT:
                    self.path(other).unlink()
                else:
                    self._write(other, f"{name} has term {number}".encode()[:_HALF], offset=_HALF)
        for left in self._folder.glob(".*"):
            left.unlink(missing_ok=True)  # of a claimer that was killed, or that is too late
        return own

    def beat(self, term: Term) -> Term:
        """TermTaken. OSError: whether others see the beat is not known."""
        if after := self.path(term.number).read_bytes()[_HALF:].strip():
            raise TermTaken(f"term {term.number} is over: {after.decode(errors='replace')}")
        if (newest := max(self._numbers(), default=0)) > term.number:
            raise TermTaken(f"term {term.number} is over: term {newest} has begun")
        now = replace(term, beat=term.beat + 1)
        self._write(term.number, _encoded(now))
        return now

    def end(self, term: Term) -> None:
        """Others need not wait any more. OSError."""
        self._write(term.number, _encoded(replace(term, has_ended=True)))

    def _numbers(self) -> list[int]:
        with suppress(FileNotFoundError):
            return [int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()]
        return []

    def _read(self, number: int) -> Term:
        text = self.path(number).read_bytes()
        try:
            fields = typed(dict, parse_json(text[:_HALF]), "a term")
            return Term(
                number,
                typed(str, fields["name"], "name"),
                typed(str, fields["address"], "address"),
                typed(str, fields.get("cluster", ""), "cluster"),
                beat=whole_number(fields["beat"], "beat"),
                has_ended=typed(bool, fields["has_ended"], "has_ended"),
            )
        except (ValueError, KeyError):
            return Term(number, "unknown", "unknown")

    def _write(self, number: int, data: bytes, *, offset: int = 0) -> None:
        # O_DSYNC: else a client of NFS may write all of a page, with what the other half was when it read it.
        fd = os.open(self.path(number), os.O_WRONLY | os.O_CLOEXEC | os.O_DSYNC)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)


def _encoded(term: Term) -> bytes:
    fields = asdict(term)
    del fields["number"]
    return json.dumps(fields).encode().ljust(_HALF)
