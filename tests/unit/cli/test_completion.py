"""The completion script, run by bash as it does for a person who presses Tab."""

from __future__ import annotations

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
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_bash_completes(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, want = COMPLETIONS[case]
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "jobs" / "my-job").mkdir(parents=True)
    words = line.split()
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _tidegate; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", script + ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == want
    assert found.stderr == ""
