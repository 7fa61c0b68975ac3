"""A node's snapshots: fetched once, verified, served only from inside the root, refused from superseded writers."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from tidegate.checksums import combined_checksum
from tidegate.codec import WireError, encode_grants
from tidegate.runtime.snapshots import SnapshotStore, SnapshotUnavailable, StaleSnapshot
from tidegate.types import GpuId, Grant, JobId, NodeId, Token
from tidegate.v1 import types_pb2

JOB, HERE, THERE = JobId("demo"), NodeId("n1"), NodeId("n0")


class Elsewhere:
    """The other nodes' files, in memory. It counts the reads, and a test can block it."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.num_reads = 0
        self.go = asyncio.Event()
        self.go.set()

    async def read(
        self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, *, timeout_s: float
    ) -> AsyncIterator[bytes]:
        self.num_reads += 1
        await self.go.wait()
        data = self.files[shard.file]
        yield data[:3]
        yield data[3:]


def checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def grants(counter: int, gpu: str = "n0/0") -> list[Grant]:
    return [Grant(GpuId(gpu), Token(1, counter))]


def snapshot(
    files: Mapping[str, bytes], *, version: int = 3, node: NodeId = THERE, written_under: Sequence[Grant] = ()
) -> types_pb2.Snapshot:
    shards = [
        types_pb2.SnapshotShard(node=node, endpoint="there", file=file, size_bytes=len(data), checksum=checksum(data))
        for file, data in files.items()
    ]
    return types_pb2.Snapshot(
        job=JOB,
        incarnation=1,
        version=version,
        shards=shards,
        checksum=combined_checksum({shard.file: shard.checksum for shard in shards}),
        grants=encode_grants(written_under),
    )


def store(root: Path, source: Elsewhere) -> SnapshotStore:
    return SnapshotStore(root, node=HERE, source=source)


FILES = {"rank-0": b"weights of rank 0", "rank-1": b"weights of rank 1"}


async def test_a_snapshot_is_fetched_once_however_many_ask(tmp_path: Path) -> None:
    source = Elsewhere(FILES)
    source.go.clear()
    kept = store(tmp_path, source)
    asking = [asyncio.create_task(kept.fetch(snapshot(FILES), timeout_s=60)) for _ in range(4)]
    await asyncio.sleep(0)
    source.go.set()
    fetched = await asyncio.gather(*asking)
    again = await kept.fetch(snapshot(FILES), timeout_s=60)
    assert source.num_reads == 2
    assert {one.folder for one in fetched} == {tmp_path / "demo" / "1" / "3"}
    assert {file.name: file.read_bytes() for file in again.folder.iterdir()} == FILES
    assert again.fetched_bytes == 0


@pytest.mark.parametrize("sent", [b"weights of rank X", b"weights", b"weights of rank 0, and more"])
async def test_a_file_that_differs_from_its_writers_report_never_gets_its_name(tmp_path: Path, sent: bytes) -> None:
    source = Elsewhere(FILES | {"rank-0": sent})
    kept = store(tmp_path, source)
    with pytest.raises(SnapshotUnavailable, match="rank-0"):
        await kept.fetch(snapshot(FILES), timeout_s=60)
    assert os.listdir(kept.folder(JOB, incarnation=1, version=3)) == []
    source.files["rank-0"] = FILES["rank-0"]
    assert (await kept.fetch(snapshot(FILES), timeout_s=60)).fetched_bytes == 34


async def test_files_of_this_node_are_verified_where_they_lie(tmp_path: Path) -> None:
    source = Elsewhere({})
    kept = store(tmp_path, source)
    with pytest.raises(SnapshotUnavailable, match="written on this node"):
        await kept.fetch(snapshot(FILES, node=HERE), timeout_s=60)
    folder = kept.folder(JOB, incarnation=1, version=3)
    for file, data in FILES.items():
        (folder / file).write_bytes(data)
    assert (await kept.fetch(snapshot(FILES, node=HERE), timeout_s=60)).fetched_bytes == 0
    other = store(tmp_path, source)
    (folder / "rank-0").write_bytes(b"something else")
    with pytest.raises(SnapshotUnavailable, match="14 bytes"):
        await other.fetch(snapshot(FILES, node=HERE), timeout_s=60)


