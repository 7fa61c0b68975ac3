"""A node's snapshots of weights in host memory: keeps them, serves them to other nodes, fetches and drops them.

A file is at `<root>/<job>/<incarnation>/<version>/<file>`, where workers of this node write and read it too. A fetched
file has another name until its size and checksum are those that its writer reported. After that it never changes.

Invariants:
- No name from outside leads out of the root. [test_snapshots: names_that_are_no_plain_file_names]
- A snapshot is refused when its writer's tokens are older than those of an earlier version (`SnapshotTokens`). So a
  superseded actor cannot slip its weights in. [test_snapshots: superseded_writer_is_refused]
- A file that its writer's instance no longer serves comes from any other node that has it.
  [test_snapshots: from_another_node_that_has_it]
- Any number of callers that ask for one snapshot share one transfer. [test_snapshots: a_snapshot_is_fetched]
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tidegate.checksums import FileDigest, combined_checksum, file_checksum
from tidegate.codec import WireError, check_file_name, decode_grants, decode_job, require
from tidegate.types import GpuId, Grant, JobId, NodeId, Token
from tidegate.v1 import types_pb2


class SnapshotUnavailable(LookupError):
    """A file of the snapshot is missing, or differs from its writer's report. The version cannot be fetched."""


class StaleSnapshot(RuntimeError):
    """The snapshot was written under superseded tokens."""


class ShardSource(Protocol):
    """Reads a file of a snapshot from another node."""

    def read(
        self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, *, timeout_s: float
    ) -> AsyncIterator[bytes]:
        """The bytes of the file in order. SnapshotUnavailable or StaleSnapshot."""
        ...


@dataclass(frozen=True, slots=True)
class FetchedSnapshot:
    """`fetched_bytes` came from other nodes in this call."""

    folder: Path
    fetched_bytes: int


@dataclass(slots=True)
class SnapshotTokens:
    """The tokens that wrote each known version. For each GPU, tokens never shrink from a version to a later one.

    An old version with its own old tokens stays valid (the reference policy).
    """

    _seen: dict[tuple[JobId, GpuId], list[tuple[tuple[int, int], Token]]] = field(default_factory=dict)

    def check(self, job: JobId, *, incarnation: int, version: int, grants: Iterable[Grant]) -> None:
        """StaleSnapshot, or notes the tokens."""
        at = (incarnation, version)
        written_under = list(grants)
        for grant in written_under:
            newest = max((token for seen, token in self._seen.get((job, grant.gpu), []) if seen <= at), default=None)
            if newest is not None and grant.token < newest:
                raise StaleSnapshot(
                    f"version {version} of {job} was written on {grant.gpu} under token {grant.token}; an earlier one "
                    f"was written there under {newest}, so its writer had lost the GPU: ask the actor's lead again"
                )
        for grant in written_under:
            # A version adds nothing when an earlier version has the same token.
            seen = self._seen.setdefault((job, grant.gpu), [])
            if not any(before <= at and token == grant.token for before, token in seen):
                seen.append((at, grant.token))


