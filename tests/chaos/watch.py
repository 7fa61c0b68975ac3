"""Looks at a running job from outside, again and again: its processes, which tokens passed the gates, what goes on.

The tokens are those of the gates' files, the progress that of the job's journal and events. No code of the gate or the
scheduler is used. Which process holds a GPU cannot be seen: the lock lies in the queue of its worker's socket, where no
list of open files shows it. Whose token passed last can be seen. What each component did, and when, is in the timeline.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote

import psutil

from tests.chaos.collected import Attempt, Sighting
from tests.chaos.record import Row
from tests.chaos.world import World

_BEAT_S = 0.3
_PROGRESS = ("progress", "iteration_reported", "checkpoint_saved", "weights_published", "weights_loaded")


@dataclass
class Watch:
    """What was seen of one job so far. `known`: every process that was ever seen below a launcher."""

    world: World
    sightings: list[Sighting] = field(default_factory=list)
    known: set[psutil.Process] = field(default_factory=set)
    progress_s: list[float] = field(default_factory=list)
    _marks: set[tuple[object, ...]] = field(default_factory=set)
    _num_rows: int = 0

    async def look_on(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_BEAT_S)

    def look(self) -> None:
        self.world.events.read()
        if self._has_progress():
            self.progress_s.append(time.monotonic())
        gates = self.world.root / "nodes"
        self._note_processes()
        begin_s, tokens, end_s = time.monotonic(), dict(tokens_of(gates)), time.monotonic()
        if self.sightings and self.sightings[-1].tokens == tokens:
            self.sightings[-1] = replace(self.sightings[-1], until_s=begin_s)
        else:
            self.sightings.append(Sighting(end_s, tokens, end_s))

    def _has_progress(self) -> bool:
        before = len(self._marks)
        rows = self.world.events.rows
        self._marks.update(mark for row in rows[self._num_rows :] if (mark := _mark(row)) is not None)
        self._num_rows = len(rows)
        with suppress(FileNotFoundError):
            self._marks.add(("journal", (self.world.root / "journal.jsonl").stat().st_size))
        return len(self._marks) > before

    def _note_processes(self) -> None:
        job = self.world.job
        if job is not None and job.process.returncode is None:
            with suppress(psutil.Error):
                self.known.update(job.processes())


_REFUSED = 2
"""The exit code of a start that changed nothing."""


def left_behind(world: World, known: set[psutil.Process], attempt: Attempt) -> list[str]:
    """Processes and files that a run should have removed. A killed launcher leaves files to the next start that is not
    refused."""
    _, alive = psutil.wait_procs(list(known), timeout=5)
    found = [f"process {each.pid} {' '.join(_command(each))[:120]}" for each in alive]
    found += [f"process {each.pid} {' '.join(_command(each))[:120]}" for each in _strays(world) if each not in alive]
    if attempt.exit_code >= 0 and attempt.exit_code != _REFUSED:
        files = [world.root / "endpoint.json", *_host_memory(world)]
        found += [f"file {path}" for path in files if path.exists()]
    return found


def _host_memory(world: World) -> list[Path]:
    with suppress(FileNotFoundError, ValueError, KeyError):
        return [Path(json.loads((world.root / "config.json").read_text())["runtime"]["host_memory_root"])]
    return []


def _strays(world: World) -> Iterator[psutil.Process]:
    """Processes of the job, by what they were started with. The name of a driver's job is its own."""
    for process in psutil.process_iter():
        words = " ".join(_command(process))
        if f"tidegate: {world.name} " in words or str(world.root) in words:
            yield process


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _mark(row: Row) -> tuple[object, ...] | None:
    """What an event says of the job's progress. A repetition in the same incarnation is none."""
    kind = next((kind for kind in _PROGRESS if kind in row), None)
    if kind is None:
        return None
    told = row["progress"] if kind == "progress" else {}
    return kind, row.get("role"), row.get("incarnation"), row.get("iteration"), told.get("phase"), told.get("num_done")


def tokens_of(gates: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for path in sorted(gates.glob("*/gate/*.json")):
        # A file that is replaced at this moment is read at the next beat.
        with suppress(ValueError, KeyError, OSError):
            record = json.loads(path.read_text())
            yield unquote(path.stem), (int(record["term"]), int(record["counter"]))
