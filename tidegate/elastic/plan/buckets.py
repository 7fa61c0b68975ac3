"""The order in which the copies of a part travel, in buckets of bounded memory. No such order can deadlock.

- A bucket is staging memory that is packed, sent, received and unpacked as one message. All copies between two ranks
  travel in buckets. Both ranks make the same buckets from the same copies.
- Every message has a place in one order of all messages of all ranks: first messages within a host, then the others;
  then by round, where round k goes from the i-th rank to the (i + k)-th; then by number.
- A rank takes its messages in that order, in batches. It finishes one batch before it starts the next.

Why this cannot deadlock: the first unfinished message of all is in the current batch at both of its ends, whatever the
batches are. So some rank always makes progress. This holds with blocking sends and receives too, where a batch is one
message.

Invariants:
- No bucket is larger than half of the memory, so that a send and a receive fit together.
  [test_buckets: is_cut_into_rows]
- No batch is larger than the memory. [test_planner: no_order_deadlocks]
- Each copy's bytes are in exactly one bucket; those of a larger copy are in consecutive buckets.
  [test_planner: no_order_deadlocks]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tidegate.elastic.plan.plan import Part, RegionCopy


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message. Its copies lie one after another, row by row, without gaps.

    They are ordered by falling itemsize, so that each is aligned to its own.
    """

    source_rank: int
    target_rank: int
    number: int
    copies: tuple[RegionCopy, ...]

    @property
    def size_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self.copies)


Batch = tuple[Bucket, ...]


def schedule(
    part: Part, *, ranks: Iterable[int], memory_bytes: int, hosts: Mapping[int, str] | None = None
) -> tuple[Batch, ...]:
    """A rank's batches. `ranks` are those of the source and the target. All arguments but `part` are the same for all
    ranks.
    """
    return batches((*part.sends, *part.receives), ranks=ranks, memory_bytes=memory_bytes, hosts=hosts)


def batches(
    copies: Iterable[RegionCopy], *, ranks: Iterable[int], memory_bytes: int, hosts: Mapping[int, str] | None = None
) -> tuple[Batch, ...]:
    """The batches of the copies that one process sends or receives, for itself or for a dead rank.

    The order is an order of messages, so it does not matter which process carries them.
    """
    places = {rank: place for place, rank in enumerate(sorted(set(ranks)))}
    on = hosts or {}

    def order(bucket: Bucket) -> tuple[bool, int, int, int]:
        source, target = bucket.source_rank, bucket.target_rank
        far = on.get(source, "") != on.get(target, "")
        return far, (places[target] - places[source]) % len(places), bucket.number, places[source]

    return tuple(_to_batches(sorted(_buckets(copies, memory_bytes // 2), key=order), memory_bytes))


def _buckets(copies: Iterable[RegionCopy], size_bytes: int) -> Iterator[Bucket]:
    by_pair: dict[tuple[int, int], list[RegionCopy]] = {}
    for copy in copies:
        by_pair.setdefault((copy.source_rank, copy.target_rank), []).append(copy)
    for (source, target), between in by_pair.items():
        between.sort(key=lambda copy: (-copy.itemsize, copy.name, copy.kind, copy.row, copy.col))
        for number, packed in enumerate(_packed(between, size_bytes)):
            yield Bucket(source, target, number, packed)


def _packed(copies: Iterable[RegionCopy], size_bytes: int) -> Iterator[tuple[RegionCopy, ...]]:
    packed: list[RegionCopy] = []
    free_bytes = size_bytes
    for copy in copies:
        if size_bytes < copy.itemsize:
            raise ValueError(
                f"a bucket of {size_bytes} bytes holds no element of {copy.name} {copy.kind} ({copy.itemsize} bytes): "
                "allow more memory"
            )
        rest = [copy]
        while rest:
            if free_bytes < copy.itemsize:
                yield tuple(packed)
                packed, free_bytes = [], size_bytes
            fitting, others = _cut(rest.pop(), free_bytes // copy.itemsize)
            packed.append(fitting)
            free_bytes -= fitting.size_bytes
            rest += others
    if packed:
        yield tuple(packed)


def _cut(copy: RegionCopy, num_elements: int) -> tuple[RegionCopy, list[RegionCopy]]:
    """As much of a copy as fits, whole rows or else a part of one row; and the rest, last piece first."""
    if copy.num_elements <= num_elements:
        return copy, []
    if num_elements >= copy.cols:
        rows = num_elements // copy.cols
        return copy._replace(rows=rows), [_below(copy, rows)]
    row = copy._replace(rows=1)
    beside = row._replace(
        col=copy.col + num_elements,
        cols=copy.cols - num_elements,
        source_offset=copy.source_offset + num_elements,
        target_offset=copy.target_offset + num_elements,
    )
    return row._replace(cols=num_elements), ([_below(copy, 1)] if copy.rows > 1 else []) + [beside]


def _below(copy: RegionCopy, rows: int) -> RegionCopy:
    """A copy without its first rows."""
    return copy._replace(
        row=copy.row + rows,
        rows=copy.rows - rows,
        source_offset=copy.source_offset + rows * copy.source_stride,
        target_offset=copy.target_offset + rows * copy.target_stride,
    )


def _to_batches(buckets: Iterable[Bucket], memory_bytes: int) -> Iterator[Batch]:
    batch: list[Bucket] = []
    used_bytes = 0
    for bucket in buckets:
        if used_bytes + bucket.size_bytes > memory_bytes:
            yield tuple(batch)
            batch, used_bytes = [], 0
        batch.append(bucket)
        used_bytes += bucket.size_bytes
    if batch:
        yield tuple(batch)
