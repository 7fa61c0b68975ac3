"""A simulation of all ranks' messages, side by side, with blocking sends and receives."""

from __future__ import annotations

from collections import Counter

from tests.unit.elastic import cutter
from tidegate.elastic.plan.buckets import Batch


def carry_out(batches: dict[int, tuple[Batch, ...]], source: cutter.World, target: cutter.World) -> None:
    """Every rank finishes a batch before the next. A message passes when both of its ends have reached it.

    Raises AssertionError when no rank can continue.
    """
    at = dict.fromkeys(batches, 0)
    done: dict[int, set[tuple[int, int, int]]] = {rank: set() for rank in batches}
    while waiting := [rank for rank in batches if at[rank] < len(batches[rank])]:
        offered: Counter[tuple[int, int, int]] = Counter()
        for rank in waiting:
            for bucket in batches[rank][at[rank]]:
                message = (bucket.source_rank, bucket.target_rank, bucket.number)
                offered[message] += message not in done[rank]
        passing = {message for message, ends in offered.items() if ends == 2}
        assert passing, f"ranks {waiting} wait for each other"
        for rank in waiting:
            for bucket in batches[rank][at[rank]]:
                message = (bucket.source_rank, bucket.target_rank, bucket.number)
                if message in passing:
                    done[rank].add(message)
                    if rank == bucket.target_rank:
                        contents = cutter.packed(bucket, source[bucket.source_rank])
                        cutter.unpack(bucket, contents, target[bucket.target_rank])
            if all((b.source_rank, b.target_rank, b.number) in done[rank] for b in batches[rank][at[rank]]):
                at[rank] += 1
