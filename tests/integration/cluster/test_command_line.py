"""Commands that the keeper of a cluster runs for other machines: over TLS, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from cli.top import CLEAR
from services.scheduler.cluster import __main__ as scheduler
from services.scheduler.cluster import command_line as command_lines
from services.scheduler.cluster.command_line import CommandLineServicer
from tests.integration.cluster.lab import Lab, serving
from tidegate.adapters import grpc_server
from tidegate.adapters.grpc_server import Service
from tidegate.certs.authority import REVOKED
from tidegate.certs.identity import Party
from tidegate.cluster.folder import ClusterDescription
from tidegate.cluster.slots import Slots
from tidegate.job import CALLED_VARIABLE, command_in
from tidegate.ports.rpc import PeerRefused
from tidegate.types import NodeId
from tidegate.v1 import command_line_pb2, command_line_pb2_grpc, machine_pb2


class CommandsLab(Lab):
    @asynccontextmanager
    async def calling(self, party: Party) -> AsyncIterator[command_line_pb2_grpc.CommandLineAsyncStub]:
        async with self.channel(party) as channel:
            yield command_line_pb2_grpc.CommandLineStub(channel)

    async def look(self, *words: str, party: Party = Party.VIEWER, **size: int) -> tuple[str, str, int]:
        """stdout, stderr and the exit code of a command that changes nothing."""
        async with self.calling(party) as stub:
            return await printed(stub.RunLookingCommand(looking(words, **size)))


def looking(words: Sequence[str], **size: int) -> command_line_pb2.RunLookingCommandRequest:
    command = command_line_pb2.CommandWords(words=words, cluster="lab", **size)
    return command_line_pb2.RunLookingCommandRequest(command=command)


def changing(*words: str) -> command_line_pb2.RunCommandRequest:
    return command_line_pb2.RunCommandRequest(command=command_line_pb2.CommandWords(words=words, cluster="lab"))


async def printed(rows: Any) -> tuple[str, str, int]:
    said, code = {"out": b"", "err": b""}, None
    async for row in rows:
        assert code is None, "something comes after the exit code"
        match row.output.WhichOneof("body"):
            case "exit_code":
                code = row.output.exit_code
            case name:
                said[name] += getattr(row.output, name)
    assert code is not None
    return said["out"].decode(), said["err"].decode(), code


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children()}


def new_child(before: set[int]) -> int:
    """A descriptor that can be read once the process has ended, which is this one's only new child."""
    (pid,) = children() - before
    return os.pidfd_open(pid)


async def ended(process: int) -> None:
    await asyncio.to_thread(select.select, [process], [], [])
    os.close(process)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[CommandsLab]:
    commands = CommandLineServicer(tmp_path / "jobs")
    async with serving(tmp_path, [commands.service()]) as found:
        yield CommandsLab(found.authority, found.folder, found.endpoint)
    await commands.aclose()


async def test_a_command_prints_what_it_prints_here(lab: CommandsLab) -> None:
    assert await lab.look("get", "jobs") == (f"no jobs in {lab.jobs}\n", "", 0)
    out, said, code = await lab.look("get", "everything")
    assert (out, code) == ("", 2)
    assert said.startswith("tidegate: what: 'everything' is not one of jobs, ")


async def test_the_log_says_who_has_called(lab: CommandsLab) -> None:
    with structlog.testing.capture_logs() as lines:
        await lab.look("get", "jobs")
    told = [(line["caller"], line["words"]) for line in lines if line["event"] == "command"]
    assert told == [("viewer/me of cluster lab", ["get", "jobs"])]


async def test_a_remedy_names_the_cluster_as_its_caller_does(lab: CommandsLab, monkeypatch: pytest.MonkeyPatch) -> None:
    _, said, code = await lab.look("wait", party=Party.OPERATOR)
    assert code == 1
    assert said.endswith(f"start one with tidegate up n0=8 --output-dir {lab.jobs}\n"), "no other machine may"
    monkeypatch.setenv(CALLED_VARIABLE, "lab")
    assert command_in(lab.jobs, "cancel", "one") == "tidegate cancel one --cluster lab"


async def test_who_may_only_look_changes_nothing(lab: CommandsLab) -> None:
    async with lab.calling(Party.VIEWER) as stub:
        with pytest.raises(PeerRefused, match="may not call") as refused:
            await printed(stub.RunCommand(changing("get", "jobs")))
        assert refused.value.status == "PERMISSION_DENIED"
        with pytest.raises(PeerRefused, match="'cancel' cannot be asked of a cluster from afar so: describe, events, "):
            await printed(stub.RunLookingCommand(looking(["cancel", "one"])))
    async with lab.calling(Party.OPERATOR) as stub:
        for words in (["up", "n0=1"], ["run", "job.yaml"], ["certs", "init"], []):
            with pytest.raises(PeerRefused, match="cannot be asked of a cluster from afar"):
                await printed(stub.RunCommand(changing(*words)))
        _, said, code = await printed(stub.RunCommand(changing("cancel", "one")))
    assert (code, "no job 'one'" in said) == (2, True)


