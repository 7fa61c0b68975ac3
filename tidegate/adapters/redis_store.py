"""The store on Redis (or valkey): `Cells` as hashes under one hash tag. Every access is one EVALSHA.

Invariants:
- Each script compares the run id of its server and the term with those of the last adoption (guard.lua).
  [test_store_adoption: refused_after_another_client_adopted]
- The writes of a script are one unit in the append-only file and on replicas.
  [test_redis_store: all_keys_share_one_hash_tag]
- A call ends within the socket timeouts. A call without an answer raises StoreUnavailable.
  [test_redis_store: given_up_in_bounded_time]

With replicas to wait for (WAIT), a write counts once so many have it. Where fewer answer in time, its outcome is
unknown. Nothing that this client reads afterwards counts before replicas have that write too: else a repeat would find
it done, and a failover would lose it. [test_redis_failover: a_write_that_no_replica_has_is_unknown]
Such a server may have been cut off from its cluster, so the next call asks the Sentinels which one is primary.
[test_redis_failover: a_primary_that_was_cut_off_is_left]

The client library retries nothing, because silent retries hide unknown outcomes: one call hung 9.6 s in a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tidegate.adapters import tables as values
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Cell, Reading, Session, not_adopted
from tidegate.adapters.permissions import store_user
from tidegate.adapters.redis_keys import STORE_KEY, table_key
from tidegate.adapters.redis_url import RedisUrl
from tidegate.certs.authority import CA_CERT, CREDENTIAL, Credential
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable
from tidegate.ports.store import Identity

SOCKET_TIMEOUT_S = 1.0
"""A script takes under 3 ms (1,000 GPUs). A second without an answer is a stall or a partition."""
WAIT_SHARE = 0.5
"""The part of this time in which replicas have to answer. The rest is the primary's own."""


