"""`tidegate simulate --iterations`: the table and the value of a job, and the input that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.__main__ import main

SCENARIO = """\
name: small
cluster:
  nodes: {n0: 4, n1: 4}
  placement: {actor: 0-1, rollout: 2-5, inference: 6-7}
algorithm: {prompts_per_iteration: 8, group_size: 4, n_minibatches: 2}
lengths: {median_tokens: 400, max_tokens: 2000}
physics: {law: published_fit}
drift:
  mean_tokens: {0: 300, 3: 600}
  trained_share: {0: 1, 2: 0.5}
  epoch_prompts: 12
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    (path := tmp_path / "small.yaml").write_text(SCENARIO)
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_the_value_has_the_figures_of_the_table_and_a_row_for_each_iteration(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (scenario, "--iterations", "3", "--compare", "static,rlinf")
    head, static, rlinf, empty, line = printed(capsys, *words).splitlines()
    value = json.loads(printed(capsys, *words, "-o", "json"))
    assert head.split()[:3] == ["POLICY", "SECONDS", "SPEEDUP"]
    assert (empty, line.split(":")[0]) == ("", "small, seed 0")
    assert (value["num_iterations"], value["num_gpus"], value["compared_with"]) == (3, 8, "static")
    for cells, found in zip((static.split(), rlinf.split()), value["policies"], strict=True):
        assert (cells[0], cells[2]) == (found["policy"], f"{found['speedup']:.3f}")
        assert float(cells[1]) == round(found["total_s"], 1)
        rows = found["iterations"]
        assert [row["iteration"] for row in rows] == [0, 1, 2]
        assert sum(row["seconds"] for row in rows) == pytest.approx(found["total_s"], abs=0.01)
        assert [row["num_hinted"] for row in rows] == [0, 4, 8]
        assert [row["num_filtered"] for row in rows] == [0, 8, 16]
        assert found["num_lost"] == 0
        shares = [share for key, share in found.items() if key.endswith("_percent")]
        assert sum(shares) == pytest.approx(100, abs=0.05)
    assert value["policies"][0]["num_moves"] == 0


def test_a_fault_that_strikes_nothing_is_reported_with_its_policy(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = "faults=[{at_s: 1.5, kind: engine, engine: 99, iteration: 1}]"
    last = printed(capsys, scenario, "--iterations", "2", "--policy", "static", faults).splitlines()[-1]
    assert last.startswith("static: engine 99, which was to fail at ")
    twice = "faults=[{at_s: 1, kind: node, node: n1, iteration: 1, back_after_s: 90}, {at_s: 50, kind: node, node: n1}]"
    last = printed(capsys, scenario, "--iterations", "2", "--policy", "static", twice).splitlines()[-1]
    assert last == "static: node n1, which was to be lost at 50 s, is lost already then"


WRONG: dict[str, tuple[list[str], str]] = {
    "no iteration": (["--iterations", "0"], "--iterations: '0' is not a whole number of at least 1: give one such as"),
    "fewer than none": (["--iterations", "-3"], "--iterations: '-3' is not a whole number of at least 1"),
    "no number": (["--iterations", "many"], "--iterations: 'many' is not a whole number of at least 1"),
    "more than any job has": (["--iterations", "100001"], "--iterations 100,001: a job has from 1 to 100,000"),
    "a record": (["--iterations", "2", "--replay", "x"], "--iterations 2 with --replay x: a record has its own"),
    "a page": (["--iterations", "2", "-o", "html"], "-o html shows one iteration, and --iterations gives several: use"),
    "a trace of GPUs": (["--iterations", "2", "-o", "perfetto"], "-o perfetto shows one iteration, and --iterations"),
    "a bad line of a file": (
        ["--iterations", "2", "drift={mean_tokens: '', file: CURVE}"],
        "curve.txt:3: '7 tokens' has no number after its iteration",
    ),
    "a file that is not there": (
        ["--iterations", "2", "drift={mean_tokens: '', file: FOLDER/none.txt}"],
        "none.txt: No such file or directory; name a file of a point a line",
    ),
    "an iteration out of order": (
        ["--iterations", "2", "drift.mean_tokens={5: 100, 2: 300}"],
        "drift.mean_tokens: iteration 2 comes after iteration 5: write the points in the order of their iterations, "
        "each once [override drift.mean_tokens]",
    ),
    "a negative length": (
        ["--iterations", "2", "drift.mean_tokens=0:-4"],
        "drift.mean_tokens: -4 at iteration 0 is not from 1 to 10,000,000: correct it",
    ),
    "a share above 1": (
        ["--iterations", "2", "drift.trained_share={0: 1.2}"],
        "drift.trained_share: 1.2 at iteration 0 is not from 0 to 1: correct it",
    ),
    "a curve that YAML reads as a number": (
        ["--iterations", "2", "drift.trained_share=1:30"],
        "drift.trained_share=90 is one number, and a curve has points: write {0: 1500, 200: 10000}",
    ),
    "two curves": (["drift.curve=dapo"], "drift.mean_tokens and drift.curve are set, and each of them says how long"),
    "a curve that there is not": (["drift={curve: dapoo}"], "drift.curve='dapoo': Input should be 'orz_32b', "),
    "a mean above the limit": (
        ["--iterations", "2", "drift.mean_tokens=0:3000"],
        "drift asks for a mean of 3,000 tokens in iteration 0, and no law with the scenario's spread that is cut at",
    ),
    "an epoch below an iteration": (
        ["drift.epoch_prompts=4"],
        "drift.epoch_prompts=4 is below algorithm.prompts_per_iteration=8: an iteration would have a prompt twice",
    ),
    "a fault after the end": (
        ["--iterations", "2", "faults=[{at_s: 1, kind: gpu, gpu: 3, iteration: 4}]"],
        "faults.0.iteration=4 and the run has 2 iterations, counted from 0: give --iterations 5 or more",
    ),
    "a fault after the only iteration": (
        ["faults=[{at_s: 1, kind: gpu, gpu: 3, iteration: 4}]"],
        "faults.0.iteration=4 and the run has 1 iteration, counted from 0: give --iterations 5 or more",
    ),
    "a spike without a length": (
        ["drift.spikes=[{iteration: 1, factor: 0}]"],
        "drift.spikes.0.factor=0: Input should be greater than 0",
    ),
}


@pytest.mark.parametrize(("given", "want"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_one_line_before_anything_runs(
    given: list[str], want: str, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (curve := tmp_path / "curve.txt").write_text("0: 300\n# comment\n7 tokens\n")
    words = [word.replace("CURVE", str(curve)).replace("FOLDER", str(tmp_path)) for word in given]
    assert main(["simulate", *([] if "--replay" in given else [scenario]), *words]) == 2
    said = capsys.readouterr()
    assert want in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
