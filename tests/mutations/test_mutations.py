"""The tests notice each known mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_mutation_is_noticed() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mutations"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert "NOT NOTICED" not in ran.stdout
