"""The completion script, run by bash as it does for a person who presses Tab."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from cli.__main__ import main

COMPLETIONS = {
    "a command": ("tidegate des", ["describe"]),
    "a flag": ("tidegate events demo --ta", ["--tail"]),
    "the value of a flag": ("tidegate get jobs -o y", ["yaml"]),
    "the type of an event": ("tidegate events demo --type dead", ["dead_lettered"]),
    "what to list": ("tidegate get ev", ["evaluations"]),
    "a job": ("tidegate describe my", ["my-job"]),
    "a job of another folder": ("tidegate describe --output-dir there a", ["afar"]),
    "a job of a cluster with a name": ("tidegate cancel --cluster lab a", ["afar"]),
    "the name of a cluster": ("tidegate get jobs --cluster l", ["lab"]),
    "a name to forget": ("tidegate context remove l", ["lab"]),
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_bash_completes(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, want = COMPLETIONS[case]
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "jobs" / "my-job").mkdir(parents=True)
    (tmp_path / "there" / "afar").mkdir(parents=True)
    (tmp_path / "tidegate" / "contexts").mkdir(parents=True)
    (tmp_path / "tidegate" / "contexts" / "lab.yaml").write_text(f"output_dir: {tmp_path / 'there'}\n")
    assert completed(line.split(), script, tmp_path) == want


def test_a_folders_name_is_never_run_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    for name in ("my-job", "$(touch pwned)", "`touch pwned`", "*", "a;touch pwned", "my job"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    assert completed(["tidegate", "describe", ""], script, tmp_path)[-1:] == ["my-job"]
    assert [path.name for path in tmp_path.rglob("pwned")] == []


def completed(words: list[str], script: str, folder: Path) -> list[str]:
    """What bash in this folder offers for the last word."""
    ask = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _tidegate; echo ${{COMPREPLY[@]}}"
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    found = subprocess.run(
        ["bash", "-c", script + ask], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stderr == ""
    return found.stdout.split()
