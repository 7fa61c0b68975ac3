"""The agent of another machine and the stand-ins of its processes, with trivial processes in place of services."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from structlog.testing import capture_logs

from services.node import machine
from services.node.job_memories import MARK
from services.node.machine import MachineServicer
from tests.integration.cluster.machine_lab import ENDS_ON_TERM, IGNORES_TERM, Lab, calls, programs_of, requests
from tests.looking import until
from tests.ports import kept_port
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CREDENTIAL, Authority
from tidegate.certs.identity import Identity, Party
from tidegate.certs.job_credentials import credential_folder
from tidegate.clocks import FILE, Clocks
from tidegate.config.sections.evaluation import EvaluationSection
from tidegate.job import load_job
from tidegate.launcher.claim import CannotStart, write_private
from tidegate.launcher.clocks import noted_clocks
from tidegate.launcher.lock import LOCK, held
from tidegate.launcher.preflight import check_machines
from tidegate.ports.rpc import PeerRefused
from tidegate.runtime.processes import ENDS_AGAIN
from tidegate.types import LOOPBACK
from tidegate.v1 import machine_pb2, machine_pb2_grpc


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.NODE, "b"), tmp_path / "node")
    authority.issue(Identity("lab", Party.NODE, "d"), tmp_path / "twin")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    authority.issue(Identity("lab", Party.JOB, "small"), tmp_path / "job")
    (tmp_path / "memory").mkdir()
    found = Lab(tmp_path)
    found.server = await found.serve()
    yield found
    await found.server.stop(grace_s=0)
    for stand_in in found.stand_ins:
        with suppress(ProcessLookupError):
            stand_in.kill()
        await stand_in.communicate()
    for each in programs(found):
        each.kill()


def programs(lab: Lab) -> list[psutil.Process]:
    """The agent runs in this process: what it started is a child of it."""
    return programs_of(psutil.Process(), lab.code)


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
async def test_a_stand_in_ends_with_the_status_of_its_process(lab: Lab, code: str, status: int) -> None:
    lab.code = code
    config = lab.config()
    stand_in = await lab.stand_in(config)
    assert await stand_in.wait() == status
    await until(lambda: not Path(config.runtime.host_memory_root).exists())


async def test_a_stand_in_that_is_asked_to_stop_asks_its_process(lab: Lab) -> None:
    lab.code = ENDS_ON_TERM
    config = lab.config()
    stand_in = await lab.stand_in(config)
    await until(lambda: "ready" in lab.printed(config))
    stand_in.terminate()
    assert await stand_in.wait() == 7


async def test_the_last_line_of_a_process_that_failed_is_the_stand_ins(lab: Lab) -> None:
    lab.code = "print('why it failed'); raise SystemExit(3)"
    stand_in = await lab.stand_in(lab.config())
    assert stand_in.stderr is not None
    assert (await stand_in.stderr.read()).endswith(b"why it failed\n")


async def test_a_process_waits_for_the_one_before_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_STOP_S", 1.0)
    monkeypatch.setattr(machine, "BEAT_S", 0.1)
    lab.code = IGNORES_TERM
    config = lab.config()
    # Read before the first one ends: its end removes the folder, which the agent and the launcher share here.
    start = lab.hosted(config).start(Path(config.runtime.host_memory_root))
    first = await lab.stand_in(config)
    await until(lambda: "ready" in lab.printed(config))
    (before,) = programs(lab)
    first.kill()
    await first.wait()
    async with aclosing(calls(lab, start, stays=True)) as responses:
        async for response in responses:
            assert len(programs(lab)) <= 1
            if response.WhichOneof("body") == "started":
                break
        # What was started a moment ago may still look like the process that forked it.
        await until(lambda: bool(programs(lab)))
        assert [each.pid for each in programs(lab)] != [before.pid]
    await until(lambda: not programs(lab))


async def test_a_call_that_is_cancelled_again_and_again_keeps_its_place_until_its_process_is_gone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_STOP_S", 60.0)
    lab.code = IGNORES_TERM
    config = lab.config()
    start = lab.hosted(config).start(Path(config.runtime.host_memory_root))
    servicer = MachineServicer(lab.program, lab.folder / "memory")

    async def bodies() -> AsyncGenerator[str | None]:
        async for response in servicer.RunProcess(requests(start, stays=True), None):
            yield response.WhichOneof("body")

    async def listen() -> None:
        async for _ in bodies():
            pass

    call = asyncio.create_task(listen())
    await until(lambda: "ready" in lab.printed(config))
    while not call.done():
        call.cancel()
        await asyncio.sleep(0)
    assert len(programs(lab)) == 1
    async with aclosing(bodies()) as second:
        assert await anext(second) == "beat"
    programs(lab)[0].kill()
    await servicer.aclose()
    assert not programs(lab)


async def test_the_agent_has_the_credential_for_itself(lab: Lab) -> None:
    config = lab.config()
    await lab.stand_in(config)
    await until(lambda: len(programs(lab)) == 1)
    memory = Path(config.runtime.host_memory_root)
    found = credential_folder(memory, Party.JOB) / CREDENTIAL
    assert found.read_text() == "secret"
    modes = [path.stat().st_mode & 0o777 for path in (memory, found.parent, found)]
    assert modes == [0o700, 0o700, 0o600]


async def test_a_folder_of_another_user_or_of_the_launcher_is_refused(lab: Lab) -> None:
    config = lab.config()
    memory = Path(config.runtime.host_memory_root)
    start = lab.hosted(config).start(memory)
    (memory / MARK).unlink()
    with held(memory / LOCK, ValueError), pytest.raises(grpc.aio.AioRpcError, match="of a job that this machine start"):
        [_ async for _ in calls(lab, start)]
    elsewhere = lab.folder / "elsewhere"
    _become_link(memory, elsewhere)
    with pytest.raises(grpc.aio.AioRpcError, match="is another user's"):
        [_ async for _ in calls(lab, start)]
    assert sorted(os.listdir(elsewhere)) == ["credentials", LOCK]


async def test_what_a_killed_launcher_left_on_this_machine_goes(lab: Lab) -> None:
    """The cluster has another keeper now, and the job is started from there."""
    config = lab.config()
    memory = Path(config.runtime.host_memory_root)
    start = lab.hosted(config).start(memory)
    (memory / MARK).unlink()
    with held(memory / LOCK, ValueError):
        (memory / "left").touch()
    async with aclosing(calls(lab, start, stays=True)) as call:
        assert (await anext(call)).WhichOneof("body") == "started"
        assert not (memory / "left").exists()
        assert (memory / MARK).is_file()


def _become_link(path: Path, to: Path) -> None:
    path.rename(to)
    path.symlink_to(to)


async def test_a_stand_in_waits_for_an_agent_that_is_not_there_yet(lab: Lab) -> None:
    await lab.server.stop(grace_s=0)
    with kept_port() as port:
        endpoint = f"{LOOPBACK}:{port}"
        lab.server = await lab.serve(endpoint)
        await lab.server.stop(grace_s=0)
        config = lab.config()
        stand_in = await lab.stand_in(config)
        assert stand_in.stderr is not None
        assert b"the agent of b at" in await stand_in.stderr.readline()
        lab.server = await lab.serve(endpoint)
    await until(lambda: len(programs(lab)) == 1)
    assert stand_in.returncode is None


async def test_a_refusal_ends_a_stand_in_for_good(lab: Lab) -> None:
    config = lab.config()
    hosted = lab.hosted(config)
    (lab.folder / "memory" / "x").mkdir()
    write_private(hosted.config, config.to_json().replace(str(lab.folder / "jobs"), str(lab.folder / "other")))
    stand_in = await lab.started(hosted)
    assert await stand_in.wait() == ENDS_AGAIN
    assert stand_in.stderr is not None
    assert b"is not the config of job small" in await stand_in.stderr.read()


async def test_a_process_ends_with_its_call(lab: Lab) -> None:
    config = lab.config()
    stand_in = await lab.stand_in(config)
    await until(lambda: len(programs(lab)) == 1)
    memory = Path(config.runtime.host_memory_root)
    await until(memory.is_dir)
    stand_in.kill()
    await stand_in.wait()
    await until(lambda: not programs(lab) and not memory.exists())


async def test_a_silent_caller_is_gone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LOST_S", 5.0)
    monkeypatch.setattr(machine, "BEAT_S", 0.1)
    start = lab.hosted(lab.config()).start(Path(lab.config().runtime.host_memory_root))
    bodies = [response.WhichOneof("body") async for response in calls(lab, start, stays=True)]
    assert bodies[0] == "started"
    assert set(bodies[1:]) == {"beat"}
    await until(lambda: not programs(lab))


async def test_an_agent_that_is_gone_is_told(lab: Lab) -> None:
    stand_in = await lab.stand_in(lab.config())
    await until(lambda: len(programs(lab)) == 1)
    await lab.server.stop(grace_s=0)
    assert await stand_in.wait() == 1
    assert stand_in.stderr is not None
    assert b"the agent of b at" in await stand_in.stderr.read()
    await until(lambda: not programs(lab))


def _without_config(start: machine_pb2.ProcessStart) -> None:
    start.config = "/nowhere/config.json"


def _of_another_node(start: machine_pb2.ProcessStart) -> None:
    start.node = "n7"


def _of_no_role(start: machine_pb2.ProcessStart) -> None:
    start.role = "shell"


def _logs_elsewhere(start: machine_pb2.ProcessStart) -> None:
    start.log = str(Path(start.log).parents[3] / "outside.out")


def _writes_elsewhere(start: machine_pb2.ProcessStart) -> None:
    start.files["credentials/job/../../../outside"] = b"x"


def _writes_another_credential(start: machine_pb2.ProcessStart) -> None:
    start.files["credentials/operator/credential.pem"] = b"x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_config, "output_dir has to be on storage that all machines share"),
        (_of_another_node, "'n7' is no node of job small, which has n0"),
        (_of_no_role, "'shell' is no component"),
        (_logs_elsewhere, "is not in the job's folder"),
        (_writes_elsewhere, "is no file of a job's credential"),
        (_writes_another_credential, "is no file of a job's credential"),
    ],
)
async def test_what_cannot_run_here_is_refused_and_nothing_is_written_outside_host_memory(
    lab: Lab, change: Callable[[machine_pb2.ProcessStart], None], message: str
) -> None:
    config = lab.config()
    start = lab.hosted(config).start(Path(config.runtime.host_memory_root))
    before = sorted(lab.folder.rglob("*"))
    change(start)
    with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
        [_ async for _ in calls(lab, start)]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sorted(lab.folder.rglob("*")) == before
    assert not programs(lab)


async def test_a_question_for_gates_makes_nothing_and_refuses_a_root_that_is_not_there(lab: Lab) -> None:
    root = lab.folder / "gates"
    before = sorted(lab.folder.rglob("*"))
    channels = Channels(default_timeout_s=60.0, tls=Credentials(lab.folder / "operator"))
    stub = machine_pb2_grpc.MachineStub(channels.connect(lab.server.endpoint, Identity("lab", Party.NODE, "b")))
    for asked, told in ((str(root), "make it, on a local disk"), ("gates", "there is no folder gates for gates")):
        with pytest.raises(PeerRefused, match=told):
            await stub.GetGates(machine_pb2.GetGatesRequest(root=asked, nodes=["n0"]))
    with pytest.raises(PeerRefused):
        await stub.GetGates(machine_pb2.GetGatesRequest(root=str(lab.folder), nodes=["../n0"]))
    assert not (await stub.GetGates(machine_pb2.GetGatesRequest(root=str(lab.folder), nodes=["n0"]))).gates
    assert sorted(lab.folder.rglob("*")) == before
    await channels.close()


async def test_a_folder_in_host_memory_that_is_not_the_agents_is_refused(lab: Lab) -> None:
    config = lab.config()
    foreign = lab.folder / "memory" / f"tidegate-{os.getuid() + 1}-00"
    config = config.model_copy(update={"runtime": config.runtime.model_copy(update={"host_memory_root": str(foreign)})})
    start = lab.hosted(config).start(foreign)
    before = sorted(foreign.iterdir())
    with pytest.raises(grpc.aio.AioRpcError, match="give it the same --host-memory-root"):
        [_ async for _ in calls(lab, start)]
    assert sorted(foreign.iterdir()) == before


async def test_a_job_cannot_ask_an_agent(lab: Lab) -> None:
    config = lab.config()
    start = lab.hosted(config).start(Path(config.runtime.host_memory_root))
    with pytest.raises(grpc.aio.AioRpcError, match="job/small of cluster lab may not call") as refused:
        [_ async for _ in calls(lab, start, who="job")]
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_machines_are_checked_before_a_start(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_machines(lab.config().cluster)
    monkeypatch.setattr("tidegate.runtime.inventory.versions", lambda: {"torch": "0.0.1"})
    with pytest.raises(CannotStart, match=r"cluster\.machines: b has t\S+ .*, and this one .*: install the same"):
        await check_machines(lab.config().cluster)
    monkeypatch.undo()
    nobody = lab.config(machines=[{"name": "b", "agent": f"{LOOPBACK}:1", "nodes": ["n0"]}])
    with pytest.raises(CannotStart, match="start it there: tidegate agent --listen"):
        await check_machines(nobody.cluster)
    other = lab.config(machines=[{"name": "c", "agent": lab.server.endpoint, "nodes": ["n0"]}])
    with pytest.raises(CannotStart, match=r"cluster\.machines: c"):
        await check_machines(other.cluster)
    twin = await lab.serve(credentials="twin")
    first, *_ = lab.config().cluster.machines
    second = first.model_copy(update={"name": "d", "agent": twin.endpoint})
    both = lab.config().cluster.model_copy(update={"machines": (first, second)})
    with pytest.raises(CannotStart, match=r"cluster\.machines: d is the same machine as b"):
        await check_machines(both)
    await twin.stop(grace_s=0)


async def test_what_a_config_names_has_to_be_on_every_machine(lab: Lab) -> None:
    job = load_job(lab.config())
    (lab.folder / "weights").mkdir()
    (lab.folder / "data.jsonl").touch()
    found = job.config.model_copy(
        update={
            "model": job.config.model.model_copy(update={"path": str(lab.folder / "weights")}),
            "evaluation": EvaluationSection(every=1, data=str(lab.folder / "data.jsonl")),
        }
    )
    job = replace(job, config=found)
    await check_machines(found.cluster, job)
    (lab.folder / "weights").rmdir()
    (lab.folder / "data.jsonl").unlink()
    with pytest.raises(CannotStart) as refused:
        await check_machines(found.cluster, job)
    for missing in ("weights (model.path)", "data.jsonl (evaluation.data)"):
        assert f"no {lab.folder / missing}" in str(refused.value)
    assert "put it on storage that all machines have, at the same path" in str(refused.value)


async def test_clocks_are_noted_and_an_agent_that_does_not_answer_costs_a_note(lab: Lab, tmp_path: Path) -> None:
    config = lab.config()
    async with noted_clocks(config.cluster, tmp_path):
        await until((tmp_path / FILE).exists)
    ((node, offsets),) = Clocks.read(tmp_path).offsets.items()
    assert node == "n0"
    assert abs(offsets[0].offset_ns) <= offsets[0].error_ns, "it is this machine"
    await lab.server.stop(grace_s=0)
    (tmp_path / FILE).unlink()
    with capture_logs() as logs:
        async with noted_clocks(config.cluster, tmp_path):
            await until(lambda: bool(logs))
    assert logs[0]["event"] == "the clock is not known"
    assert not (tmp_path / FILE).exists()


def test_an_agent_does_not_start_with_a_credential_that_is_not_a_nodes(tmp_path: Path) -> None:
    own = tmp_path / "operator"
    Authority.create(tmp_path / "ca", "lab").issue(Identity("lab", Party.OPERATOR, "me"), own)
    words = ["-m", "cli", "agent", "--listen", "127.0.0.1:0", "--credentials", str(own)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=30, check=False)
    want = f"tidegate: {own} is the credential of operator/me of cluster lab: an agent's is of a node\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", want)
