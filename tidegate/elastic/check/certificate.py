"""Certifies that the target holds what the source held: every rank sums its tensors, and all compare the same sums.

A dead source rank has sums only if a member sums the tensors that it left. Otherwise a stage that is not whole is not
compared, and the certificate names every tensor that no stage of the source has whole.

Invariants:
- The outcome is a function of the sums alone, so all ranks that have them decide alike.
  [test_certificate: the_digest_is_that_of_the_logical_state]
- Sums travel as plain integers only. [test_certificate: sums_travel_as_plain_integers]
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tidegate.elastic.check.level import Level
from tidegate.elastic.check.sums import WeightedSums
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Holding, Part, RegionCopy
from tidegate.elastic.plan.regions import Block

_Entry = TypeVar("_Entry", Holding, RegionCopy)

_KINDS = tuple(StateKind)
_HEAD = struct.Struct("<3Q4I")
_ENTRY = struct.Struct("<HBQQQ")
_RANK = struct.Struct("<qQ")


class CertificateMismatch(RuntimeError):
    """The target does not hold what the source holds. The source is as it was."""


class RegionSum(NamedTuple):
    name: str
    kind: StateKind
    region: int
    """For a region that is held: a digest of its boxes. For a region that travels: the rank at the other end."""
    num_elements: int
    total: int


@dataclass(frozen=True, slots=True)
class RankSums:
    """The sums of one rank's part."""

    target_bytes: int = 0
    local_bytes: int = 0
    received_bytes: int = 0
    source_sums: tuple[RegionSum, ...] = ()
    target_sums: tuple[RegionSum, ...] = ()
    sent: tuple[RegionSum, ...] = ()
    received: tuple[RegionSum, ...] = ()

    def encode(self) -> bytes:
        lists = (self.source_sums, self.target_sums, self.sent, self.received)
        encoded = [_HEAD.pack(self.target_bytes, self.local_bytes, self.received_bytes, *map(len, lists))]
        for name, kind, region, num_elements, total in (entry for entries in lists for entry in entries):
            text = name.encode()
            encoded += [_ENTRY.pack(len(text), _KINDS.index(kind), region, num_elements, total), text]
        return b"".join(encoded)

    @classmethod
    def decode(cls, payload: bytes) -> RankSums:
        target_bytes, local_bytes, received_bytes, *lengths = _HEAD.unpack_from(payload)
        at, lists = _HEAD.size, []
        for length in lengths:
            entries = []
            for _ in range(length):
                size, kind, region, num_elements, total = _ENTRY.unpack_from(payload, at)
                at += _ENTRY.size + size
                entries.append(RegionSum(payload[at - size : at].decode(), _KINDS[kind], region, num_elements, total))
            lists.append(tuple(entries))
        return cls(target_bytes, local_bytes, received_bytes, *lists)


def encode_all(sums: Mapping[int, RankSums]) -> bytes:
    """Encode sums by rank, those of ranks that a member stands in for too."""
    payloads = {rank: of.encode() for rank, of in sums.items()}
    return b"".join(_RANK.pack(rank, len(payload)) + payload for rank, payload in payloads.items())


def decode_all(payload: bytes) -> dict[int, RankSums]:
    """Inverse of `encode_all`."""
    found, at = {}, 0
    while at < len(payload):
        rank, size = _RANK.unpack_from(payload, at)
        at += _RANK.size + size
        found[rank] = RankSums.decode(payload[at - size : at])
    return found


@dataclass(frozen=True, slots=True)
class Certificate:
    """The common result of all ranks."""

    digest: str
    """A digest of the logical tensors' sums, the same in every layout. With `new`: of the transfers. With `off`: empty.
    """
    moved_bytes: int
    """The bytes received from other ranks."""
    minimum_bytes: int
    """The bytes that the target's ranks need and did not hold."""
    local_bytes: int
    unchecked: tuple[TensorKey, ...] = ()
    """Tensors, or parts of them, for which no rank had the source's sums."""


