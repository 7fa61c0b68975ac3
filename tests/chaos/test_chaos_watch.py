"""What the driver sees from outside of a gate that is really used."""

from __future__ import annotations

import os
from pathlib import Path

from tests.chaos.watch import held_by, tokens_of
from tidegate.gate import Gate
from tidegate.types import GpuId, Grant, Token

GPU = GpuId("n0/3")


def test_the_holder_of_a_gpu_is_seen_for_as_long_as_it_holds_it(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "n0" / "gate")
    hold = gate.acquire(Grant(GPU, Token(2, 7)))
    assert list(held_by(os.getpid(), tmp_path)) == [GPU]
    hold.close()
    assert list(held_by(os.getpid(), tmp_path)) == []


def test_a_gates_file_that_is_open_without_its_lock_is_no_hold(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "n0" / "gate")
    gate.acquire(Grant(GPU, Token(2, 7))).close()
    with (tmp_path / "n0" / "gate" / "n0%2F3.lock").open("rb"):
        assert list(held_by(os.getpid(), tmp_path)) == []


def test_the_highest_token_that_passed_is_seen(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "n0" / "gate")
    gate.acquire(Grant(GPU, Token(2, 7))).close()
    assert dict(tokens_of(tmp_path)) == {GPU: (2, 7)}
