"""`--cluster NAME` of a context without a folder: the command is run by the machine that keeps the cluster."""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cli.afar import _without_context
from cli.command import _parser, execute
from services.scheduler.cluster.command_line import CommandLineServicer
from tests.integration.cluster.lab import Lab, serving
from tests.unit.cli.configs import small
from tidegate.adapters.grpc_server import Service
from tidegate.certs.authority import REVOKED
from tidegate.certs.identity import Party
from tidegate.tasks.tokenizer import build_tokenizer
from tidegate.v1 import command_line_pb2, command_line_pb2_grpc


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "laptop").mkdir()
    monkeypatch.chdir(tmp_path / "laptop")


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    commands = CommandLineServicer(tmp_path / "jobs")
    async with serving(tmp_path, [commands.service()]) as found:
        yield found
    await commands.aclose()


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
    assert capfd.readouterr().err == (f"tidegate: no job 'none' in {lab.jobs}; there: none\n")
    assert await typed("cancel", "none", "--cluster", "lab") == 2
    assert "cancel needs an operator's credential: that of context lab is of viewer/me" in capfd.readouterr().err


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


async def test_who_is_revoked_is_told_that_and_not_to_look_for_another_port(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    await knows(lab, f"a={lab.endpoint}")
    lab.authority.revoke(lab.authority.issued()[-1].serial)
    shutil.copy(lab.folder / "ca" / REVOKED, lab.folder / "keeper" / REVOKED)
    capfd.readouterr()
    assert await typed("get", "jobs", "--cluster", "lab") == 1
    said = capfd.readouterr().err
    assert "is revoked: issue the credential again" in said
    assert "runs no commands" not in said


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
    # gRPC tells there of loops of other tests that have ended.
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tidegate: ")]
    assert [line.split(": ")[1] for line in said[:2]] == ["rewards.0", "model.tokenizer"]
    assert said[-1].endswith(f"no cluster is up in {lab.jobs}: start one with tidegate up n0=8 --output-dir {lab.jobs}")
    copies = list((lab.jobs / ".files").glob("*/*"))
    assert {path.name: path.read_bytes() for path in copies}["grading.py"] == (here / "grading.py").read_bytes()
    assert "words.json" in {path.name for path in copies}
    assert not (here / "mine").exists()


async def test_a_job_with_servers_of_its_own_is_refused_before_anybody_is_called(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    await knows(lab, "a=127.0.0.1:9")
    here = Path.cwd()
    (here / "job.yaml").write_text(yaml.safe_dump(small(here)))
    capfd.readouterr()
    words = ("submit", "job.yaml", "servers.redis_url=rediss://me:hunter2@h", "--cluster", "lab")
    assert await typed(*words) == 2
    assert capfd.readouterr().err == (
        "tidegate: job small has servers.redis_url, and a cluster has its own servers: leave servers out, or start the "
        "job by tidegate run, which uses yours [override servers.redis_url]\n"
    )


class Leaving(command_line_pb2_grpc.CommandLineServicer):
    """A keeper that goes in the middle of its first command, and the next one, which ends each."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def RunCommand(
        self, request: command_line_pb2.RunCommandRequest, context: Any
    ) -> AsyncIterator[command_line_pb2.RunCommandResponse]:
        async for output in self._outputs(request.command, context):
            yield command_line_pb2.RunCommandResponse(output=output)

    async def RunLookingCommand(
        self, request: command_line_pb2.RunLookingCommandRequest, context: Any
    ) -> AsyncIterator[command_line_pb2.RunLookingCommandResponse]:
        async for output in self._outputs(request.command, context):
            yield command_line_pb2.RunLookingCommandResponse(output=output)

    async def _outputs(self, command: Any, context: Any) -> AsyncIterator[command_line_pb2.CommandOutput]:
        self.asked.append(list(command.words))
        yield command_line_pb2.CommandOutput(out=b"said\n")
        if len(self.asked) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield command_line_pb2.CommandOutput(exit_code=3)

    def service(self) -> Service:
        add = partial(command_line_pb2_grpc.add_CommandLineServicer_to_server, self)
        return Service(command_line_pb2.DESCRIPTOR.services_by_name["CommandLine"], add)


@pytest.mark.parametrize(
    ("words", "code", "asked", "told"),
    [
        ("wait one", 3, ["wait", "one"], "asking for the next one"),
        ("get jobs -w", 3, ["get", "jobs", "-w"], "asking for the next one"),
        ("submit job.yaml --follow", 3, ["wait", "small", "-otable"], "asking for the next one"),
        ("submit job.yaml", 1, None, "has gone, and the command with it: job small is queued"),
        ("logs one -f", 1, None, "has gone, and the command with it: type it again"),
        ("cancel one", 1, None, "and the command with it: see what became of it (tidegate get jobs --cluster lab)"),
    ],
)
async def test_what_waits_goes_on_with_the_next_keeper(
    words: str, code: int, asked: list[str] | None, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = Leaving()
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**small(tmp_path), "job": "small"}))
    async with serving(tmp_path, [keeper.service()]) as lab:
        await knows(lab, f"a={lab.endpoint}")
        assert await typed(*words.replace("job.yaml", str(tmp_path / "job.yaml")).split(), "--cluster", "lab") == code
    assert told in capfd.readouterr().err
    assert keeper.asked[1:] == ([] if asked is None else [asked])


def test_every_flag_of_submit_goes_on() -> None:
    """They are written again for the machine that keeps the cluster."""
    (commands,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    flags = {flag for flag in commands.choices["submit"]._option_string_actions if flag.startswith("--")}
    told = {"--priority", "--resume", "--force", "--no-copies", "--follow"}
    assert flags == {*told, "--help", "--output-dir", "--cluster", "--from-afar"}


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
