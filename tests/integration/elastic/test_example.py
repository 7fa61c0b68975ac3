"""The example in the docs is short and quiet, and does what the docs say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "elastic_gpt.py"


def test_the_example_has_fewer_than_60_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_trains_through_three_resizes_as_in_one_layout_and_prints_nothing_else() -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=280, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    *resizes, summary = ran.stdout.splitlines()
    assert [line.split(",")[0] for line in resizes] == [
        "15: dp4 -> dp2",
        "30: dp2 -> pp2-dp2",
        "45: pp2-dp2 -> tp2-dp2",
    ]
    found = re.fullmatch(r"loss (\S+) -> (\S+); never further from the fixed run than (\S+)", summary)
    assert found is not None, summary
    first, last, apart = map(float, found.groups())
    assert (first > 4, last < 0.5, apart < 1e-6) == (True, True, True), summary
