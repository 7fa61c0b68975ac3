"""A machine waits for its turn to keep a cluster, and ends itself where it cannot keep it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.node.keeping import claimed
from tidegate.cluster.keepers import SILENT_S, Keepers, Term

LOOK_S = 0.01


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def waiting(keepers: Keepers, clock: Clock, name: str = "b") -> tuple[asyncio.Task[Term], list[Term]]:
    """A machine that waits, once it has seen who keeps the cluster."""
    seen: list[Term] = []
    has_seen = asyncio.Event()

    def waits_for(other: Term) -> None:
        seen.append(other)
        has_seen.set()

    claiming = claimed(keepers, name=name, address="10.0.0.8", waits_for=waits_for, now_s=clock, look_s=LOOK_S)
    task = asyncio.create_task(claiming)
    looking = asyncio.create_task(has_seen.wait())
    await asyncio.wait({task, looking}, return_when=asyncio.FIRST_COMPLETED)
    looking.cancel()
    return task, seen


async def is_still_waiting(task: asyncio.Task[Term]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=20 * LOOK_S)
    return not done


async def test_a_machine_waits_until_the_keeper_is_silent(tmp_path: Path) -> None:
    keepers, clock = Keepers(tmp_path), Clock()
    term = keepers.claim(1, name="a", address="10.0.0.7")
    assert term is not None
    task, seen = await waiting(Keepers(tmp_path), clock)
    for _ in range(3):
        clock.now_s += 0.9 * SILENT_S
        assert await is_still_waiting(task)
        term = keepers.beat(term)
        assert await is_still_waiting(task)
    assert [each.name for each in seen] == ["a"]
    clock.now_s += SILENT_S
    assert (await asyncio.wait_for(task, 5)).number == 2


async def test_a_machine_waits_until_the_keeper_has_ended(tmp_path: Path) -> None:
    keepers, clock = Keepers(tmp_path), Clock()
    term = keepers.claim(4, name="a", address="10.0.0.7")
    assert term is not None
    task, _ = await waiting(Keepers(tmp_path), clock)
    keepers.end(term)
    assert (await asyncio.wait_for(task, 5)).number == 5


async def test_a_machine_does_not_wait_for_itself_nor_for_nobody(tmp_path: Path) -> None:
    for want in (1, 2):
        task, seen = await waiting(Keepers(tmp_path), Clock(), "a")
        assert (await asyncio.wait_for(task, 5)).number == want
        assert [each.name for each in seen] == ["a"] * (want - 1)


async def test_of_two_that_wait_one_begins_and_the_other_waits_for_it(tmp_path: Path) -> None:
    keepers, clock = Keepers(tmp_path), Clock()
    assert keepers.claim(1, name="a", address="10.0.0.7")
    tasks = [(await waiting(Keepers(tmp_path), clock, name))[0] for name in ("b", "c")]
    clock.now_s += SILENT_S
    done, waits = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    (other,) = waits
    assert await is_still_waiting(other)
    other.cancel()


KEEPER = """
import os, sys, time
from pathlib import Path
from services.node.keeping import Beats
from tidegate.cluster.keepers import Keepers
keepers = Keepers(Path(sys.argv[1]))
beats = Beats(keepers, keepers.claim(1, name="a", address="10.0.0.7"), beat_s=0.05, lost_s=0.5)
print("keeps", flush=True)
if sys.argv[2] == "ends":
    time.sleep(1)
    beats.end()
else:
    time.sleep(60)
"""


def keeper(folder: Path, what: str = "stays") -> subprocess.Popen[bytes]:
    found = subprocess.Popen([sys.executable, "-c", KEEPER, str(folder), what], stdout=subprocess.PIPE)
    assert found.stdout is not None
    assert found.stdout.readline() == b"keeps\n"
    return found


def until_beaten(folder: Path) -> None:
    before = Keepers(folder).newest()
    while Keepers(folder).newest() == before:
        time.sleep(0.01)


@pytest.mark.timeout(60)
def test_a_keeper_that_cannot_write_its_beats_is_dead_soon(tmp_path: Path) -> None:
    with keeper(tmp_path / "keepers") as running:
        until_beaten(tmp_path / "keepers")
        (tmp_path / "keepers").rename(tmp_path / "away")
        assert running.wait() == -signal.SIGALRM


@pytest.mark.timeout(60)
def test_a_keeper_whose_term_was_taken_is_dead_at_its_next_beat(tmp_path: Path) -> None:
    with keeper(tmp_path) as running:
        until_beaten(tmp_path)
        assert Keepers(tmp_path).claim(2, name="b", address="10.0.0.8")
        assert running.wait() == -signal.SIGKILL


@pytest.mark.timeout(60)
def test_a_keeper_that_ends_in_order_says_so(tmp_path: Path) -> None:
    with keeper(tmp_path, "ends") as running:
        assert running.wait() == 0
    found = Keepers(tmp_path).newest()
    assert found is not None
    assert found.has_ended
