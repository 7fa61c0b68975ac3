"""The flat ranges of its shards that each rank's distributed optimizer keeps, computed without building an optimizer.

The ranges are those of Megatron's buffers without buckets:
1. Each virtual chunk of each stage has a buffer for dense parameters and one for experts.
2. Parameters are in reverse order, and each starts at a multiple of 64 elements.
3. The buffer is divided over the replicas in equal shares, multiples of 128 elements.

A built optimizer reports its own ranges (`skeleton`). These are for plans of layouts that are not built.

Invariant: the ranges of each trainable shard follow each other from 0 to its end.
[test_ranges: a_reshard_between_computed_ranges]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Edge, Mesh
from tidegate.elastic.plan.optimizers import ADAM, DistributedOptimizer, FlatRange, StateTensor
from tidegate.elastic.plan.parameters import Parameter, shard_of

PARAMETER_STEP = 64
SHARE_STEP = 128
"""In elements. Megatron pads `start_index` and `bucket_end` to these multiples, for NCCL and cuBLAS."""

_Buffer = tuple[int, int, int]
"""(stage, virtual chunk, ep coordinate), the last -1 for dense parameters."""


def with_optimizer(
    parameters: Sequence[Parameter],
    mesh: Mesh,
    *,
    states: tuple[StateTensor, ...] = ADAM,
    step_itemsize: int | None = 4,
) -> State:
    """Raises LayoutRefused for a model that cannot be cut in this layout."""
    ranges: dict[int, dict[str, FlatRange]] = {rank: {} for rank in mesh.ranks}
    buffers: dict[_Buffer, list[Parameter]] = {}
    homes = [(home.stage, home.chunk) for home in mesh.homes()]
    for parameter in reversed(parameters):
        ep = -1 if parameter.expert is None else parameter.expert.ep_rank(mesh.layout.ep)
        for stage, chunk in _places(parameter, mesh, homes) if parameter.trainable else ():
            buffers.setdefault((stage, chunk, ep), []).append(parameter)
    for (stage, _, ep), buffer in sorted(buffers.items(), key=lambda entry: entry[0]):
        for tp_rank in range(mesh.layout.tp):
            ranks = mesh.holders(stage, tp=tp_rank, ep=None if ep < 0 else ep)
            _deal_out(buffer, ranks, mesh.layout.tp, ranges)
    return State(mesh, DistributedOptimizer(ranges, states, step_itemsize))


def _places(parameter: Parameter, mesh: Mesh, homes: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Every (stage, chunk) that has the parameter: two for tied embeddings over several stages."""
    if isinstance(parameter.place, int):
        return (homes[parameter.place],)
    first, last = (0, 0), (mesh.layout.pp - 1, len(mesh.chunks) - 1)
    ends = {Edge.INPUT: (first,), Edge.OUTPUT: (last,), Edge.BOTH: (first, last) if mesh.layout.pp > 1 else (first,)}
    return ends[parameter.place]


def _deal_out(
    buffer: Iterable[Parameter], ranks: tuple[int, ...], tp: int, ranges: dict[int, dict[str, FlatRange]]
) -> None:
    """Divide one buffer over the ranks that have a replica each."""
    starts: list[tuple[Parameter, int, int]] = []
    end = 0
    for parameter in buffer:
        start = -(-end // PARAMETER_STEP) * PARAMETER_STEP
        end = start + shard_of(parameter.shape, parameter.cut, tp=tp, tp_rank=0).num_elements
        starts.append((parameter, start, end))
    share = -(-end // (len(ranks) * SHARE_STEP)) * SHARE_STEP
    for parameter, start, end in starts:
        for index in range(start // share, -(-end // share)):
            low, high = max(index * share, start), min((index + 1) * share, end)
            ranges[ranks[index]][parameter.name] = FlatRange(low - start, high - start)
