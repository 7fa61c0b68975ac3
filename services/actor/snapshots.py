"""The actor's side of weight snapshots: every rank writes its shards, and the lead keeps the reference policy.

Invariants:
- A snapshot is published only when all its files are complete. [test_snapshots: names_each_file_once]
- The reference is version 0 of the job, bit for bit, in every incarnation. [test_snapshots: later_incarnation_finds]
- Once there is a reference, a whole one exists at any moment, even after a crash.
  [test_snapshots: leaves_the_former_one]
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from google.protobuf import json_format

from tidegate.checksums import combined_checksum, file_checksum
from tidegate.codec import WireError, check_file_name, encode_grants, message_of_json
from tidegate.folder_swap import empty_partial, recover, swap_in
from tidegate.job import snapshot_folder
from tidegate.json_text import parse_json
from tidegate.runtime.lead import LeadTools
from tidegate.types import node_of
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire

_MESSAGE = "snapshot.json"


class ReferenceMissing(ValueError):
    """The job's folder lacks the reference policy that a resume needs."""


class SnapshotShelf:
    """Publishes versions of the weights."""

    def __init__(self, tools: LeadTools) -> None:
        self._tools = tools
        self._node = tools.node
        self._reference: types_pb2.Snapshot | None = None

    async def publish(self, version: int, *, incarnation: int) -> types_pb2.Snapshot:
        """Have every rank write its shards into its node's host memory. Returns the snapshot when all are written."""
        crew, config = self._tools.crew, self._tools.job.config
        members = crew.members
        calls = {
            grant: wire.WorkerCall(
                publish=wire.Publish(
                    version=version,
                    folder=str(snapshot_folder(config, node_of(grant.gpu), incarnation=incarnation, version=version)),
                )
            )
            for grant in members
        }
        replies = await crew.ask_all(calls)
        shards = [
            types_pb2.SnapshotShard(
                node=node_of(grant.gpu),
                endpoint=crew.endpoint(node_of(grant.gpu)),
                file=reply.published.file,
                size_bytes=reply.published.size_bytes,
                checksum=reply.published.checksum,
            )
            for grant, reply in zip(members, replies, strict=True)
            if reply.published.file
        ]
        weights_sum = sum(reply.published.weights_sum for reply in replies) % (1 << 64)
        return self._snapshot(version, incarnation, shards, f"{weights_sum:016x}")

    async def reference(self, published: types_pb2.Snapshot) -> types_pb2.Snapshot | None:
        """The reference policy, readable in this incarnation. None where the job has no KL term."""
        if self._tools.job.config.algorithm.kl_coefficient == 0:
            return None
        if published.version == 0:
            await self._keep(published)
            self._reference = published
        elif self._reference is None or self._reference.incarnation != published.incarnation:
            self._reference = await self._restore(published.incarnation)
        return self._reference

    async def _keep(self, snapshot: types_pb2.Snapshot) -> None:
        folder = Path(await self._tools.crew.fetch(snapshot, self._node))
        await asyncio.to_thread(_copy_in, folder, self._tools.folder.reference, snapshot)

    async def _restore(self, incarnation: int) -> types_pb2.Snapshot:
        kept = self._tools.folder.reference

        def folder_of(version: int) -> Path:
            return snapshot_folder(self._tools.job.config, self._node, incarnation=incarnation, version=version)

        snapshot = await asyncio.to_thread(copy_out, kept, folder_of)
        for shard in snapshot.shards:
            shard.node, shard.endpoint = self._node, self._tools.crew.endpoint(self._node)
        return self._snapshot(snapshot.version, incarnation, list(snapshot.shards), snapshot.weights_checksum)

    def _snapshot(
        self, version: int, incarnation: int, shards: list[types_pb2.SnapshotShard], weights_checksum: str
    ) -> types_pb2.Snapshot:
        return types_pb2.Snapshot(
            job=self._tools.job_id,
            incarnation=incarnation,
            version=version,
            grants=encode_grants(self._tools.crew.members),
            shards=sorted(shards, key=lambda shard: shard.file),
            checksum=combined_checksum({shard.file: shard.checksum for shard in shards}),
            weights_checksum=weights_checksum,
        )


def _copy_in(folder: Path, kept: Path, snapshot: types_pb2.Snapshot) -> None:
    """Replace the kept files with the snapshot's files in `folder`.

    The former files go only when these are complete."""
    partial = empty_partial(kept)
    for shard in snapshot.shards:
        shutil.copyfile(folder / shard.file, partial / shard.file)
    (partial / _MESSAGE).write_text(json_format.MessageToJson(snapshot))
    swap_in(partial, kept)


def copy_out(kept: Path, folder_of: Callable[[int], Path]) -> types_pb2.Snapshot:
    """Check the kept files and copy them to the folder of their version. Returns the kept snapshot message."""
    recover(kept)
    try:
        snapshot = message_of_json(parse_json((kept / _MESSAGE).read_bytes()), types_pb2.Snapshot())
        for shard in snapshot.shards:
            check_file_name(shard.file, field="SnapshotShard.file")
            if file_checksum(kept / shard.file, like=shard.checksum) != shard.checksum:
                raise WireError(f"{shard.file} is damaged")
    except ValueError as error:
        raise ReferenceMissing(f"reference policy {kept}: {error}; start the job anew") from error
    except OSError as error:
        raise ReferenceMissing(
            f"reference policy {kept}: {error.strerror}; a job writes it at its start, and a resume with a KL term "
            "needs it: start the job anew"
        ) from error
    folder = folder_of(snapshot.version)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in snapshot.shards:
        shutil.copyfile(kept / shard.file, folder / shard.file)
    return snapshot