@dataclass(frozen=True, slots=True)
class Script:
    """One Lua script and its name for EVALSHA."""

    text: str
    sha: str

    @classmethod
    def load(cls, name: str) -> Script:
        folder = files("tidegate.adapters") / "lua"
        text = (folder / "guard.lua").read_text() + (folder / f"{name}.lua").read_text()
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisCells:
    """`Cells` of a Redis server. `place` names the server in errors. `num_replicas`: those that have a write before it
    counts, within `wait_ms`."""

    def __init__(self, client: Redis, *, place: str, num_replicas: int = 0, wait_ms: int = 0) -> None:
        self._client = client
        self._place = place
        self._num_replicas = num_replicas
        self._wait_ms = wait_ms
        self._unsettled_key = STORE_KEY
        self._num_unknown = self._num_settled = 0
        """Writes of unknown outcome so far, and those of them that replicas have if the server has them."""
        self._identity = Script.load("identity")
        self._read = Script.load("read")
        self._swap = Script.load("swap")
        self._open = Script.load("open")
        self._shut = Script.load("shut")
        self._settle = Script.load("settle")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def identity(self) -> Identity:
        return _identity(await self._run(self._identity, [STORE_KEY], [], writes=False))

    async def read(
        self, session: Session | None, *, tables: tuple[str, ...] = (), cells: tuple[Cell, ...] = ()
    ) -> Reading:
        keys = _Keys(tables)
        args: list[str | bytes | int] = [session.run_id if session else "", session.term if session else 0, len(tables)]
        for cell in cells:
            args += [keys.index(cell.table), cell.field]
        answer = await self._run(self._read, keys.names, args, writes=False)
        _refuse(session, answer)
        whole = {table: _pairs(table, found) for table, found in zip(tables, answer[2], strict=True)}
        return Reading(int(answer[1]), whole, dict(zip(cells, answer[3], strict=True)))

    async def swap(
        self, session: Session, *, expected: Mapping[Cell, bytes | None], writes: Mapping[Cell, bytes | None]
    ) -> bool:
        keys = _Keys(())
        args: list[str | bytes | int] = [session.run_id, session.term, len(expected)]
        args += keys.cells(expected) + keys.cells(writes)
        answer = await self._run(self._swap, keys.names, args)
        _refuse(session, answer)
        return bool(answer[0] == b"ok")

    async def open(self, expected: Identity, *, term: int, writes: Mapping[Cell, bytes | None]) -> bool:
        keys = _Keys(())
        args: list[str | bytes | int] = [expected.run_id, expected.adopted_run_id or "", expected.term, term]
        args += keys.cells(writes)
        return bool((await self._run(self._open, keys.names, args))[0] == b"ok")

    async def shut(self, expected: Identity) -> bool:
        args: list[str | bytes | int] = [expected.run_id, expected.adopted_run_id or "", expected.term]
        return bool((await self._run(self._shut, [STORE_KEY], args))[0] == b"ok")

    async def _run(
        self, script: Script, keys: list[str], args: list[str | bytes | int], *, writes: bool = True
    ) -> list[Any]:
        """A script that only reads is called as one, so that a user who may not write may call it."""
        try:
            if self._num_settled < self._num_unknown:
                num_unknown = self._num_unknown
                await self._written(self._settle, [self._unsettled_key], [])
                self._num_settled = max(self._num_settled, num_unknown)
            if writes and self._num_replicas:
                return await self._written(script, keys, args)
            return await self._called(script, keys, args, writes=writes)
        except StoreUnavailable:
            raise
        except (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError) as error:
            raise StoreUnavailable(
                f"the store at {self._place} did not answer ({type(error).__name__}: {error}); whether a write took "
                "effect is unknown: call again, and see that the server runs and is its cluster's primary"
            ) from error
        except ResponseError as error:
            if str(error).startswith("MASTERDOWN"):
                raise StoreUnavailable(
                    f"the store at {self._place} is a replica without its primary: {error}"
                ) from error
            if "WRONGTYPE" in str(error):
                named = ", ".join(dict.fromkeys((STORE_KEY, *keys)))
                raise values.damaged(f"one of the store's keys {named} is no hash: {error}") from error
            raise

    async def _called(
        self, script: Script, keys: list[str], args: list[str | bytes | int], *, writes: bool
    ) -> list[Any]:
        call = self._client.evalsha if writes else self._client.evalsha_ro
        try:
            return cast(list[Any], await call(script.sha, len(keys), *keys, *args))
        except NoScriptError:  # the script did not run: the server restarted or never had it
            await self._client.script_load(script.text)
            return cast(list[Any], await call(script.sha, len(keys), *keys, *args))

    async def _written(self, script: Script, keys: list[str], args: list[str | bytes | int]) -> list[Any]:
        """Calls the script and waits for the replicas, on one connection. StoreUnavailable where too few have it."""
        is_known = False
        try:
            answer, num_acknowledged = await self._and_wait(script, keys, args)
            if isinstance(answer, NoScriptError):
                await self._client.script_load(script.text)
                answer, num_acknowledged = await self._and_wait(script, keys, args)
            if isinstance(answer, Exception):
                is_known = isinstance(answer, ResponseError)
                raise answer
            if answer[0] == b"ok" and num_acknowledged < self._num_replicas:
                # It may be cut off from its replicas, and be primary no more: the next call asks the Sentinels again.
                await self._client.connection_pool.disconnect(inuse_connections=False)
                raise StoreUnavailable(
                    f"the store at {self._place} wrote, but {num_acknowledged} of {self._num_replicas} replicas have "
                    f"it after {self._wait_ms} ms, so a failover may lose it: call again, and see that its replicas run"
                )
            is_known = True
            return answer
        finally:
            if not is_known:
                self._num_unknown += 1
                self._unsettled_key = keys[0] if keys else STORE_KEY

    async def _and_wait(
        self, script: Script, keys: list[str], args: list[str | bytes | int]
    ) -> tuple[list[Any] | Exception, int]:
        async with self._client.pipeline(transaction=False) as both:
            both.evalsha(script.sha, len(keys), *keys, *args)
            both.wait(self._num_replicas, self._wait_ms)
            answer, num_acknowledged = await both.execute(raise_on_error=False)
        if isinstance(num_acknowledged, Exception):
            raise num_acknowledged
        return answer, int(num_acknowledged)


def redis_store(
    url: str,
    *,
    credential: Path | None = None,
    num_replicas: int | None = None,
    socket_timeout_s: float = SOCKET_TIMEOUT_S,
) -> CellStore:
    """A client of the server at `url`, which `RedisUrl` reads. The first call connects it.

    - `credential`: the folder of who connects, in place of the URL's user and password. CertsError.
    - `num_replicas`: those that have a write before it counts. None: one where Sentinels are asked, else none.
    """
    cells = redis_cells(url, credential=credential, num_replicas=num_replicas, socket_timeout_s=socket_timeout_s)
    return CellStore(cells)


