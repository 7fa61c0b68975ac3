"""The store on Redis (or valkey): `Cells` as hashes under one hash tag. Every access is one EVALSHA.

Invariants:
- Each script compares the run id of its server and the term with those of the last adoption (guard.lua).
  [test_store_adoption: refused_after_another_client_adopted]
- The writes of a script are one unit in the append-only file and on replicas.
  [test_redis_store: all_keys_share_one_hash_tag]
- A call ends within the socket timeouts. A call without an answer raises StoreUnavailable.
  [test_redis_store: given_up_in_bounded_time]

The client library retries nothing, because silent retries hide unknown outcomes: one call hung 9.6 s in a partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tidegate.adapters import tables as values
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Cell, Reading, Session, not_adopted
from tidegate.adapters.permissions import store_user
from tidegate.adapters.redis_keys import STORE_KEY, table_key
from tidegate.certs.authority import CA_CERT, CREDENTIAL, Credential
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable
from tidegate.ports.store import Identity

SOCKET_TIMEOUT_S = 1.0
"""A script takes under 3 ms (1,000 GPUs). A second without an answer is a stall or a partition."""


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
    """`Cells` of a Redis server. `place` names the server in errors."""

    def __init__(self, client: Redis, *, place: str) -> None:
        self._client = client
        self._place = place
        self._identity = Script.load("identity")
        self._read = Script.load("read")
        self._swap = Script.load("swap")
        self._open = Script.load("open")
        self._shut = Script.load("shut")

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
        call = self._client.evalsha if writes else self._client.evalsha_ro
        try:
            try:
                return cast(list[Any], await call(script.sha, len(keys), *keys, *args))
            except NoScriptError:  # the script did not run: the server restarted or never had it
                await self._client.script_load(script.text)
                return cast(list[Any], await call(script.sha, len(keys), *keys, *args))
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


def redis_store(url: str, *, credential: Path | None = None, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> CellStore:
    """A client of the server at `url` (redis://[user:password@]host:port/db). The first call connects it.

    `credential`: the folder of who connects, in place of the URL's user and password. CertsError."""
    return CellStore(redis_cells(url, credential=credential, socket_timeout_s=socket_timeout_s))


def redis_cells(url: str, *, credential: Path | None = None, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> RedisCells:
    client = Redis.from_url(
        url,
        **_proof(url, credential),
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=socket_timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    where = client.connection_pool.connection_kwargs
    place = where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
    return RedisCells(client, place=place)


def _proof(url: str, credential: Path | None) -> dict[str, Any]:
    """What shows the server who connects: user and password, and the certificate where it speaks TLS."""
    if credential is None:
        return {}
    own = Credential.load(credential)
    proof: dict[str, Any] = {"username": store_user(own.identity), "password": own.store_password}
    if url.startswith("rediss:"):
        # The library reads the files at each connection, so that a renewed certificate counts.
        proof["ssl_ca_certs"] = str(credential / CA_CERT)
        proof["ssl_certfile"] = proof["ssl_keyfile"] = str(credential / CREDENTIAL)
    return proof


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