def sum_part(
    level: Level, part: Part, sources: Tensors, targets: Tensors, *, kinds: AbstractSet[StateKind] = frozenset(_KINDS)
) -> RankSums:
    """The sums of these kinds after the transfer. The bytes are counted whole.

    For a dead rank, `sources` may be the tensors that it left, with its part."""
    sums = WeightedSums()
    target_bytes = sum(
        block.num_elements * holding.itemsize for holding in part.target_holdings for block in holding.blocks
    )
    local_bytes = sum(copy.size_bytes for copy in part.local)
    counted = target_bytes, local_bytes, part.received_bytes
    match level:
        case Level.OFF:
            return RankSums(*counted)
        case Level.NEW:
            sent = _sums_of_transfers(sums, sources, _of_kinds(part.sends, kinds), is_sent=True)
            received = _sums_of_transfers(sums, targets, _of_kinds(part.receives, kinds), is_sent=False)
            return RankSums(*counted, sent=sent, received=received)
        case Level.FULL:
            source_sums = _sums_of_holdings(sums, sources, _of_kinds(part.source_holdings, kinds))
            target_sums = _sums_of_holdings(sums, targets, _of_kinds(part.target_holdings, kinds))
            return RankSums(*counted, source_sums=source_sums, target_sums=target_sums)


def certify(level: Level, sums: Mapping[int, RankSums], source: Mesh, target: Mesh) -> Certificate:
    """Compare the sums by world rank: all target ranks', and those of the source ranks that exist.

    Raises CertificateMismatch.
    """
    found: Mapping[tuple[object, ...], int] = {}
    unchecked: tuple[TensorKey, ...] = ()
    if level is Level.NEW:
        found, unchecked = _compare_transfers(sums, target)
    elif level is Level.FULL:
        found, unchecked = _compare_ends(sums, source, target)
    return Certificate(
        digest=_digest(found) if level is not Level.OFF else "",
        moved_bytes=sum(of.received_bytes for of in sums.values()),
        minimum_bytes=sum(sums[rank].target_bytes - sums[rank].local_bytes for rank in target.ranks),
        local_bytes=sum(of.local_bytes for of in sums.values()),
        unchecked=unchecked,
    )


def _of_kinds(entries: Iterable[_Entry], kinds: AbstractSet[StateKind]) -> Iterator[_Entry]:
    return (entry for entry in entries if entry.kind in kinds)


def _sums_of_holdings(sums: WeightedSums, tensors: Tensors, holdings: Iterable[Holding]) -> tuple[RegionSum, ...]:
    holdings = tuple(holdings)
    totals = sums.of_each((tensors[of.name, of.kind], of.blocks) for of in holdings)
    return tuple(
        RegionSum(of.name, of.kind, _region_of(of), sum(block.num_elements for block in of.blocks), total)
        for of, total in zip(holdings, totals, strict=True)
    )


def _region_of(holding: Holding) -> int:
    boxes = sorted((block.row, block.col, block.rows, block.cols) for block in holding.blocks)
    return int.from_bytes(hashlib.blake2b(repr(boxes).encode(), digest_size=8).digest())


def _sums_of_transfers(
    sums: WeightedSums, tensors: Tensors, copies: Iterable[RegionCopy], *, is_sent: bool
) -> tuple[RegionSum, ...]:
    """One sum for each tensor and other end."""
    found: defaultdict[tuple[str, StateKind, int], list[Block]] = defaultdict(list)
    for copy in copies:
        other = copy.target_rank if is_sent else copy.source_rank
        offset, stride = (
            (copy.source_offset, copy.source_stride) if is_sent else (copy.target_offset, copy.target_stride)
        )
        found[copy.name, copy.kind, other].append(Block(copy.row, copy.col, copy.rows, copy.cols, offset, stride))
    totals = sums.of_each((tensors[name, kind], blocks) for (name, kind, _), blocks in found.items())
    return tuple(
        RegionSum(name, kind, other, sum(block.num_elements for block in blocks), total)
        for ((name, kind, other), blocks), total in zip(found.items(), totals, strict=True)
    )


