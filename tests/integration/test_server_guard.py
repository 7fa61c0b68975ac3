"""Embedded servers with a guard: whom they let in, and what each may do there."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import nats.errors
import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.expired import issue_expired
from tests.server_credentials import nats_options, redis_options
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.redis_keys import STORE_KEY, table_key
from tidegate.adapters.redis_store import redis_store
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.runtime import server_kinds
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.runtime.server_kinds import VALKEY, Running, ServerGuard
from tidegate.types import InstanceId, JobId, Role

MATH, OTHER = JobId("math"), JobId("other")
SCHEDULER = Identity("lab", Party.SCHEDULER, "a")
PATIENCE_S = 10.0


class Lab:
    """Servers that let in a scheduler and two jobs, and everybody's credentials."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create(folder / "ca", "lab")
        self.own = self.credential(Identity("lab", Party.NODE, "n0"), addresses=["127.0.0.1"])
        users = SCHEDULER, *(Identity("lab", Party.JOB, job) for job in (MATH, OTHER))
        self.servers = EmbeddedServers(folder / "servers", guard=ServerGuard.of(self.own, *map(self.credential, users)))

    def credential(self, identity: Identity, *, addresses: tuple[str, ...] | list[str] = ()) -> Path:
        folder = self.folder / f"{identity.party}-{identity.name}"
        if not folder.exists():
            self.authority.issue(identity, folder, addresses=addresses)
        return folder

    def of(self, party: Party, name: str) -> Path:
        return self.credential(Identity("lab", party, name))

    async def refusal_by_nats(self, **options: Any) -> str:
        """AssertionError where it lets the caller in."""
        try:
            client = await nats.connect(
                self.servers.nats.url, allow_reconnect=False, connect_timeout=10, error_cb=_ignored, **options
            )
        except (nats.errors.Error, OSError, TimeoutError) as refused:
            return f"{type(refused).__name__}: {refused}"
        await client.close()
        raise AssertionError("NATS let the caller in")


async def _ignored(_: Exception) -> None:
    """Errors of a connection that is refused are raised too."""


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    found = Lab(tmp_path)
    async with found.servers:
        yield found


async def no_gates() -> GateReports:
    return {}


async def test_a_scheduler_and_a_job_have_all_the_rights_that_they_need(lab: Lab) -> None:
    scheduler, job = lab.of(Party.SCHEDULER, "a"), lab.of(Party.JOB, MATH)
    store = redis_store(lab.servers.store.url, credential=scheduler)
    await adopt(store, MemoryTermRegister(), no_gates)
    own = redis_store(lab.servers.store.url, credential=job)
    await own.attach()
    assert await own.next_boot(MATH, InstanceId("actor@n0")) > 0
    lead = await own.campaign(MATH, Role.ACTOR, instance=InstanceId("actor@n0"), endpoint="e", ttl_ms=1000)
    assert lead.instance == "actor@n0"
    bus = await NatsBus.connect(lab.servers.nats.url, name="test", credential=scheduler)
    await bus.streams.open_job(MATH)
    jobs = await NatsBus.connect(lab.servers.nats.url, name="test", credential=job)
    await jobs.streams.require_job(MATH)
    for each in (bus, jobs):
        await each.close()
    for client in (store, own):
        await client.aclose()


async def test_who_is_not_named_is_not_let_in_by_nats_without_a_right(lab: Lab) -> None:
    """No credential; one of the authority for somebody without rights; one of another authority; one that expired."""
    believing = ssl.create_default_context(cafile=lab.folder / "ca/ca.pem")
    assert await lab.refusal_by_nats(tls=believing)
    plain = await _plain_connect(lab.servers.nats.port)
    assert b"+OK" not in plain
    for party, name in ((Party.OPERATOR, "anna"), (Party.VIEWER, "ben"), (Party.NODE, "n1"), (Party.JOB, "third")):
        assert "Authorization Violation" in await lab.refusal_by_nats(**nats_options(lab.of(party, name)))
    foreign = Authority.create(lab.folder / "foreign", "lab")
    foreign.issue(SCHEDULER, lab.folder / "stranger")
    shutil.copy(lab.folder / "ca/ca.pem", lab.folder / "stranger/ca.pem")  # it believes the server
    assert await lab.refusal_by_nats(**nats_options(lab.folder / "stranger"))


async def test_an_expired_credential_is_not_let_in_by_nats_either(lab: Lab) -> None:
    folder = issue_expired(lab.authority, SCHEDULER, lab.folder / "expired")
    assert await lab.refusal_by_nats(**nats_options(folder))


