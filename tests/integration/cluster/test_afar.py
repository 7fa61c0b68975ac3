"""`--cluster NAME` of a context without a folder: the command is run by the machine that keeps the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from cli.afar import _without_context
from cli.command import execute
from services.scheduler.cluster.command_line import command_line
from tests.integration.cluster.lab import Lab, serving
from tests.unit.cli.configs import small
from tidegate.certs.identity import Party
from tidegate.tasks.tokenizer import build_tokenizer


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "laptop").mkdir()
    monkeypatch.chdir(tmp_path / "laptop")
    async with serving(tmp_path, [command_line(tmp_path / "jobs")]) as found:
        yield found


async def typed(*words: str) -> int:
    return await asyncio.to_thread(execute, [*words])


async def knows(lab: Lab, *keepers: str, party: Party = Party.OPERATOR) -> None:
    where = [word for keeper in keepers for word in ("--keeper", keeper)]
    assert await typed("context", "add", "lab", *where, "--operator", str(lab.credential(party))) == 0


async def test_a_command_prints_as_if_it_were_typed_there(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    await knows(lab, f"a={lab.endpoint}", party=Party.VIEWER)
    capfd.readouterr()
    assert await typed("get", "jobs", "--cluster", "lab") == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"no jobs in {lab.jobs}"  # after the keeper's log
    assert await typed("describe", "none", "--cluster=lab") == 2
    assert capfd.readouterr().err == (
        f"tidegate: no job 'none' in {lab.jobs}; there: none. --output-dir names another folder\n"
    )
    assert await typed("cancel", "none", "--cluster", "lab") == 1
    assert "may not call" in capfd.readouterr().err


async def test_whoever_keeps_it_is_called(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    nobody = "127.0.0.1:9"
    await knows(lab, f"b={nobody}", f"a={lab.endpoint}")
    assert await typed("get", "jobs", "--cluster", "lab") == 0
    await knows(lab, f"b={nobody}", f"c={lab.endpoint}")
    capfd.readouterr()
    assert await typed("get", "jobs", "--cluster", "lab") == 1
    said = capfd.readouterr().err
    assert "tidegate: no machine answers as the keeper of this cluster: b: nothing listens at 127.0.0.1:9;" in said
    assert f"c: who listens at {lab.endpoint} has another one's certificate" in said


async def test_a_job_travels_with_its_files(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """The check there is the one that a submission on that machine has: nobody keeps a cluster here."""
    await knows(lab, f"a={lab.endpoint}")
    here = Path.cwd()
    (here / "grading.py").write_text("def score(response):\n    return 1.0\n")
    raw = {**small(here), "output_dir": str(here / "mine"), "task": None}
    raw["data"] = {"train": str(here / "train.jsonl")}
    build_tokenizer(["two"]).save(here / "words.json")
    raw["model"] = {**raw["model"], "tokenizer": str(here / "words.json")}
    raw["rewards"] = [{"name": "function", "path": "grading:score", "import_from": str(here)}]
    (here / "job.yaml").write_text(yaml.safe_dump(raw))
    capfd.readouterr()
    assert await typed("submit", "job.yaml", "--cluster", "lab") == 1
    said = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said[:2]] == ["rewards.0", "model.tokenizer"]
    assert said[-1].endswith(f"no cluster is up in {lab.jobs}: start one with tidegate up n0=8 --cluster lab")
    copies = list((lab.jobs / ".files").glob("*/*"))
    assert {path.name: path.read_bytes() for path in copies}["grading.py"] == (here / "grading.py").read_bytes()
    assert "words.json" in {path.name for path in copies}
    assert not (here / "mine").exists()


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("get jobs --cluster lab", "get jobs"),
        ("get --cluster=lab jobs", "get jobs"),
        ("get jobs --clus lab -w", "get jobs -w"),
        ("scale one actor=4 --cl=lab --wait", "scale one actor=4 --wait"),
        ("cancel one --reason --x", "cancel one --reason --x"),
    ],
)
def test_words_go_on_without_the_context(words: str, left: str) -> None:
    assert _without_context(words.split()) == left.split()
