"""Random numbers of an update: a pure function of (seed, number of committed updates, coordinates in the mesh).

No random state has to survive a reshard, a death or a checkpoint: each update begins by seeding every stream anew. An
update that was not committed draws the same numbers again. One that goes on after a reshard also has the number of its
portions so far in the seed.

Megatron's streams, and the inputs of each seed besides the seed and the update:
- The default generators, of CPU and device: the place in (stage, dp, cp). It is the same for all tp ranks, which drop
  the same elements of the tensors that they all hold.
- `model-parallel-rng`: the place and tp, for tensors that are split over tp ranks.
- `expert-parallel-rng`: the place, tp and ep.
- `data-parallel-rng`: nothing, because Megatron draws from it the numbers that all ranks share.

So replicas and pipeline stages drop different elements. The same layout has the same numbers, however it was reached
and over whichever members. Another layout has others: with dropout a resized run is statistically, not bitwise, the
fixed one.

Invariant: streams of different coordinates are independent, because their seeds are digests, not sums.
[test_skeleton: random_numbers_are_a_function]
"""

from __future__ import annotations

import hashlib

import torch
from megatron.core.tensor_parallel import random as megatron_random

from tidegate.elastic.plan.layout import Mesh


def seed_update(seed: int, num_updates: int, mesh: Mesh, me: int, *, num_portions: int = 0) -> None:
    """Begin the update after `num_updates` committed ones, as member `me` of the mesh.

    `num_portions`: the portions of the update that ran before a reshard was prepared. The others draw other numbers.
    """
    at = mesh.coordinates(mesh.ranks.index(me))
    again = (num_portions,) if num_portions else ()
    place = (at.stage, at.dp, at.cp, *again)
    streams = {
        megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME: (*place, at.tp),
        megatron_random._EXPERT_PARALLEL_RNG_TRACKER_NAME: (*place, at.tp, at.ep),
        megatron_random._DATA_PARALLEL_RNG_TRACKER_NAME: again,
    }
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.reset()
    for name, coordinates in streams.items():
        tracker.add(name, stream_seed(seed, num_updates, name, coordinates))
    # This seed comes last, because the tracker uses the default generator to make its streams.
    torch.manual_seed(stream_seed(seed, num_updates, "default", place))


def stream_seed(seed: int, num_updates: int, stream: str, coordinates: tuple[int, ...]) -> int:
    digest = hashlib.sha256(repr((seed, num_updates, stream, coordinates)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