@pytest.mark.parametrize(
    "subject",
    [
        "tg.events.other",
        "tg.samples.other.generated.1.0.0",
        "tg.state.math",
        "$KV.TG_TERM.store",
        "$JS.API.STREAM.DELETE.TG_EVENTS_MATH",
        "$JS.API.STREAM.PURGE.TG_EVENTS_MATH",
        "$JS.API.STREAM.MSG.DELETE.TG_EVENTS_MATH",
        "$JS.API.CONSUMER.MSG.NEXT.TG_SAMPLES_OTHER.actor",
        "_INBOX.scheduler.a.answer",
    ],
)
async def test_a_job_may_not_publish_on(lab: Lab, subject: str) -> None:
    violations = asyncio.Queue[str]()
    client = await _client_of(lab, violations)
    await client.publish(subject, b"x")
    assert "permissions violation for publish" in await asyncio.wait_for(violations.get(), PATIENCE_S)
    await client.close()


@pytest.mark.parametrize("subject", [">", "tg.events.other", "_INBOX.>", "_INBOX.scheduler.a.>", "tg.*.other.>"])
async def test_a_job_may_not_listen_on(lab: Lab, subject: str) -> None:
    violations = asyncio.Queue[str]()
    client = await _client_of(lab, violations)
    await client.subscribe(subject)
    assert "permissions violation for subscription" in await asyncio.wait_for(violations.get(), PATIENCE_S)
    await client.close()


async def test_who_is_not_named_is_not_let_in_by_redis(lab: Lab) -> None:
    url, anna = lab.servers.store.url, lab.of(Party.OPERATOR, "anna")
    stolen = redis_options(lab.of(Party.JOB, MATH)) | {"username": "scheduler/a"}
    for options in ({}, redis_options(anna), {"username": "scheduler/a", "password": "guessed"}, stolen):
        async with Redis.from_url(url, protocol=2, **options) as client:
            with pytest.raises((AuthenticationError, ResponseError), match=r"NOAUTH|Authentication|WRONGPASS|invalid"):
                await client.hget(STORE_KEY, "term")


async def test_a_job_may_write_no_key_of_another_job_and_nothing_of_the_scheduler(lab: Lab) -> None:
    async with Redis.from_url(lab.servers.store.url, protocol=2, **redis_options(lab.of(Party.JOB, MATH))) as client:
        await client.hset(table_key("leases:math"), "a", "1")
        assert await client.hget(STORE_KEY, "term") is None
        for key in ("store", "states", "leases:other", "commands:other", "leads:other"):
            with pytest.raises(NoPermissionError):
                await client.hset(table_key(key), "a", "1")
        for key in ("states", "leases:other"):
            with pytest.raises(NoPermissionError):
                await client.hget(table_key(key), "a")
        for command in (("FLUSHALL",), ("CONFIG", "GET", "dir"), ("SHUTDOWN",), ("KEYS", "*"), ("ACL", "LIST")):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)  # type: ignore[no-untyped-call]  # it takes any command
        script = await client.script_load("return redis.call('HSET', ARGV[1], 'term', '9')")
        with pytest.raises(ResponseError, match="No permissions"):
            await client.evalsha(script, 1, table_key("leases:math"), STORE_KEY)


async def test_no_password_is_in_the_process_list_or_in_a_file_of_the_servers(lab: Lab) -> None:
    passwords = [path.read_text() for path in lab.folder.glob("*/store.password")]
    assert len(passwords) == 4
    commands = [" ".join(psutil.Process(each.pid).cmdline()) for each in (lab.servers.nats, lab.servers.store)]
    files = [path for path in (lab.folder / "servers").rglob("*") if path.is_file()]
    texts = commands + [path.read_bytes().decode(errors="replace") for path in files]
    assert not [text for text in texts for password in passwords if password in text]
    assert stat.S_IMODE((lab.folder / "servers/valkey/users.acl").stat().st_mode) == 0o600


async def _client_of(lab: Lab, violations: asyncio.Queue[str]) -> Any:
    async def told(error: Exception) -> None:
        violations.put_nowait(str(error))

    options = nats_options(lab.of(Party.JOB, MATH))
    return await nats.connect(lab.servers.nats.url, error_cb=told, inbox_prefix="_INBOX.job.math", **options)


