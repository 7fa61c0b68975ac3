"""The examples of learning-rate progress are short and quiet, and do what they claim."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def lines_of(name: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / name], capture_output=True, text=True, timeout=110, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


@pytest.mark.parametrize("name", ["lr_torch.py", "lr_megatron.py"])
def test_a_loop_with_a_ledger_has_fewer_than_30_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 30


def test_the_set_up_of_megatrons_example_is_any_scripts_and_knows_no_ledger() -> None:
    text = (EXAMPLES / "small_gpt.py").read_text()
    assert re.findall(r"tidegate\.\w+", text) == ["tidegate.elastic"]
    assert "param_scheduler" not in text


@pytest.mark.long
def test_a_torch_loop_ends_its_budget_exactly() -> None:
    assert lines_of("lr_torch.py")[-1].endswith("24 of 24 steps, next rate 0.0")


@pytest.mark.long
def test_megatrons_optimizer_has_the_ledgers_rate_at_each_update_and_moves_the_weights() -> None:
    *updates, last = lines_of("lr_megatron.py")
    assert last == "30 updates, 40 steps, next rate 1.000e-03"
    said = [re.fullmatch(r"([\d.]+) of 40 steps: rate ([\d.e-]+), loss ([\d.]+)", line) for line in updates]
    steps, rates, losses = zip(*(map(float, line.groups()) for line in said if line), strict=True)
    want_steps = [4 * (batch + consumed / 128) for batch in range(10) for consumed in (0, 50, 100)]
    assert list(steps) == want_steps
    want_rates = [1e-2 * at / 4 if at <= 4 else 1e-3 + 9e-3 * (40 - at) / 36 for at in want_steps]
    assert rates == pytest.approx(want_rates, rel=1e-12, abs=0)
    # A model that counts up knows the next token. A model whose weights stay guesses among 16.
    assert losses[0] == pytest.approx(math.log(16), abs=0.1)
    assert losses[-1] < 0.2
