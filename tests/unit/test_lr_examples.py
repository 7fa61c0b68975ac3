"""The examples of learning-rate progress are short, quiet, and do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAST_LINES = {
    "lr_torch.py": "24 of 24 steps, next rate 0.0",
    "lr_megatron.py": "30 updates, 40 steps, next rate 3.000e-05",
}


@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_has_fewer_than_30_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 30


@pytest.mark.long
@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_ends_its_budget_exactly_and_says_nothing_else(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / name], capture_output=True, text=True, timeout=110, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[-1].endswith(LAST_LINES[name])