async def _plain_connect(port: int) -> bytes:
    """What NATS answers to a client that speaks no TLS, until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":true}\r\nPING\r\n')
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_who_could_not_be_let_in_is_let_in_by_the_next_call(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(running: Running, before: ServerGuard, guard: ServerGuard) -> None:
        raise OSError("valkey gave no answer within 5 s")

    late = lab.of(Party.JOB, "late")
    guard = ServerGuard.of(lab.own, lab.of(Party.SCHEDULER, "a"), lab.of(Party.JOB, MATH), late)
    with monkeypatch.context() as patched:
        patched.setattr(lab.servers.store, "_kind", replace(VALKEY, reload=silent))
        with pytest.raises(OSError, match="no answer"):
            await lab.servers.let_in(guard)
    await lab.servers.let_in(guard)
    async with Redis.from_url(lab.servers.store.url, protocol=2, **redis_options(late)) as client:
        assert await client.ping()


async def test_who_is_let_in_while_a_server_starts_is_let_in(lab: Lab) -> None:
    late = lab.of(Party.JOB, "late")
    guard = ServerGuard.of(lab.own, lab.of(Party.SCHEDULER, "a"), late)
    for server in (lab.servers.nats, lab.servers.store):
        os.kill(server.pid, signal.SIGKILL)
        await server.exited()
    starting = asyncio.create_task(lab.servers.start())
    while not lab.servers.store.is_running:  # noqa: ASYNC110 # the moment between is no event
        await asyncio.sleep(0)
    await lab.servers.let_in(guard)
    await starting
    async with Redis.from_url(lab.servers.store.url, protocol=2, **redis_options(late)) as client:
        assert await client.ping()
    await (await nats.connect(lab.servers.nats.url, **nats_options(late))).close()


async def test_a_server_that_ends_while_it_is_told_is_told_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut_off(running: Running, before: ServerGuard, guard: ServerGuard) -> None:
        raise asyncio.IncompleteReadError(b"", 2)

    guard = ServerGuard.of(lab.own, lab.of(Party.SCHEDULER, "a"), lab.of(Party.JOB, "late"))
    with monkeypatch.context() as patched:
        patched.setattr(lab.servers.store, "_kind", replace(VALKEY, reload=cut_off))
        with pytest.raises(OSError, match="valkey was not told who is let in: 0 bytes read"):
            await lab.servers.let_in(guard)
    await lab.servers.let_in(guard)
    async with Redis.from_url(lab.servers.store.url, protocol=2, **redis_options(lab.of(Party.JOB, "late"))) as client:
        assert await client.ping()


async def test_who_is_let_in_later_disturbs_nobody_and_who_is_put_out_has_no_right_any_more(lab: Lab) -> None:
    late, lost = lab.of(Party.JOB, "late"), list[str]()

    async def gone() -> None:
        lost.append("nats")

    scheduler, job = lab.of(Party.SCHEDULER, "a"), lab.of(Party.JOB, MATH)
    listening = await nats.connect(lab.servers.nats.url, disconnected_cb=gone, **nats_options(job))
    store = await Redis.from_url(lab.servers.store.url, **redis_options(job)).client()
    await store.ping()
    connection: Any = store.connection
    await lab.servers.let_in(ServerGuard.of(lab.own, scheduler, job, late))
    client = await nats.connect(lab.servers.nats.url, **nats_options(late))
    newcomer = Redis.from_url(lab.servers.store.url, **redis_options(late))
    await newcomer.ping()
    await connection.send_command("PING")
    assert await connection.read_response() == b"PONG", "it is still the connection of before"
    assert listening.is_connected
    assert not lost
    await client.close()
    await lab.servers.let_in(ServerGuard.of(lab.own, scheduler, job))
    assert "Authorization Violation" in await lab.refusal_by_nats(**nats_options(late))
    with pytest.raises(RedisConnectionError):
        await newcomer.ping()
    assert listening.is_connected
    assert not lost
    await lab.servers.stop()
    await lab.servers.start()
    assert "Authorization Violation" in await lab.refusal_by_nats(**nats_options(late)), "a restart remembers it"
    await listening.close()
    for each in (store, newcomer):
        await each.aclose()


async def test_who_is_in_has_the_rights_of_another_release_once_all_are_let_in_anew(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, job = lab.of(Party.SCHEDULER, "a"), lab.of(Party.JOB, MATH)
    listening = await nats.connect(lab.servers.nats.url, **nats_options(job))
    store = await Redis.from_url(lab.servers.store.url, **redis_options(job)).client()
    await store.ping()
    usual = server_kinds._store_user
    monkeypatch.setattr(server_kinds, "_store_user", lambda user: (found := usual(user)) and f"{found} -ping")
    guard = ServerGuard.of(lab.own, scheduler, job)
    await lab.servers.let_in(guard)
    await store.ping()
    await lab.servers.let_in(guard, anew=True)
    with pytest.raises(NoPermissionError, match="ping"):
        await store.ping()
    assert listening.is_connected
    await listening.close()
    await store.aclose()
