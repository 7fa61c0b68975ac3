"""The terms of a cluster's keepers, in files that several machines share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate.cluster.keepers import Keepers, Term, TermTaken


def claim(keepers: Keepers, number: int, name: str = "a") -> Term:
    found = keepers.claim(number, name=name, address="10.0.0.7")
    assert found is not None
    return found


def test_one_of_many_machines_has_a_term(tmp_path: Path) -> None:
    def race(name: str) -> Term | None:
        return Keepers(tmp_path).claim(1, name=name, address="10.0.0.7")

    names = [f"m{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as pool:
        (won,) = [each for each in pool.map(race, names) if each is not None]
    assert Keepers(tmp_path).newest() == won
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]


def test_beats_and_an_end_are_seen(tmp_path: Path) -> None:
    mine, other = Keepers(tmp_path), Keepers(tmp_path)
    assert other.newest() is None
    term = claim(mine, 1)
    for number in range(1, 4):
        term = mine.beat(term)
        assert other.newest() == Term(1, "a", "10.0.0.7", beat=number)
    mine.end(term)
    found = other.newest()
    assert found is not None
    assert found.has_ended


def test_a_keeper_whose_term_was_taken_is_told_so_at_its_next_beat(tmp_path: Path) -> None:
    mine = Keepers(tmp_path)
    term = mine.beat(claim(mine, 1))
    claim(Keepers(tmp_path), 2, "b")
    with pytest.raises(TermTaken, match="term 1 is over: b has term 2"):
        mine.beat(term)
    # Also where a beat was under way.
    mine._write(1, b"{}".ljust(512))
    with pytest.raises(TermTaken):
        mine.beat(term)


def test_a_keeper_is_told_of_a_later_term_where_the_next_one_could_not_tell(tmp_path: Path) -> None:
    mine = Keepers(tmp_path)
    term = claim(mine, 1)
    claim(mine, 2, "b")
    mine._write(1, b" " * 512, offset=512)
    with pytest.raises(TermTaken, match="term 2 has begun"):
        mine.beat(term)
    mine.path(2).unlink()
    claim(mine, 3, "c")
    with pytest.raises(TermTaken, match="c has term 3"):
        mine.beat(term)


def test_numbers_only_grow_while_old_files_go(tmp_path: Path) -> None:
    keepers = Keepers(tmp_path)
    (tmp_path / ".left").touch()
    for number in range(1, 30):
        claim(keepers, number)
        assert keepers.claim(number, name="b", address="10.0.0.8") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{number}.json" for number in range(9, 30))
    found = keepers.newest(least=29)
    assert found is not None
    assert found.number == 29


def test_a_term_whose_file_was_removed_is_not_claimed_again(tmp_path: Path) -> None:
    keepers = Keepers(tmp_path)
    for number in range(1, 30):
        claim(keepers, number)
    assert keepers.claim(2, name="b", address="10.0.0.8") is None
    assert not keepers.path(2).exists()
    assert keepers.newest() == Term(29, "a", "10.0.0.7")


def test_a_file_that_is_being_written_is_a_beat(tmp_path: Path) -> None:
    keepers = Keepers(tmp_path)
    claim(keepers, 1)
    keepers.path(1).write_bytes(b'{"name": "a')
    assert keepers.newest() == Term(1, "unknown", "unknown")
