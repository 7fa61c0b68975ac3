"""`tidegate simulate --staleness`: the table, the value, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cli.__main__ import main
from tests.unit.simulator.async_scenarios import RAW


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "async.yaml"
    path.write_text(yaml.safe_dump(RAW))
    return str(path)


def test_the_value_has_the_figures_of_the_table(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", scenario, "--staleness", "1", "--iterations", "4"]
    assert main([*words, "-o", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [row["policy"] for row in value["policies"]] == ["split", "best_split", "tide"]
    for row, line in zip(value["policies"], lines[1:], strict=False):
        name, seconds, speedup, *_ = line.split()
        assert (name, float(seconds)) == (row["policy"], round(row["total_s"], 1))
        assert speedup == f"{row['speedup']:.3f}"
        assert len(row["iteration_s"]) == 4
        assert row["staleness_max"] <= 1
    assert "async: 4 iterations, staleness at most 1, ends_old" in lines
    assert value["policies"][1]["speedup"] >= 1.0


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--staleness", "-1"], "--staleness -1 is outside 0 to 1000 iterations: give 0 for a strict training"),
        (["--staleness", "1001"], "--staleness 1001 is outside 0 to 1000 iterations: give 0 for a strict training"),
        (["--staleness", "1", "--compare", "rlinf,tide"], "rlinf has no asynchronous training"),
        (["--staleness", "1", "-o", "html"], "-o html shows one iteration"),
        (["--staleness", "1", "cluster.placement.actor=''"], "cluster.placement.actor has no GPUs"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    scenario: str, capsys: pytest.CaptureFixture[str], words: list[str], want: str
) -> None:
    assert main(["simulate", scenario, *words]) == 2
    said = capsys.readouterr()
    assert want in said.err
    assert said.out == ""
