"""Files of a job that are damaged between a run's end and its resume: torn, cut or with a flipped bit.

What a resume has to do depends on the file:

- it heals: the resume goes on at the first try. Logs, the record of the last end, an endpoint that a kill left, a line
  that a kill tore, and a checkpoint beside which there is a sound one.
- it heals or is refused: the resume goes on, or ends with one message. Then the driver does what a person would: it
  puts the file back, or removes the embedded servers' data.

Left out: a flipped bit in `journal.jsonl`, which nothing repeats, and in a gate's record, which nobody may pass then.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from tests.chaos.faults.fault import Fault
from tests.chaos.variants import Variant
from tests.chaos.world import World

TORN, CUT, FLIPPED, FOREIGN = "torn", "cut", "flipped", "foreign"
_HEALS: dict[str, tuple[str, ...]] = {
    "checkpoints/inc*/rank*.safetensors": (CUT, FLIPPED),
    "checkpoints/inc*/manifest.json": (CUT, FLIPPED),
    "events.jsonl": (TORN, CUT, FLIPPED),
    "moves.jsonl": (TORN, CUT, FLIPPED),
    "journal.jsonl": (TORN,),
    "result.json": (CUT, FLIPPED),
    "endpoint.json": (FOREIGN,),
}
_MAY_REFUSE: dict[str, tuple[str, ...]] = {
    "config.json": (CUT, FLIPPED),
    "launcher.lock": (CUT, FLIPPED),
    "tokenizer.json": (CUT, FLIPPED),
}
_HEALS_TOO = {("config.json", CUT), ("tokenizer.json", CUT), ("tokenizer.json", FLIPPED)}
"""They stay in their table, so that a seed draws what it drew before they healed."""
_OF_SERVERS: dict[str, tuple[str, ...]] = {
    "servers/nats/**/*.blk": (CUT, FLIPPED),
    "servers/nats/**/*.inf": (CUT, FLIPPED),
    "servers/valkey/**/*.aof": (CUT, FLIPPED),
}
_TORN_LINE = b'{"half": "a li'


@dataclass(frozen=True, slots=True)
class Damage(Fault):
    """The launcher gets a signal; then the newest file of the pattern is damaged. `place`: where in it, from 0 to 1."""

    weight: ClassVar[int] = 4
    number: int
    pattern: str
    how: str
    place: float

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        tables = [_HEALS, _HEALS, _MAY_REFUSE, *([] if variant.has_own_servers else [_OF_SERVERS])]
        table = rng.choice(tables)
        pattern = rng.choice(list(table))
        number = int(rng.choice([signal.SIGINT, signal.SIGKILL]))
        return cls(number, pattern, rng.choice(table[pattern]), round(rng.random(), 4))

    @property
    def may_stop(self) -> bool:
        return True

    @property
    def may_refuse(self) -> bool:
        # A checkpoint may be the only one.
        heals = self.pattern in _HEALS or (self.pattern, self.how) in _HEALS_TOO
        return not heals or self._is_of_checkpoint

    def may_refuse_in(self, world: World) -> bool:
        if not self._is_of_checkpoint:
            return self.may_refuse
        return _is_without_sound_checkpoint(world.root, world.damaged)

    @property
    def _is_of_checkpoint(self) -> bool:
        return self.pattern.startswith("checkpoints")

    @property
    def loses_records(self) -> bool:
        return self.pattern in _OF_SERVERS

    async def inflict(self, world: World) -> str:
        stopped = await world.stop(signal.Signals(self.number))
        found = sorted(world.root.glob(self.pattern))
        path = found[-1] if found else None
        if path is None and self.how == FOREIGN:
            path = world.root / self.pattern
        if path is None:
            return f"{stopped}; there is no {self.pattern}"
        world.remedies.append(_Remedy(path, path.read_bytes() if path.exists() else None, world.root))
        world.damaged.add(path)
        _damage(path, self.how, self.place)
        return f"{stopped}; {path.relative_to(world.root)} is {self.how} at {self.place:g}"


@dataclass(frozen=True, slots=True)
class _Remedy:
    path: Path
    content: bytes | None
    root: Path

    def __call__(self) -> None:
        servers = self.root / "servers"
        if self.path.is_relative_to(servers):
            shutil.rmtree(servers, ignore_errors=True)
        elif self.content is not None:
            # A resume may have set the damaged checkpoint aside.
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_bytes(self.content)


def _is_without_sound_checkpoint(root: Path, damaged: Collection[Path]) -> bool:
    """Whether no checkpoint is whole of which no file was ever damaged, and one was damaged. A resume may have removed
    or set aside the damaged ones since."""
    struck = {path.parent for path in damaged if path.is_relative_to(root / "checkpoints")}
    whole = {path.parent for path in root.glob("checkpoints/inc*-it*/manifest.json")}
    return bool(struck) and not whole - struck


def _damage(path: Path, how: str, place: float) -> None:
    content = bytearray(path.read_bytes()) if path.exists() else bytearray()
    at = min(int(place * len(content)), max(len(content) - 1, 0))
    if how == TORN:
        content += _TORN_LINE
    elif how == CUT:
        del content[at:]
    elif how == FOREIGN:
        content = bytearray(b'{"control": "127.0.0.1:1"}')
    elif content:
        content[at] ^= 1 << (at % 8)
    path.write_bytes(content)
