"""Who holds a lock, and who only looks at it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tidegate.launcher.lock import held, held_by, job_lock


def test_nobody_is_refused_because_another_one_looks_at_it_all_the_time(tmp_path: Path) -> None:
    path, is_over = tmp_path / "lock", threading.Event()
    path.touch()

    def look() -> None:
        while not is_over.is_set():
            held_by(path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(2000):
            with held(path, lambda pid: RuntimeError(f"held by {pid}")):
                pass
            with job_lock(path) as is_free:
                assert is_free
    finally:
        is_over.set()
        looking.join()


def test_who_holds_it_refuses_others(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path, RuntimeError):
        with pytest.raises(RuntimeError, match="unknown"), held(path, RuntimeError):
            pass
        with job_lock(path) as is_free:
            assert not is_free
        assert held_by(path) == "unknown"
    assert held_by(path) is None
