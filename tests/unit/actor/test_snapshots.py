"""Versions are published when complete. The reference policy is version 0 of the job in every incarnation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.actor.lead import ActorLead
from services.actor.snapshots import ReferenceMissing, SnapshotShelf
from tests.component_bench import JOB, NODES, Bench, bench
from tests.unit.actor.fake_ranks import FakeRank, Ranks
from tidegate.checksums import combined_checksum, file_checksum
from tidegate.codec import encode_grants
from tidegate.job import snapshot_folder
from tidegate.types import Role
from tidegate.v1 import types_pb2


class Shelving:
    """Running ranks, and the snapshot shelves of successive leads."""

    def __init__(self, opened: Bench[ActorLead, FakeRank], ranks: Ranks) -> None:
        self.bench = opened
        self.ranks = ranks

    async def shelf(self) -> SnapshotShelf:
        """The shelf of a new lead, which takes over the ranks of the one before or starts them."""
        lead = self.bench.new_lead()
        lead.crew.note_addresses(self.bench.header().instances)
        await lead.crew.take_over()
        if not lead.crew.members:
            await lead.crew.start(self.bench.grants(), transition="start")
            for number, grant in enumerate(self.bench.grants()):
                self.ranks.of[grant.gpu].take_seat(number)
        return SnapshotShelf(lead.tools)

    def train(self, update: str) -> None:
        for rank in self.ranks.of.values():
            rank.weights.append(update)

    def content(self, snapshot: types_pb2.Snapshot) -> list[str]:
        """The weights in the files that the snapshot names."""
        folder = snapshot_folder(
            self.bench.config, NODES[0], incarnation=snapshot.incarnation, version=snapshot.version
        )
        (shard,) = snapshot.shards
        assert file_checksum(folder / shard.file) == shard.checksum
        weights: list[str] = json.loads((folder / shard.file).read_text())
        return weights


@asynccontextmanager
async def shelving(tmp_path: Path, *, kl_coefficient: float = 0.1) -> AsyncIterator[Shelving]:
    ranks = Ranks()
    algorithm = {"kl_coefficient": kl_coefficient}
    async with bench(tmp_path, Role.ACTOR, ActorLead, ranks.make, algorithm=algorithm) as opened:
        yield Shelving(opened, ranks)


async def test_a_snapshot_names_each_file_once_with_its_place_and_its_checksum(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        of_version = await (await of.shelf()).publish(3, incarnation=2)
        folder = snapshot_folder(of.bench.config, NODES[0], incarnation=2, version=3)
        checksum = file_checksum(folder / "rank0")
        assert of_version == types_pb2.Snapshot(
            job=JOB,
            incarnation=2,
            version=3,
            grants=encode_grants(of.bench.grants()),
            shards=[
                types_pb2.SnapshotShard(
                    node=NODES[0],
                    endpoint="at-n0",
                    file="rank0",
                    size_bytes=(folder / "rank0").stat().st_size,
                    checksum=checksum,
                )
            ],
            checksum=combined_checksum({"rank0": checksum}),
            weights_checksum="0" * 16,
        )


async def test_a_published_version_is_not_changed_by_later_updates(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        shelf = await of.shelf()
        first = await shelf.publish(0, incarnation=1)
        of.train("1.0.0")
        second = await shelf.publish(1, incarnation=1)
        assert (of.content(first), of.content(second)) == ([], ["1.0.0"])
        assert first.checksum != second.checksum
        assert (first.weights_checksum, second.weights_checksum) == (f"{0:016x}", f"{1:016x}")


async def test_without_a_kl_term_there_is_no_reference(tmp_path: Path) -> None:
    async with shelving(tmp_path, kl_coefficient=0.0) as of:
        shelf = await of.shelf()
        assert await shelf.reference(await shelf.publish(0, incarnation=1)) is None
        assert not of.bench.folder.reference.exists()


async def test_the_reference_stays_version_0_when_later_versions_are_published(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        shelf = await of.shelf()
        first = await shelf.publish(0, incarnation=1)
        assert await shelf.reference(first) == first
        of.train("1.0.0")
        assert await shelf.reference(await shelf.publish(1, incarnation=1)) == first


async def test_a_later_incarnation_finds_the_same_reference_on_its_own_node(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        shelf = await of.shelf()
        first = await shelf.publish(0, incarnation=1)
        await shelf.reference(first)
        of.train("1.0.0")
        for incarnation in (2, 3):
            resumed = await of.shelf()
            published = await resumed.publish(1, incarnation=incarnation)
            reference = await resumed.reference(published)
            assert reference is not None
            assert (reference.version, reference.incarnation) == (0, incarnation)
            assert reference.checksum == first.checksum
            assert of.content(reference) == []
            assert await resumed.reference(published) == reference, "it is restored once"


async def test_a_job_that_starts_anew_replaces_the_reference_of_an_earlier_one(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        shelf = await of.shelf()
        await shelf.reference(await shelf.publish(0, incarnation=1))
        of.train("another start")
        again = await of.shelf()
        await again.reference(await again.publish(0, incarnation=2))
        resumed = await of.shelf()
        reference = await resumed.reference(await resumed.publish(1, incarnation=3))
        assert reference is not None
        assert of.content(reference) == ["another start"]


async def test_a_crash_while_the_reference_is_replaced_leaves_the_former_one(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        shelf = await of.shelf()
        first = await shelf.publish(0, incarnation=1)
        await shelf.reference(first)
        kept = of.bench.folder.reference
        kept.rename(kept.with_name(f".{kept.name}.former"))
        of.train("1.0.0")
        resumed = await of.shelf()
        reference = await resumed.reference(await resumed.publish(1, incarnation=2))
        assert reference is not None
        assert reference.checksum == first.checksum


async def test_a_resume_without_its_reference_fails_with_the_remedy(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        shelf = await of.shelf()
        with pytest.raises(ReferenceMissing, match="a resume with a KL term needs it: start the job anew"):
            await shelf.reference(await shelf.publish(1, incarnation=2))


async def test_a_damaged_reference_is_refused_and_its_file_is_named(tmp_path: Path) -> None:
    async with shelving(tmp_path) as of:
        shelf = await of.shelf()
        await shelf.reference(await shelf.publish(0, incarnation=1))
        (of.bench.folder.reference / "rank0").write_text('["another policy"]')
        resumed = await of.shelf()
        with pytest.raises(ReferenceMissing, match="rank0 is damaged"):
            await resumed.reference(await resumed.publish(1, incarnation=2))