def redis_cells(
    url: str,
    *,
    credential: Path | None = None,
    num_replicas: int | None = None,
    socket_timeout_s: float = SOCKET_TIMEOUT_S,
) -> RedisCells:
    found = RedisUrl.parse(url)
    options: dict[str, Any] = {
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": socket_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    proof = _proof(found, credential)
    if found.sentinels:
        told: dict[str, Any] = {**options, **_tls_of(found, proof)}
        asked = _Sentinels(found.sentinels, sentinel_kwargs=told, **options)  # type: ignore[no-untyped-call]
        login: dict[str, Any] = {**found.login, **proof}
        client = asked.master_for(found.primary, redis_class=Redis, **login)
        place = f"{found.primary} of the Sentinels {', '.join(f'{host}:{port}' for host, port in found.sentinels)}"
    else:
        client = Redis.from_url(url, **{**options, **proof})
        where = client.connection_pool.connection_kwargs
        place = where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
    waits_for = num_replicas if num_replicas is not None else int(bool(found.sentinels))
    return RedisCells(client, place=place, num_replicas=waits_for, wait_ms=round(socket_timeout_s * 1000 * WAIT_SHARE))


def _proof(url: RedisUrl, credential: Path | None) -> dict[str, Any]:
    """What shows the server who connects: user and password, and the certificate where it speaks TLS."""
    tls: dict[str, Any] = {"ssl": True} if url.has_tls and url.sentinels else {}
    if credential is None:
        return tls
    own = Credential.load(credential)
    proof: dict[str, Any] = {"username": store_user(own.identity), "password": own.store_password, **tls}
    if url.has_tls:
        # The library reads the files at each connection, so that a renewed certificate counts.
        proof["ssl_ca_certs"] = str(credential / CA_CERT)
        proof["ssl_certfile"] = proof["ssl_keyfile"] = str(credential / CREDENTIAL)
    return proof


def _tls_of(url: RedisUrl, proof: Mapping[str, Any]) -> dict[str, Any]:
    """What Sentinels are shown: they have no users of ours."""
    return {name: value for name, value in proof.items() if name.startswith("ssl")} if url.has_tls else {}


class _Sentinels(Sentinel):
    """Believes, of a majority of the Sentinels, the one that knows of the latest failover. One that is cut off from the
    others, together with the old primary, still names that one."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """MasterNotFoundError: none names a primary that is up."""
        tasks = [asyncio.ensure_future(sentinel.sentinel_masters()) for sentinel in self.sentinels]
        told: list[dict[str, Any]] = []
        faults: list[str] = []
        try:
            for each in asyncio.as_completed(tasks):
                try:
                    told.append(cast(dict[str, Any], await each).get(service_name, {}))
                except (RedisConnectionError, RedisTimeoutError) as error:
                    faults.append(f"{type(error).__name__}: {error}")
                # One that hangs must not hold up every new connection.
                if len(told) > len(tasks) / 2:
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        named = [each for each in told if each and self.check_master_state(each, service_name)]
        if not named:
            raise MasterNotFoundError(f"No master found for {service_name!r}: {', '.join(faults) or told}")
        latest = max(named, key=lambda each: int(each["config-epoch"]))
        return latest["ip"], latest["port"]


class _Keys:
    """The keys of one script call: each table once, in the order of use."""

    def __init__(self, tables: tuple[str, ...]) -> None:
        self.names = [table_key(table) for table in tables]

    def index(self, table: str) -> int:
        """The table's index in KEYS, which Lua counts from 1."""
        name = table_key(table)
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name) + 1

    def cells(self, cells: Mapping[Cell, bytes | None]) -> list[str | bytes | int]:
        args: list[str | bytes | int] = []
        for cell, value in cells.items():
            args += [self.index(cell.table), cell.field, 0 if value is None else 1, value or b""]
        return args


def _identity(answer: list[Any]) -> Identity:
    run_id, adopted, term = answer[1:4]
    return values.read_identity(run_id.decode(), adopted, term)


def _refuse(session: Session | None, answer: list[Any]) -> None:
    if session is not None and answer[0] == b"refused":
        raise StoreNotAdopted(not_adopted(session, _identity(answer)))


def _pairs(table: str, flat: list[bytes]) -> dict[str, bytes]:
    found = zip(flat[::2], flat[1::2], strict=True)
    return {values.read_as(bytes.decode, field, Cell(table, repr(field))): value for field, value in found}