async def test_nobody_reads_jobs_of_another_folder(lab: CommandsLab, tmp_path: Path) -> None:
    (other := tmp_path / "other" / "secret").mkdir(parents=True)
    (other / "config.json").write_text("{}")
    for words in (["get", "jobs", "--output-dir", str(other.parent)], ["get", "jobs", f"--output={other.parent}"]):
        assert await lab.look(*words) == (f"no jobs in {lab.jobs}\n", "", 0)
    (tmp_path / "config.json").write_text("{}")
    (lab.jobs / "config.json").write_text("{}")
    for name in ("../other/secret", str(other), "..", ".", "", "x" * 300):
        out, said, code = await lab.look("logs", name)
        assert (out, code) == ("", 2)
        assert f"no job {name!r} in" in said
    async with lab.calling(Party.VIEWER) as stub:
        with pytest.raises(PeerRefused, match="a word -- hides flags"):
            await printed(stub.RunLookingCommand(looking(["get", "--", "jobs"])))
        command = command_line_pb2.CommandWords(words=["get", "jobs"], cluster="; ls")
        with pytest.raises(PeerRefused, match="'; ls' is no name of a context"):
            await printed(stub.RunLookingCommand(command_line_pb2.RunLookingCommandRequest(command=command)))


async def test_a_command_ends_when_its_caller_leaves(lab: CommandsLab) -> None:
    """It has a terminal where its caller has one."""
    before = children()
    async with lab.calling(Party.VIEWER) as stub:
        rows: Any = stub.RunLookingCommand(looking(["get", "jobs", "--watch"], columns=100, rows=30))
        first = await anext(aiter(rows))
        assert first.output.out.decode() == f"{CLEAR}no jobs in {lab.jobs}\n"
        process = new_child(before)
        rows.cancel()
        await ended(process)


@pytest.mark.parametrize("columns", [0, 100], ids=["elsewhere", "on a terminal"])
async def test_a_slow_reader_gets_all_of_the_output(lab: CommandsLab, columns: int) -> None:
    """The command has long ended then."""
    job = lab.job("big")
    job.config.write_text("{}")
    (job.attempt().logs / "scheduler.jsonl").write_text(
        "".join(f"line {number} {'-' * 90}\n" for number in range(3000))
    )
    words = ["logs", "big", "--tail", "3000", "--output-dir", str(lab.jobs)]
    command = command_line_pb2.CommandWords(cluster="lab", columns=columns, rows=30)
    said, code = b"", None
    async for piece in command_lines._outputs(command, words, b""):
        if not said:
            await asyncio.sleep(1.5)  # what is slow here is the reader
        said += piece.out
        code = piece.exit_code
    assert code == 0
    assert [int(line.split()[1]) for line in said.decode().splitlines() if line.startswith("line")] == [*range(3000)]


async def test_a_reader_whose_credential_was_revoked_is_told_nothing_more(
    lab: CommandsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "CHECKED_AGAIN_S", 0.0)
    async with lab.calling(Party.VIEWER) as stub:
        rows: Any = stub.RunLookingCommand(looking(["get", "jobs", "--watch"]))
        await anext(aiter(rows))
        (issued,) = (each for each in lab.authority.issued() if each.identity.party is Party.VIEWER)
        lab.authority.revoke(issued.serial)
        shutil.copy(lab.folder / "ca" / REVOKED, lab.folder / "keeper" / REVOKED)
        lab.job("new").config.write_text("{}")
        with pytest.raises(PeerRefused, match="is revoked: issue the credential again"):
            await printed(rows)


async def test_other_machines_are_answered_once_the_port_is_free(lab: CommandsLab) -> None:
    queue = Service(machine_pb2.DESCRIPTOR.services_by_name["Machine"], lambda server: None)
    told: list[str] = []
    async with AsyncExitStack() as closing:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            cluster = ClusterDescription(
                Slots({NodeId("n0"): 1}), "", "", "", "", "127.0.0.1", str(lab.folder / "keeper"), port
            )
            others = partial(scheduler._serve_others, lab.jobs, cluster, queue, closing)
            assert await others() is None
        await scheduler._until_served(others, lambda *, far: told.append(far))
        assert told == [f"127.0.0.1:{port}"]


async def test_one_more_than_there_may_be_is_refused(lab: CommandsLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_lines, "MOST_COMMANDS", 1)
    async with lab.calling(Party.VIEWER) as stub:
        before = children()
        rows: Any = stub.RunLookingCommand(looking(["get", "jobs", "--watch"]))
        await anext(aiter(rows))
        process = new_child(before)
        with pytest.raises(PeerRefused, match="1 commands of viewer/me of cluster lab run") as refused:
            await printed(stub.RunLookingCommand(looking(["get", "jobs"])))
        assert refused.value.status == "RESOURCE_EXHAUSTED"
        rows.cancel()
        await ended(process)
