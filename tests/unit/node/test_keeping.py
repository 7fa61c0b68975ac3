"""A machine waits for its turn to keep a cluster, and ends itself where it cannot keep it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.node.keeping import OtherCluster, claimed
from tidegate.cluster.keepers import SILENT_S, Keepers, Term

LOOK_S = 0.01


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Machine:
    """One that waits, and what it says."""

    keepers: Keepers
    clock: Clock = field(default_factory=Clock)
    name: str = "b"
    cluster: str = ""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    said: list[str] = field(default_factory=list)
    has_said: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn(self) -> Term | None:
        where = {"name": self.name, "address": "10.0.0.8", "cluster": self.cluster}
        return await claimed(self.keepers, self.stopping, **where, says=self._says, now_s=self.clock, look_s=LOOK_S)

    async def waiting(self) -> asyncio.Task[Term | None]:
        """Once it has said what it waits for, or has its turn."""
        task = asyncio.create_task(self.turn())
        said = asyncio.create_task(self.has_said.wait())
        await asyncio.wait({task, said}, return_when=asyncio.FIRST_COMPLETED)
        said.cancel()
        return task

    def _says(self, what: str) -> None:
        self.said.append(what)
        self.has_said.set()


async def number_of(task: asyncio.Task[Term | None]) -> int:
    term = await asyncio.wait_for(task, 60)
    assert term is not None
    return term.number


async def is_still_waiting(task: asyncio.Task[Term | None]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=20 * LOOK_S)
    return not done


async def test_a_machine_waits_until_the_keeper_is_silent(tmp_path: Path) -> None:
    keepers, machine = Keepers(tmp_path), Machine(Keepers(tmp_path))
    term = keepers.claim(1, name="a", address="10.0.0.7")
    assert term is not None
    task = await machine.waiting()
    for _ in range(3):
        machine.clock.now_s += 0.9 * SILENT_S
        assert await is_still_waiting(task)
        term = keepers.beat(term)
        assert await is_still_waiting(task)
    assert machine.said == ["a (10.0.0.7) keeps the cluster, in term 1; b stands by"]
    machine.clock.now_s += SILENT_S
    assert await number_of(task) == 2


async def test_a_machine_waits_until_the_keeper_has_ended(tmp_path: Path) -> None:
    keepers, machine = Keepers(tmp_path), Machine(Keepers(tmp_path))
    term = keepers.claim(4, name="a", address="10.0.0.7")
    assert term is not None
    task = await machine.waiting()
    keepers.end(term)
    assert await number_of(task) == 5


async def test_a_machine_does_not_wait_for_itself_nor_for_nobody(tmp_path: Path) -> None:
    for want in (1, 2):
        machine = Machine(Keepers(tmp_path), name="a")
        assert await number_of(await machine.waiting()) == want
        assert not machine.said


async def test_of_two_that_wait_one_begins_and_the_other_waits_for_it(tmp_path: Path) -> None:
    clock = Clock()
    assert Keepers(tmp_path).claim(1, name="a", address="10.0.0.7")
    tasks = [await Machine(Keepers(tmp_path), clock, name).waiting() for name in ("b", "c")]
    clock.now_s += SILENT_S
    done, waits = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    (other,) = waits
    assert await is_still_waiting(other)
    other.cancel()


async def test_a_machine_of_other_nodes_does_not_wait_for_its_turn(tmp_path: Path) -> None:
    keepers, machine = Keepers(tmp_path), Machine(Keepers(tmp_path), cluster="n0=4")
    term = keepers.claim(1, name="a", address="10.0.0.7", cluster="n0=8")
    assert term is not None
    task = await machine.waiting()
    assert await is_still_waiting(task), "whether the keeper lives is not known"
    keepers.beat(term)
    with pytest.raises(OtherCluster, match="a keeps the cluster with other nodes or machines than b"):
        await asyncio.wait_for(task, 60)


async def test_a_machine_of_other_nodes_begins_after_one_that_ended(tmp_path: Path) -> None:
    keepers, machine = Keepers(tmp_path), Machine(Keepers(tmp_path), cluster="n0=4")
    term = keepers.claim(1, name="a", address="10.0.0.7", cluster="n0=8")
    assert term is not None
    task = await machine.waiting()
    keepers.end(term)
    assert await number_of(task) == 2
    assert await number_of(await Machine(Keepers(tmp_path), cluster="n0=2").waiting()) == 3, "it was itself"


async def test_a_machine_that_is_asked_to_end_leaves_no_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = Keepers(tmp_path)
    assert keepers.claim(1, name="a", address="10.0.0.7")
    machine = Machine(Keepers(tmp_path))
    task = await machine.waiting()
    machine.stopping.set()
    assert await asyncio.wait_for(task, 60) is None

    # Also while it claims one.
    late = Machine(keepers, name="a")
    claim = keepers.claim

    def slowly(number: int, **who: str) -> Term | None:
        late.stopping.set()
        return claim(number, **who)

    monkeypatch.setattr(keepers, "claim", slowly)
    assert await asyncio.wait_for(late.turn(), 60) is None
    found = keepers.newest()
    assert found is not None
    assert (found.number, found.has_ended) == (2, True)


async def test_a_storage_that_does_not_answer_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "keepers").write_bytes(b"no folder")
    machine = Machine(Keepers(tmp_path / "keepers"))
    task = await machine.waiting()
    assert await is_still_waiting(task)
    (said,) = machine.said
    assert "whose turn it is cannot be told: " in said
    (tmp_path / "keepers").unlink()
    assert await number_of(task) == 1


KEEPER = """
import os, sys, time
from pathlib import Path
from services.node.keeping import Beats
from tidegate.cluster.keepers import Keepers
keepers = Keepers(Path(sys.argv[1]))
term = keepers.claim(1, name="a", address="10.0.0.7")
if sys.argv[2] == "late":
    keepers.claim(2, name="b", address="10.0.0.8")
beats = Beats(keepers, term, beat_s=0.05, lost_s=float(sys.argv[3]))
print("keeps", flush=True)
if sys.argv[2] == "ends":
    time.sleep(1)
    beats.end()
else:
    time.sleep(60)
"""


def keeper(folder: Path, what: str = "stays", *, lost_s: float = 60.0) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", KEEPER, str(folder), what, str(lost_s)]
    found = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert found.stdout is not None
    assert found.stdout.readline() == b"keeps\n"
    return found


def until_beaten(folder: Path) -> None:
    before = Keepers(folder).newest()
    while Keepers(folder).newest() == before:
        time.sleep(0.01)


@pytest.mark.timeout(60)
def test_a_keeper_that_cannot_write_its_beats_is_dead_soon(tmp_path: Path) -> None:
    with keeper(tmp_path / "keepers", lost_s=4.0) as running:
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


@pytest.mark.timeout(60)
def test_a_keeper_whose_claim_took_too_long_does_not_begin(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEPER, str(tmp_path), "late", "60"]
    late = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (late.returncode, late.stdout) == (1, "")
    assert "TermTaken: term 1 is over: b has term 2" in late.stderr