def _compare_transfers(
    sums: Mapping[int, RankSums], target: Mesh
) -> tuple[Mapping[tuple[object, ...], int], tuple[TensorKey, ...]]:
    sent = {(entry.name, entry.kind, rank, entry.region): entry.total for rank, of in sums.items() for entry in of.sent}
    found: dict[tuple[object, ...], int] = {}
    unchecked: set[TensorKey] = set()
    for rank in target.ranks:
        for entry in sums[rank].received:
            key = (entry.name, entry.kind, entry.region, rank)
            if entry.region not in sums:
                unchecked.add((entry.name, entry.kind))
            elif sent.get(key) != entry.total:
                raise CertificateMismatch(
                    f"{entry.name} {entry.kind}: rank {entry.region} sent {entry.num_elements} elements to rank {rank} "
                    f"with the sum {sent.get(key)}, which there is {entry.total}; the old layout is as it was"
                )
            found[key] = entry.total
    return found, tuple(sorted(unchecked))


class _Reading(NamedTuple):
    """A tensor as the ranks of one pipeline stage hold it together."""

    num_elements: int
    total: int
    ranks: tuple[int, ...]


def _compare_ends(
    sums: Mapping[int, RankSums], source: Mesh, target: Mesh
) -> tuple[Mapping[tuple[object, ...], int], tuple[TensorKey, ...]]:
    before = _readings({rank: sums[rank].source_sums for rank in source.ranks if rank in sums}, source)
    after = _readings({rank: sums[rank].target_sums for rank in target.ranks}, target)
    is_complete = all(rank in sums for rank in source.ranks)
    found: dict[tuple[object, ...], int] = {}
    unchecked: list[TensorKey] = []
    for key, (want, *others) in after.items():
        # Some ranks of a source stage may be dead; the target is always whole.
        known = [reading for reading in before.get(key, []) if is_complete or reading.num_elements == want.num_elements]
        if not known and not is_complete:
            unchecked.append(key)
        elif not known:
            raise CertificateMismatch(
                f"{key[0]} {key[1]}: ranks {want.ranks} of the target hold it, and no rank of the source did"
            )
        for reading in (*known, *others):
            if reading[:2] != want[:2]:
                raise CertificateMismatch(
                    f"{key[0]} {key[1]}: target ranks {want.ranks} hold {want.num_elements} elements with the sum "
                    f"{want.total}, and ranks {reading.ranks} {reading.num_elements} with {reading.total}; the old "
                    "layout is as it was"
                )
        found[key] = want.total
    return found, tuple(unchecked)


def _readings(sums: Mapping[int, tuple[RegionSum, ...]], mesh: Mesh) -> dict[TensorKey, list[_Reading]]:
    """The readings of each tensor, stage by stage.

    Raises CertificateMismatch where two ranks have different sums of one region.
    """
    regions: dict[TensorKey, dict[int, dict[int, tuple[RegionSum, list[int]]]]] = {}
    stages = {rank: index // mesh.num_stage_ranks for index, rank in enumerate(mesh.ranks)}
    for rank in sorted(sums):
        for entry in sums[rank]:
            of_stage = regions.setdefault((entry.name, entry.kind), {}).setdefault(stages[rank], {})
            first, ranks = of_stage.setdefault(entry.region, (entry, []))
            if first != entry:
                raise CertificateMismatch(
                    f"{entry.name} {entry.kind}: ranks {ranks[0]} and {rank} hold the same {entry.num_elements} "
                    f"elements with the sums {first.total} and {entry.total}; the old layout is as it was"
                )
            ranks.append(rank)
    return {
        key: [
            _Reading(
                sum(entry.num_elements for entry, _ in of_stage.values()),
                sum(entry.total for entry, _ in of_stage.values()) % 2**64,
                tuple(sorted(rank for _, ranks in of_stage.values() for rank in ranks)),
            )
            for _, of_stage in sorted(by_stage.items())
        ]
        for key, by_stage in regions.items()
    }


def _digest(found: Mapping[tuple[object, ...], int]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(found, key=str):
        digest.update(f"{' '.join(map(str, key))}={found[key]}\n".encode())
    return digest.hexdigest()