@pytest.mark.parametrize("file", ["../rank-0", "a/b", ".hidden", "", "x" * 200])
async def test_names_that_are_no_plain_file_names_are_refused(tmp_path: Path, file: str) -> None:
    kept = store(tmp_path, Elsewhere({}))
    with pytest.raises(WireError, match="plain file name"):
        await kept.fetch(snapshot({file: b"x"}), timeout_s=60)
    with pytest.raises(WireError, match="plain file name"):
        kept.file_to_serve(JOB, incarnation=1, version=3, file=file, grants=[])
    with pytest.raises(WireError, match="job name"):
        kept.file_to_serve("../other", incarnation=1, version=3, file="rank-0", grants=[])


async def test_a_snapshot_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    kept = store(tmp_path, Elsewhere(FILES))
    wrong = snapshot(FILES)
    wrong.checksum = checksum(b"")
    with pytest.raises(WireError, match="its files make it"):
        await kept.fetch(wrong, timeout_s=60)
    twice = snapshot(FILES)
    twice.shards.append(twice.shards[0])
    with pytest.raises(WireError, match="twice"):
        await kept.fetch(twice, timeout_s=60)


async def test_a_superseded_writer_is_refused_and_old_versions_stay_welcome(tmp_path: Path) -> None:
    kept = store(tmp_path, Elsewhere(FILES))
    await kept.fetch(snapshot(FILES, version=5, written_under=grants(7)), timeout_s=60)
    for version in (5, 6):
        with pytest.raises(StaleSnapshot, match=r"under token 1\.6"):
            await kept.fetch(snapshot(FILES, version=version, written_under=grants(6)), timeout_s=60)
    await kept.fetch(snapshot(FILES, version=1, written_under=grants(2)), timeout_s=60)
    await kept.fetch(snapshot(FILES, version=6, written_under=grants(8)), timeout_s=60)
    await kept.fetch(snapshot(FILES, version=6, written_under=grants(1, gpu="n0/1")), timeout_s=60)
    with pytest.raises(StaleSnapshot):
        kept.file_to_serve(JOB, incarnation=1, version=6, file="rank-0", grants=encode_grants(grants(7)))


async def test_older_versions_are_dropped_except_those_to_keep(tmp_path: Path) -> None:
    kept = store(tmp_path, Elsewhere(FILES))
    for version in (0, 1, 2, 3):
        await kept.fetch(snapshot(FILES, version=version), timeout_s=60)
    assert kept.drop(JOB, before_version=3, keep=[0]) == 2
    assert sorted(path.name for path in (tmp_path / "demo" / "1").iterdir()) == ["0", "3"]
    with pytest.raises(SnapshotUnavailable, match="dropped"):
        kept.file_to_serve(JOB, incarnation=1, version=1, file="rank-0", grants=[])
    assert (await kept.fetch(snapshot(FILES, version=1), timeout_s=60)).fetched_bytes == 34


class Nodes(Elsewhere):
    """Instances by endpoint. An instance that is not among them is gone."""

    def __init__(self, files: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__({})
        self.files_at = dict(files)
        self.asked: list[str] = []

    async def read(
        self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, *, timeout_s: float
    ) -> AsyncIterator[bytes]:
        self.asked.append(shard.endpoint)
        if shard.endpoint not in self.files_at:
            raise ConnectionRefusedError(f"no instance at {shard.endpoint}")
        if shard.file not in self.files_at[shard.endpoint]:
            raise SnapshotUnavailable(f"{shard.file} is not at {shard.endpoint}")
        yield self.files_at[shard.endpoint][shard.file]


async def test_a_file_comes_from_another_node_that_has_it_where_its_writer_is_gone(tmp_path: Path) -> None:
    source = Nodes({"n2": {"rank-0": b"damaged weights.."}, "n3": {}, "n4": FILES})
    wanted = snapshot(FILES)
    for shard in wanted.shards:
        shard.other_endpoints[:] = ["n2", "n3", "n4"]
    fetched = await store(tmp_path, source).fetch(wanted, timeout_s=60)
    assert {file.name: file.read_bytes() for file in fetched.folder.iterdir()} == FILES
    assert source.asked == ["there", "n2", "n3", "n4"] * 2
    del source.files_at["n4"]
    with pytest.raises(ConnectionRefusedError, match="no instance at there"):
        await store(tmp_path / "anew", source).fetch(wanted, timeout_s=60)


async def test_a_file_of_this_node_that_is_gone_comes_from_another_node(tmp_path: Path) -> None:
    source = Nodes({"n4": FILES})
    wanted = snapshot(FILES, node=HERE)
    for shard in wanted.shards:
        shard.other_endpoints[:] = ["n4"]
    assert (await store(tmp_path, source).fetch(wanted, timeout_s=60)).fetched_bytes == 34
    assert source.asked == ["n4", "n4"]
