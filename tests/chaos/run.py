"""One run of the driver: starts the job, lets the faults strike, resumes what stopped, and collects what is to judge.

Order:
1. file systems of their own for the folders that get full;
2. the stores, where the job has some of the driver's own;
3. the job; beside it one task for each fault, which waits for its moment over all starts of the job, and one that drops
   dead letters, as a person would;
4. where a start ends without having finished, `--resume` once no fault is in force any more;
5. after the end, everything that the oracles ask for.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.collected import Attempt, Collected, Span, Strike
from tests.chaos.disks import mounted
from tests.chaos.plan import Plan, Planned
from tests.chaos.record import Row
from tests.chaos.stores import opened
from tests.chaos.watch import Watch, left_behind
from tests.chaos.world import BadAnswer, NotThere, RunOver, World
from tests.e2e.jobs import RunningJob

MOST_SECONDS = 300.0
"""A start takes some 40 s alone, and twice that beside another."""
_HOPELESS_S = 120.0
"""A run that does nothing for so long outside of faults is ended as hung."""
_SEARCH_S = 5.0
"""How long a fault looks for what it is to strike, once its moment has come."""
_AGAIN_S = 0.1
_LETTERS_S = 2.0
_BEAT_S = 0.5
_END_S = 30.0


@dataclass
class Driver:
    """A job and the faults of its plan."""

    plan: Plan
    world: World
    watch: Watch
    strikes: list[Strike] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    in_force: dict[int, float] = field(default_factory=dict)
    """The begin of each fault that strikes now, by its place in the plan."""
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no fault strikes."""

    def __post_init__(self) -> None:
        self.quiet.set()

    async def to_its_end(self) -> list[Attempt]:
        attempts: list[Attempt] = []
        faults = [asyncio.create_task(self._strike(place, each)) for place, each in enumerate(self.plan.faults)]
        beside = [asyncio.create_task(self.watch.look_on()), asyncio.create_task(self._drop_dead_letters())]
        try:
            while len(attempts) <= self.plan.most_stops + 1:
                attempts.append(await self._attempt(len(attempts)))
                if attempts[-1].end == "finished" or attempts[-1].is_hung:
                    break
                await self.quiet.wait()
                if attempts[-1].options and attempts[-1].exit_code > 0 and self.world.remedies:
                    for remedy in self.world.remedies:
                        remedy()
                    self.world.remedies.clear()
            self.world.is_over = True
            return attempts
        finally:
            for task in (*faults, *beside):
                task.cancel()
            ended = await asyncio.gather(*faults, *beside, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error

    async def _drop_dead_letters(self) -> None:
        """What a person does who sees the job paused."""
        dropped: set[str] = set()
        while True:
            for row in self.world.events.rows:
                if "dead_lettered" not in row or row["id"] in dropped:
                    continue
                letter = str(row["dead_lettered"]["dead_letter"])
                code, _ = await self.world.command("deadletter", "drop", self.world.name, letter)
                if code == 0:
                    dropped.add(row["id"])
            await asyncio.sleep(_LETTERS_S)

    async def _attempt(self, number: int) -> Attempt:
        options = ("--resume",) if number else ()
        begin_s = time.monotonic()
        job = await self.world.start(*options)
        is_hung = False
        while job.process.returncode is None and not is_hung:
            with suppress(TimeoutError):
                await asyncio.wait_for(job.process.wait(), _BEAT_S)
            is_hung = self._is_hung(begin_s)
        if job.process.returncode is None:
            await self._end_by_force(job)
        assert job.process.returncode is not None
        end_s = time.monotonic()
        self.watch.look()
        attempt = Attempt(
            options=options,
            begin_s=begin_s,
            end_s=end_s,
            exit_code=job.process.returncode,
            end=self._end() if job.process.returncode >= 0 else None,
            said=await self._said(number),
            is_hung=is_hung,
        )
        left = await asyncio.to_thread(left_behind, self.world, self.watch.known, attempt)
        self.watch.known.clear()
        self.world.rest()
        return replace(attempt, left_behind=tuple(left))

    async def _said(self, number: int) -> str:
        said = await self.world.said()
        (self.world.folder / f"run{number}.out").write_text(said)
        return said

    def _is_hung(self, begin_s: float) -> bool:
        now = time.monotonic()
        ends = [each.end_s for each in self.strikes]
        last_s = max([begin_s, *self.watch.progress_s[-1:], *ends])
        return not self.in_force and (now - last_s > _HOPELESS_S or now - begin_s > MOST_SECONDS)

    async def _end_by_force(self, job: RunningJob) -> None:
        """Notes what the job says of itself, and ends it."""
        _, text = await self.world.command("describe", self.world.name)
        (self.world.folder / "hung.txt").write_text(text)
        await _ended(job.process)

    def _end(self) -> str | None:
        with suppress(FileNotFoundError, ValueError):
            return str(json.loads((self.world.root / "result.json").read_text())["end"])
        return None

    async def _strike(self, place: int, planned: Planned) -> None:
        try:
            await self.world.until(planned.moment)
            self.strikes.append(await self._inflict(place, planned))
        except RunOver:
            self.missed.append(f"{planned.fault.kind}: the job had finished before")
        except NotThere as error:
            self.missed.append(f"{planned.fault.kind}: {error}")

    async def _inflict(self, place: int, planned: Planned) -> Strike:
        fault = planned.fault
        given_up_s = time.monotonic() + _SEARCH_S
        while True:
            self.in_force[place] = begin_s = time.monotonic()
            self.quiet.clear()
            did, wrong = "", ""
            try:
                try:
                    did = await fault.inflict(self.world)
                except BadAnswer as error:
                    wrong = str(error)
                end_s = time.monotonic()
                may_refuse = fault.may_refuse_in(self.world)
                return Strike(fault.kind, begin_s, end_s, fault.may_stop, did, may_refuse, wrong)
            except NotThere:
                if self.world.is_over:
                    raise RunOver from None
                if time.monotonic() > given_up_s:
                    raise
            finally:
                del self.in_force[place]
                if not self.in_force:
                    self.quiet.set()
            await asyncio.sleep(_AGAIN_S)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run with what was done to it, for the log."""

    collected: Collected
    missed: tuple[str, ...]
    seconds: float

    def record(self) -> dict[str, Any]:
        first_s = self.collected.attempts[0].begin_s
        return {
            "strikes": [
                {
                    "kind": each.fault,
                    "at_s": round(each.begin_s - first_s, 1),
                    "seconds": round(each.end_s - each.begin_s, 1),
                    "did": each.did,
                }
                for each in self.collected.strikes
            ],
            "missed": list(self.missed),
            "starts": [
                {
                    "at_s": round(each.begin_s - first_s, 1),
                    "seconds": round(each.end_s - each.begin_s, 1),
                    "exit_code": each.exit_code,
                    "end": each.end,
                    "last_words": each.said.strip().split("\n")[-1][:300],
                }
                for each in self.collected.attempts
            ],
            "seconds": round(self.seconds, 1),
        }


async def run(plan: Plan, folder: Path, *, name: str, reference: str | None) -> Outcome:
    """Runs the plan in an empty folder. `name` is the job's; no other job of this machine has it."""
    begin_s = time.monotonic()
    disks = [each.fault.own_disk(folder, name) for each in plan.faults]
    async with AsyncExitStack() as stack:
        stack.enter_context(mounted(filter(None, disks)))
        stores = await stack.enter_async_context(opened(folder / "stores")) if plan.variant.has_own_servers else None
        world = World(plan.variant, name, folder, stores)
        async with _driver(plan, world) as driver:
            attempts = await driver.to_its_end()
    collected = Collected(
        training=plan.variant.training,
        reference=reference,
        attempts=attempts,
        strikes=driver.strikes,
        journal=list(_rows(world.root / "journal.jsonl")),
        events=world.events.rows,
        result=_loaded(world.root / "result.json"),
        sightings=driver.watch.sightings,
        progress_s=driver.watch.progress_s,
        spans=list(spans_of(world.root)),
        may_lose_records=plan.may_lose_records,
    )
    return Outcome(collected, tuple(driver.missed), time.monotonic() - begin_s)


@asynccontextmanager
async def _driver(plan: Plan, world: World) -> AsyncIterator[Driver]:
    """Leaves no process of the job behind, whatever becomes of the driver."""
    watch = Watch(world)
    try:
        yield Driver(plan, world, watch)
    finally:
        if world.job is not None:
            await _ended(world.job.process)


async def _ended(launcher: asyncio.subprocess.Process) -> None:
    """Ends a run in order, so that it leaves nothing in host memory, and by force where it does not end."""
    if launcher.returncode is None:
        launcher.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(launcher.wait(), _END_S)
    if launcher.returncode is None:
        launcher.kill()
        await launcher.wait()


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines. A line that a kill cut off is none."""
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _loaded(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return None


def spans_of(root: Path) -> Iterator[Span]:
    """What the GPUs of a job did, by its folder."""
    for path in sorted(root.glob("attempts/*/timeline/*.jsonl")):
        role = path.stem.partition("@")[0]
        for row in _rows(path):
            if "start_ns" in row and "end_ns" in row:
                yield Span(row["gpu"], role, row["start_ns"], row["end_ns"], row["state"])
