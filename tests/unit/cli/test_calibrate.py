"""`tidegate calibrate`: a scenario file that `simulate` takes, or why there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.__main__ import main
from simulator.model import ModelSection
from simulator.scenario import load_scenario
from tests.unit.run_directory import run_directory
from tidegate.config.job_config import JobConfig
from tidegate.job import load_job
from tidegate.types import Precision


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_a_printed_scenario_can_be_simulated_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_directory(tmp_path)
    (path := tmp_path / "fitted.yaml").write_text(
        printed(capsys, "calibrate", folder.name, "--output-dir", str(tmp_path))
    )
    head, static, *_ = printed(capsys, "simulate", str(path), "--policy", "static").splitlines()
    assert head.split()[:2] == ["POLICY", "SECONDS"]
    assert static.split()[:2] == ["static", "2"], "the median of the run's 1.5 and 2.5 s"


def test_the_jobs_model_is_in_the_scenario_and_why_where_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_directory(tmp_path)
    given = ("calibrate", folder.name, "--output-dir", str(tmp_path))
    (path := tmp_path / "fitted.yaml").write_text(printed(capsys, *given))
    job = load_job(JobConfig.from_json((folder / "config.json").read_text()))
    found = load_scenario(path).model
    assert found == ModelSection.of(job.model, padded_vocab=job.padded_vocab, precision=Precision.FP32)
    config = json.loads((folder / "config.json").read_text())
    config["model"] = {"path": str(tmp_path / "gone"), "max_seq_len": config["model"]["max_seq_len"]}
    (folder / "config.json").write_text(json.dumps(config))
    path.write_text(text := printed(capsys, *given))
    assert load_scenario(path).model is None
    (line,) = (line for line in text.splitlines() if str(tmp_path / "gone") in line)
    assert line.startswith("# No model is named, so each reshard takes costs.switch.reshard_s: ")


@pytest.mark.parametrize("form", ["table", "json"])
def test_each_fitted_value_is_listed_with_what_it_was_fitted_to(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_directory(tmp_path)
    text = printed(capsys, "calibrate", folder.name, "--output-dir", str(tmp_path), "-o", form)
    if form == "json":
        output = json.loads(text)
        found = {row["key"]: row["source"] for row in output["values"]}
        assert [row["phase"] for row in output["phases"]] == ["rollout", "inference", "training", "iteration"]
        assert found["costs.trainer.fixed_s"].startswith("M: 4 minibatches, median 0.00")
    else:
        (line,) = (line for line in text.splitlines() if line.startswith("costs.inference.rate_tokens_per_s"))
        assert line.endswith("M: median of 2 iterations, for one busy GPU")
        assert "\nPHASE      MEASURED S  SIMULATED S  ERROR PERCENT\n" in text


def test_an_unfinished_job_and_an_unknown_job_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_directory(tmp_path)
    (folder / "result.json").unlink()
    assert main(["calibrate", folder.name, "--output-dir", str(tmp_path)]) == 2
    assert "holds no finished run" in capsys.readouterr().err
    assert main(["calibrate", "another", "--output-dir", str(tmp_path)]) == 2
    assert "no job 'another'" in capsys.readouterr().err


def test_a_run_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_directory(tmp_path)
    assert main(["calibrate", folder.name, folder.name, "--output-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "tidegate: job is named twice: name each run once, or it counts for several\n"
