"""`tidegate context`, and what `--cluster` stands for."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from cli import command as command_module
from cli.command import execute
from cli.contexts import operator_of
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.far_commands import CHANGING, LOOKING


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TIDEGATE_CLUSTER", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "jobs").mkdir()
    return tmp_path / "config" / "tidegate" / "contexts"


def test_a_context_stands_for_the_folder_of_its_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["context", "add", "one", "--output-dir", "lab"]) == 0
    assert execute(["get", "jobs", "--cluster", "one"]) == 0
    assert f"no jobs in {tmp_path / 'lab'}" in capsys.readouterr().out
    assert execute(["context", "list", "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == [
        {"context": "one", "output_dir": str(tmp_path / "lab"), "keepers": [], "operator": None}
    ]
    assert execute(["context", "remove", "one"]) == 0
    assert execute(["get", "jobs", "--cluster", "one"]) == 2
    assert "there is no context one; there: none" in capsys.readouterr().err


def test_what_is_named_goes_before_the_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_CLUSTER", "one")
    (tmp_path / "other").mkdir()
    for name, folder in (("one", "lab"), ("two", "other")):
        assert execute(["context", "add", name, "--output-dir", folder]) == 0
    for words, folder in (([], "lab"), (["--cluster", "two"], "other"), (["--output-dir", "jobs"], "jobs")):
        capsys.readouterr()
        assert execute(["get", "jobs", *words]) == 0
        assert capsys.readouterr().out.strip() == f"no jobs in {tmp_path / folder}"


def test_a_context_has_the_credential_for_its_folder(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", "lab")
    for name, party in (("looks", Party.VIEWER), ("rules", Party.OPERATOR)):
        authority.issue(Identity("lab", party, "me"), tmp_path / name)
        assert execute(["context", "add", name, "--output-dir", "lab", "--operator", name]) == 0
    for name in ("rules", "looks"):
        execute(["get", "jobs", "--cluster", name])
        assert operator_of(tmp_path / "lab") == tmp_path / name
    execute(["get", "jobs", "--output-dir", "lab"])
    assert operator_of(tmp_path / "lab") == tmp_path / "looks"
    assert operator_of(tmp_path / "jobs") is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "get jobs --cluster none",
            "there is no context none; there: anonymous, both, damaged, empty, extra, far, folder, half, homeless, "
            "nowhere, relative. tidegate",
        ),
        ("get jobs --cluster empty", "context empty cannot be used: {files}/empty.yaml: it is empty"),
        ("get jobs --cluster homeless", "Could not determine home directory"),
        ("get jobs --cluster folder", "Is a directory"),
        ("context remove folder", "context folder cannot be removed: "),
        ("context add folder --output-dir lab", "context folder cannot be written: "),
        ("get jobs --cluster ../x", "'../x' is no name of a context: lower-case letters, digits and inner hyphens"),
        ("get jobs --cluster damaged", "/damaged.yaml: it is no YAML (while parsing"),
        (
            "get jobs --cluster extra",
            "/extra.yaml: it has address, and only output_dir, keepers, operator have a meaning",
        ),
        ("get jobs --cluster half", "/half.yaml: it has no output_dir"),
        ("get jobs --cluster relative", "/relative.yaml: output_dir is not an absolute path"),
        ("get jobs --cluster half --output-dir lab", "--cluster half and --output-dir lab: give one of them"),
        ("context add", "context add needs a NAME"),
        ("context remove none", "there is no context none"),
        ("context add one --output-dir nowhere", "there is no such folder; give that of the cluster's jobs"),
        ("context add one --output-dir lab --operator lab", "--operator: "),
        (
            "context add one --output-dir lab --operator node",
            "of node/a of cluster lab: commands need an operator's or",
        ),
        ("run x.yaml --cluster half", "run takes no --cluster"),
        ("get jobs --cluster both", "/both.yaml: it has both output_dir and keepers"),
        ("get jobs --cluster anonymous", "/anonymous.yaml: it has keepers and no operator: a call from afar needs"),
        ("get jobs --cluster nowhere", "/nowhere.yaml: a answers at 'x', which is no HOST:PORT, as in a=10.0.0.7:7401"),
        ("get jobs --cluster far", "context far: the credential in /a cannot be read ("),
        ("context add one --keeper a=h:1", "--keeper needs --operator too: a call from afar needs a credential"),
        (
            "context add one --keeper a=h:1 --output-dir lab",
            "--output-dir and --keeper: give the folder, or the machines",
        ),
        (
            "context add one --keeper A=h:1 --operator looks",
            "--keeper A=h:1: machine 'A': name 'A' of a credential has",
        ),
        ("context add one --keeper a=h --operator looks", "--keeper a=h: a answers at 'h', which is no HOST:PORT"),
        ("context add one --keeper a=h:1 --keeper a=h:2 --operator looks", "--keeper a is given twice"),
    ],
)
def test_a_context_that_cannot_be_used_is_refused(
    words: str, told: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.NODE, "a"), tmp_path / "node")
    authority.issue(Identity("lab", Party.VIEWER, "me"), tmp_path / "looks")
    files.mkdir(parents=True)
    texts = {
        "damaged": "a: [",
        "extra": "output_dir: /a\naddress: b",
        "half": "operator: /a",
        "relative": "output_dir: a",
        "empty": "",
        "homeless": "output_dir: ~nobody-has-it/jobs",
        "both": "output_dir: /a\nkeepers: {a: h:1}",
        "anonymous": "keepers: {a: h:1}",
        "nowhere": "keepers: {a: x}\noperator: /a",
        "far": "keepers: {a: h:1}\noperator: /a",
    }
    for name, text in texts.items():
        (files / f"{name}.yaml").write_text(text)
    (files / "folder.yaml").mkdir()
    assert execute(words.split()) == 2
    said = capsys.readouterr().err
    assert told.format(files=files) in said
    assert said.count("\n") == 1
    assert operator_of(tmp_path / "lab") is None
    assert execute(["context", "list"]) == 0
    assert not (files / "one.yaml").exists()


@pytest.mark.parametrize("words", ["up n0=1", "reload", "down", "backup all", "restore all"])
def test_what_needs_the_folder_is_done_on_its_machines(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Authority.create(tmp_path / "ca", "lab").issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "me")
    where = ("--keeper", "a=192.0.2.1:7401", "--keeper", "b=host-b:7401")
    assert execute(["context", "add", "far", *where, "--operator", "me", "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {
        "context": "far",
        "output_dir": None,
        "keepers": ["a=192.0.2.1:7401", "b=host-b:7401"],
        "operator": str(tmp_path / "me"),
    }
    assert execute([*words.split(), "--cluster", "far"]) == 2
    told = f"context far has no folder of jobs, and {words.split()[0]} needs one: run it on a machine of the cluster"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "jobs" / ".cluster").exists()


def test_every_command_with_a_cluster_is_done_afar_or_refused_there() -> None:
    """A new command is put on one of the lists, or stays where it is typed."""
    parser = command_module._parser()
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    takes_cluster = {name for name, own in commands.choices.items() if "--cluster" in own._option_string_actions}
    assert takes_cluster == LOOKING | CHANGING | {"up", "reload", "down", "backup", "restore"}
    assert not LOOKING & CHANGING