class SnapshotStore:
    """The snapshots under one node's root. One event loop uses it."""

    def __init__(self, root: Path, *, node: NodeId, source: ShardSource) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root
        self._node = node
        self._source = source
        self._tokens = SnapshotTokens()
        self._fetches: dict[Path, asyncio.Task[int]] = {}
        self._verified: set[tuple[Path, str]] = set()

    def folder(self, job: JobId, *, incarnation: int, version: int) -> Path:
        return self._root / job / str(incarnation) / str(version)

    async def fetch(self, snapshot: types_pb2.Snapshot, *, timeout_s: float) -> FetchedSnapshot:
        """Brings every file here and verifies it. WireError, StaleSnapshot, SnapshotUnavailable or TimeoutError."""
        folder = self._check(snapshot)
        fetch = self._fetches.get(folder)
        if fetch is None:
            fetch = asyncio.create_task(self._bring(snapshot, folder, timeout_s=timeout_s), name=f"fetch-{folder}")
            self._fetches[folder] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(folder, None))
        async with asyncio.timeout(timeout_s):
            return FetchedSnapshot(folder, await asyncio.shield(fetch))

    def file_to_serve(
        self, job: str, *, incarnation: int, version: int, file: str, grants: Sequence[types_pb2.Grant]
    ) -> Path:
        """The path of the file that another node requests. WireError, StaleSnapshot or SnapshotUnavailable."""
        checked_job = decode_job(job, field="FetchShardRequest.job")
        check_file_name(file, field="FetchShardRequest.file")
        self._tokens.check(checked_job, incarnation=incarnation, version=version, grants=decode_grants(grants))
        path = self.folder(checked_job, incarnation=incarnation, version=version) / file
        if not path.is_file():
            raise SnapshotUnavailable(
                f"{file} of version {version} (incarnation {incarnation}) of {job} is not on node {self._node}: it was "
                "dropped, or never written here"
            )
        return path

    def drop(self, job: JobId, *, before_version: int, keep: Sequence[int]) -> int:
        """Frees older versions of every incarnation. Returns how many."""
        versions = [
            folder
            for folder in sorted((self._root / job).glob("*/*"))
            if folder.name.isdecimal() and int(folder.name) < before_version and int(folder.name) not in keep
        ]
        for folder in versions:
            shutil.rmtree(folder, ignore_errors=True)
        dropped = set(versions)
        self._verified = {(path, checksum) for path, checksum in self._verified if path.parent not in dropped}
        return len(versions)

    def _check(self, snapshot: types_pb2.Snapshot) -> Path:
        require(snapshot, "job", "shards", "checksum")
        job = decode_job(snapshot.job, field="Snapshot.job")
        for shard in snapshot.shards:
            require(shard, "node", "checksum")
            check_file_name(shard.file, field="SnapshotShard.file")
        checksums = {shard.file: shard.checksum for shard in snapshot.shards}
        if len(checksums) != len(snapshot.shards):
            raise WireError(f"Snapshot.shards of version {snapshot.version} list a file twice; list each file once")
        if (combined := combined_checksum(checksums)) != snapshot.checksum:
            raise WireError(f"Snapshot.checksum is {snapshot.checksum}, its files make it {combined}")
        self._tokens.check(
            job, incarnation=snapshot.incarnation, version=snapshot.version, grants=decode_grants(snapshot.grants)
        )
        return self.folder(job, incarnation=snapshot.incarnation, version=snapshot.version)

    async def _bring(self, snapshot: types_pb2.Snapshot, folder: Path, *, timeout_s: float) -> int:
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        sizes = [await self._bring_file(snapshot, shard, folder, timeout_s=timeout_s) for shard in snapshot.shards]
        return sum(sizes)

    async def _bring_file(
        self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, folder: Path, *, timeout_s: float
    ) -> int:
        path = folder / shard.file
        if (path, shard.checksum) in self._verified and path.exists():
            return 0
        fetched_bytes = 0
        if not path.exists():
            fetched_bytes = await self._from_any(snapshot, shard, path, timeout_s=timeout_s)
        else:
            found = (path.stat().st_size, await asyncio.to_thread(file_checksum, path, like=shard.checksum))
            _check_content(shard, found, where=str(path))
        self._verified.add((path, shard.checksum))
        return fetched_bytes

    async def _from_any(
        self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, path: Path, *, timeout_s: float
    ) -> int:
        """Ask the writer's instance first, then the others. Raises the first failure: the others only may have it."""
        first: Exception | None = None
        if shard.node == self._node:
            first = SnapshotUnavailable(
                f"{shard.file} of version {snapshot.version} was written on this node ({self._node}) and is gone "
                f"from {path.parent}: it was dropped, or the host's memory was lost"
            )
        own = [] if shard.node == self._node else [shard.endpoint]
        for endpoint in dict.fromkeys((*own, *shard.other_endpoints)):
            asked = types_pb2.SnapshotShard()
            asked.CopyFrom(shard)
            asked.endpoint = endpoint
            try:
                return await self._transfer(snapshot, asked, path, timeout_s=timeout_s)
            # The next one may have it. A writer that lost its GPU is refused everywhere, so that error is raised.
            except (SnapshotUnavailable, ConnectionError) as error:
                first = first or error
        assert first is not None, "a shard of another node has an endpoint"
        raise first

    async def _transfer(
        self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, path: Path, *, timeout_s: float
    ) -> int:
        # Another instance of this node may write the same file: the last one replaces it with equal bytes.
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        digest = FileDigest(shard.checksum)
        size_bytes = 0
        try:
            with partial.open("wb") as stream:
                async for chunk in self._source.read(snapshot, shard, timeout_s=timeout_s):
                    size_bytes += len(chunk)
                    if size_bytes > shard.size_bytes:
                        break
                    digest.update(chunk)
                    stream.write(chunk)
            _check_content(shard, (size_bytes, digest.checksum()), where=f"{shard.node} ({shard.endpoint})")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return size_bytes


def _check_content(shard: types_pb2.SnapshotShard, found: tuple[int, str], *, where: str) -> None:
    want = (shard.size_bytes, shard.checksum)
    if found != want:
        raise SnapshotUnavailable(
            f"{shard.file} from {where} has {found[0]} bytes with checksum {found[1]}, its writer said {want[0]} bytes "
            f"and {want[1]}: drop the version and publish it again"
        )
