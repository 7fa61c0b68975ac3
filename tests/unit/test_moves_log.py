"""The log of decisions and moves: bounded, whole lines, whoever writes and whoever is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidegate.moves_log import MovesLog, read_moves


def line(number: int) -> dict[str, object]:
    return {"kind": "step", "at_ms": number, "text": "x" * 50}


def numbers(path: Path) -> list[int]:
    return [each["at_ms"] for each in read_moves(path)]


def test_lines_come_back_in_order_and_a_job_without_any_has_none(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"
    assert numbers(path) == []
    MovesLog(path).append([line(1), line(2)])
    MovesLog(path).append([])
    MovesLog(path).append([line(3)])
    assert numbers(path) == [1, 2, 3]


def test_an_older_file_goes_so_that_two_files_of_the_most_bytes_stay(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"
    log = MovesLog(path, max_bytes=1000)
    for number in range(200):
        log.append([line(number)])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * 1100
    kept = numbers(path)
    assert kept == list(range(kept[0], 200))
    assert len(kept) >= 10


def test_lines_of_two_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"

    def write(first: int) -> None:
        log = MovesLog(path, max_bytes=5000)
        for number in range(100):
            log.append([line(first + number)])

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, (0, 1000)))
    texts = [text for file in tmp_path.iterdir() for text in file.read_text().splitlines()]
    assert len(texts) == len(numbers(path))


def test_a_line_cut_off_is_skipped_and_goes_when_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"
    MovesLog(path).append([line(1)])
    with path.open("a") as file:
        file.write('{"kind": "st')
    assert numbers(path) == [1]
    MovesLog(path).append([line(2)])
    assert numbers(path) == [1, 2]
    assert len(path.read_text().splitlines()) == 2
