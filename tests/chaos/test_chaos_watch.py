"""What the driver sees from outside of a gate that is really used."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.watch import tokens_of
from tidegate.gate import Gate
from tidegate.types import GpuId, Grant, Token


def test_the_highest_token_that_passed_a_gate_is_seen(tmp_path: Path) -> None:
    gate, gpu = Gate(tmp_path / "n0" / "gate"), GpuId("n0/3")
    for counter in (1, 7):
        gate.acquire(Grant(gpu, Token(2, counter))).close()
        assert dict(tokens_of(tmp_path)) == {gpu: (2, counter)}
