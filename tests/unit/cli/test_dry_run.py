"""`tidegate run --dry-run` reports what a start would report, prints a valid config, and starts nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from cli.__main__ import main
from tests.unit.cli.configs import small, small_file
from tests.unit.cli.configs_on_data import RIGHT, function, on_data
from tidegate.config.files import load_config
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import Start, claim_folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["run", *map(str, arguments), "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_printed_text_is_a_config_of_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_file(tmp_path)
    text = printed(capsys, path, "algorithm.clip_high=0.28")
    (again := tmp_path / "again" / "small.yaml").parent.mkdir()
    again.write_text(text)
    want = load_config(path)
    algorithm = want.algorithm.model_copy(update={"clip_high": 0.28})
    assert load_config(again) == want.model_copy(update={"algorithm": algorithm})
    assert JobConfig.from_json(printed(capsys, again, "-o", "json")) == load_config(again)
    assert not (tmp_path / "jobs").exists()
    assert list((tmp_path / "memory").iterdir()) == []


def test_each_printed_value_has_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, small_file(tmp_path), "algorithm.group_size=4").splitlines()
    assert "  group_size: 4  # override algorithm.group_size" in lines
    assert "  clip_low: 0.2" in lines
    (line,) = [line for line in lines if line.startswith("  hidden_size: 16")]
    assert line.startswith(f"  hidden_size: 16  # {tmp_path / 'small.yaml'}:")


def test_a_job_on_data_is_printed_with_whole_paths_and_its_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    awkward = {"chat_template_kwargs": {"system": "two # lines\nand a \u2028 break: yes"}}
    path = small_file(tmp_path, **on_data(tmp_path, [RIGHT], **function("grading:score"), **awkward))
    (tmp_path / "grading.py").write_text("def score(response):\n    return 1.0\n")
    text = printed(capsys, path)
    values = yaml.safe_load(text)
    assert values["data"]["train"] == str(tmp_path / "train.jsonl")
    assert values["data"]["checksum"]
    assert values["data"]["chat_template_kwargs"] == awkward["chat_template_kwargs"]
    assert values["rewards"][0]["import_from"] == str(tmp_path)


def test_overrides_may_stand_before_and_after_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(small_file(tmp_path))
    assert main(["run", path, "seed=1", "--dry-run", "algorithm.iterations=7", "-o", "json", "seed=2"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["seed"], values["algorithm"]["iterations"]) == (2, 7)


@pytest.mark.parametrize("arguments", [["--dry"], ["get", "jobs", "--follow"], ["describe", "small", "seed=1"]])
def test_an_unknown_flag_is_still_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("tidegate: ")


def test_overrides_alone_are_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "seed=1"]) == 2
    assert "no config to override; name a YAML file before key=value" in capsys.readouterr().err


REFUSED = {
    "a task that is not there": (("task.name=chess",), "no task is called 'chess'"),
    "a tokenizer that is not there": (("model.tokenizer=words.json",), "no tokenizer at "),
    "a server that does not answer": (("servers.nats_url=localhost:1",), "is not a URL like nats://host:port"),
    "host memory that is not there": (
        ("runtime.host_memory_root=/nowhere",),
        "runtime.host_memory_root=/nowhere is not a folder that can be written to: name one in memory (/dev/shm), or "
        "any local folder where there is none [override runtime.host_memory_root]",
    ),
    "nothing to resume": (("--resume",), "there is nothing to resume"),
    "a folder that cannot be made": (("--output-dir", os.devnull), "cannot be made (Not a directory): "),
    "a folder that is no place for files": (
        ("--output-dir", "/proc/jobs"),
        "cannot be made (No such file or directory): ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_refuses_what_a_start_would_refuse(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, want = REFUSED[case]
    assert main(["run", str(small_file(tmp_path)), *arguments, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert want in said.err
    assert said.out == ""
    assert not (tmp_path / "jobs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.usefixtures("torch_is_asked_once")
@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_job_on_cuda_is_refused_in_one_line_where_there_is_no_cuda(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(small_file(tmp_path)), "cluster.device=cuda", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tidegate: cluster.device=cuda, but on this machine torch {torch.__version__} ")
    assert said.endswith(
        "set cluster.device to cpu, or run it where `tidegate doctor` lists a CUDA device [override cluster.device]\n"
    )
    assert said.count("\n") == 1
    assert not (tmp_path / "jobs").exists()


def test_an_older_run_is_reported_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(small_file(tmp_path))
    with claim_folder(load_job(config), Start.FRESH, now_unix_s=0.0):
        assert main(["run", str(small_file(tmp_path)), "--dry-run"]) == 2
        assert "job small already runs" in capsys.readouterr().err
    before = sorted(JobFolder.of(config).root.rglob("*"))
    assert main(["run", str(small_file(tmp_path)), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"was started before .*: go on with it \(tidegate run .* --resume\).* \(tidegate run .* --force\)", said
    )
    for start in ("--resume", "--force"):
        assert "group_size: 2" in printed(capsys, small_file(tmp_path), start)
    assert main(["run", str(small_file(tmp_path)), "--resume", "--dry-run", "algorithm.group_size=4"]) == 2
    said = capsys.readouterr().err
    assert "cannot go on with algorithm.group_size=4 (was 2)" in said
    assert "give the config another job name [override algorithm.group_size]" in said
    assert sorted(JobFolder.of(config).root.rglob("*")) == before


def test_a_job_on_data_may_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder has the checksum of the data, and the person's config has none."""
    path = small_file(tmp_path, **on_data(tmp_path, [RIGHT], **function("grading:score")))
    (tmp_path / "grading.py").write_text("def score(response):\n    return 1.0\n")
    with claim_folder(load_job(JobConfig.from_json(printed(capsys, path, "-o", "json"))), Start.FRESH, now_unix_s=0.0):
        pass
    assert yaml.safe_load(printed(capsys, path, "--resume"))["data"]["checksum"]
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() * 2)
    assert main(["run", str(path), "--resume", "--dry-run"]) == 2
    assert "cannot go on with data.checksum=" in capsys.readouterr().err


def test_a_relative_output_folder_counts_from_where_the_command_is_typed_and_is_printed_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_file(tmp_path, output_dir="runs")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["run", str(path), "--dry-run"]) == 0
    assert f"tidegate: the folder of job small is {elsewhere / 'runs' / 'small'}\n" in capsys.readouterr().err


def test_warnings_stand_beside_the_printed_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert small(tmp_path)["actor"] == {"learning_rate": 1e-3}
    assert main(["run", str(small_file(tmp_path)), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "tidegate: actor.warm_up.steps=0: " in said
    assert "tidegate: learning rate: a budget of 2 updates for the 2 of this job (2 iterations of 1), constant" in said
