"""The rank processes of the leak tests: the resources of a process, early on and after a thousand switches."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.elastic.trainer_ranks import LEARNING_RATE, logical_state, minibatch, same, started
from tests.integration.elastic.world_ranks import usage
from tests.ranks import RankContext, Results
from tidegate.elastic.model.memory import SharedArena
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.types import Layout

UPDATE_EVERY = 25
"""In switches. Updates happen before the first measure too, so that it includes the resources of training."""
NUM_STRINGS = 100_000
"""More than the 87,381 that Python's table of interned strings holds before it has 2**18 places."""


def switches(
    context: RankContext, *, places: list[dict[str, Any]], num_switches: int, measured_every: int, **options: Any
) -> Results:
    """After each `measured_every` switches: descriptors, threads, resident bytes, files in shared memory."""
    _enlarge_string_table()
    measures, seconds = [], []
    first = places[0]
    with started(context, Layout(**first["layout"]), first.get("ranks"), **options) as trainer:
        is_same = True
        for switch in range(1, num_switches + 1):
            place = places[switch % len(places)]
            before = logical_state(trainer) if switch % UPDATE_EVERY == 0 else None
            report = trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"))
            seconds.append(report.total_s)
            if before is not None:
                is_same = is_same and same(before, logical_state(trainer))
                trainer.train_minibatch(minibatch(switch), LEARNING_RATE)
            if switch % measured_every == 0:
                measures.append([*usage(), _resident_bytes(), _num_files(trainer)])
        # Wait until all members have counted the files.
        trainer.world.barrier(trainer.world.membership.members)
    return {"measures": np.array(measures), "seconds": np.array(seconds), "is_same": np.array(is_same)}


def walk(context: RankContext, *, places: list[dict[str, Any]], **options: Any) -> Results:
    """After each switch the number of layouts whose memory this member holds; and whether the state never changed."""
    first, *others = places
    with started(context, Layout(**first["layout"]), first.get("ranks"), **options) as trainer:
        before = logical_state(trainer)
        is_same, counts = True, [num_with_pages(context)]
        for place in others:
            trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"))
            is_same = is_same and same(before, logical_state(trainer))
            counts.append(num_with_pages(context))
        trainer.world.barrier(trainer.world.membership.members)
    return {"counts": np.array(counts), "is_same": np.array(is_same)}


def num_with_pages(context: RankContext) -> int:
    """The number of this member's files in shared memory that have pages. There is one file per layout for its tensors,
    and one for their copies."""
    return sum(path.stat().st_blocks > 0 for path in context.tmpfs.glob(f"*-member{context.rank}-*"))


def _enlarge_string_table() -> None:
    """Switches intern and drop names. Once these have filled the table it grows by 3.7 MiB, a single time. Without this
    call that may be between any two measures."""
    strings = [sys.intern(f"{number} of the leak tests") for number in range(NUM_STRINGS)]
    strings.clear()


def _resident_bytes() -> int:
    """Without memory that is mapped from files, such as arenas."""
    gc.collect()
    resident, shared = (int(pages) for pages in Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _num_files(trainer: ElasticTrainer) -> int:
    """The files in the members' folder of shared memory; 0 where they have none."""
    arena = trainer.state.arena
    return len(list(arena.path.parent.iterdir())) if isinstance(arena, SharedArena) else 0
