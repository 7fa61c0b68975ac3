"""Cuts whole arrays as Megatron would, independently of the planner: what each rank must hold, element by element.

Every element of every tensor has its own value, so equal arrays prove that everything is in its place. Padding rows of
the vocabulary are -1 and are never moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tidegate.elastic.plan.buckets import Bucket
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Edge, Mesh
from tidegate.elastic.plan.optimizers import DistributedOptimizer, FlatRange, StateKind
from tidegate.elastic.plan.parameters import GroupedQkv, Parameter, Split, Vocabulary
from tidegate.elastic.plan.plan import Plan, RegionCopy

Array = npt.NDArray[np.int64]
Tensors = dict[tuple[str, StateKind], Array]
World = dict[int, Tensors]
PADDING = -1
KINDS = tuple(kind for kind in StateKind if kind is not StateKind.GRADIENT)
"""The kinds of the state that every reshard moves."""


def whole_tensors(parameters: Sequence[Parameter]) -> Tensors:
    tensors: Tensors = {}
    first = 0
    for parameter in parameters:
        for kind in KINDS:
            shape = (1,) if kind is StateKind.STEP else parameter.shape
            size = int(np.prod(shape))
            tensors[parameter.name, kind] = np.arange(first, first + size).reshape(shape)
            first += size
    return tensors


def cut(parameter: Parameter, whole: Array, tp: int, tp_rank: int) -> Array:
    match parameter.cut:
        case Vocabulary(padded_rows):
            padding = np.full((padded_rows - len(whole), *whole.shape[1:]), PADDING)
            return np.split(np.concatenate([whole, padding]), tp)[tp_rank]
        case GroupedQkv(num_groups):
            groups = whole.reshape(num_groups, -1, *whole.shape[1:])
            return np.split(groups, tp)[tp_rank].reshape(-1, *whole.shape[1:])
        case Split(dim, stride):
            blocks = np.split(whole, stride, axis=dim)
            return np.concatenate([np.split(block, tp, axis=dim)[tp_rank] for block in blocks], axis=dim)
    return whole


def homes(mesh: Mesh, parameter: Parameter) -> Iterator[tuple[int, int, int]]:
    """(rank, tp rank, index of the rank's buffer) of all ranks that hold a shard of the parameter."""
    layout = mesh.layout
    ranks = np.array(mesh.ranks).reshape(layout.pp, layout.dp * layout.cp, layout.tp)
    dealt = [
        (chunk, stage) for chunk, sizes in enumerate(mesh.chunks) for stage, n in enumerate(sizes) for _ in range(n)
    ]
    if isinstance(parameter.place, int):
        at = [dealt[parameter.place]]
    else:
        ends = {Edge.INPUT: [0], Edge.OUTPUT: [-1], Edge.BOTH: [0, -1] if layout.pp > 1 else [0]}[parameter.place]
        at = [(len(mesh.chunks) - 1 if end else 0, end % layout.pp) for end in ends]
    for chunk, stage in at:
        replicas = ranks[stage]
        if parameter.expert is not None:
            each = parameter.expert.count // layout.ep
            replicas = replicas.reshape(-1, layout.ep, layout.tp)[:, parameter.expert.index // each]
        for replica in replicas:
            yield from ((int(rank), tp_rank, chunk) for tp_rank, rank in enumerate(replica))


def shares(mesh: Mesh, parameters: Sequence[Parameter], *, per_bucket: int) -> dict[int, dict[str, FlatRange]]:
    """Flat ranges as in Megatron's buffers: reverse order, aligned, in padded buckets."""
    buffers: dict[tuple[int, bool], list[tuple[Parameter, int, int]]] = {}
    for parameter in parameters:
        if parameter.trainable:
            for rank, tp_rank, chunk in homes(mesh, parameter):
                size = cut(parameter, np.zeros(parameter.shape, np.int64), mesh.layout.tp, tp_rank).size
                key = (rank, parameter.expert is not None)
                buffers.setdefault(key, []).append((parameter, chunk, size))
    found: dict[int, dict[str, FlatRange]] = {rank: {} for rank in mesh.ranks}
    for (rank, is_expert), held in buffers.items():
        index = mesh.ranks.index(rank) % (mesh.layout.tp * mesh.layout.dp * mesh.layout.cp) // mesh.layout.tp
        count = mesh.layout.dp * mesh.layout.cp
        if is_expert:
            index, count = index // mesh.layout.ep, count // mesh.layout.ep
        for chunk in range(len(mesh.chunks)):
            order = [(parameter, size) for parameter, of, size in reversed(held) if of == chunk]
            for begin in range(0, len(order), per_bucket):
                found[rank] |= _share_of_bucket(order[begin : begin + per_bucket], index, count)
    return found


def _share_of_bucket(order: list[tuple[Parameter, int]], index: int, count: int) -> dict[str, FlatRange]:
    starts, end = [], 0
    for _, size in order:
        start = -(-end // 4) * 4
        starts.append(start)
        end = start + size
    share = -(-end // count)
    low, high = index * share, (index + 1) * share
    return {
        parameter.name: FlatRange(max(low - start, 0), min(high - start, size))
        for (parameter, size), start in zip(order, starts, strict=True)
        if max(low, start) < min(high, start + size)
    }


def world(state: State, parameters: Sequence[Parameter], whole: Mapping[tuple[str, StateKind], Array]) -> World:
    """The flat tensors that each rank holds."""
    held: World = {rank: {} for rank in state.mesh.ranks}
    for parameter in parameters:
        for rank, tp_rank, _ in homes(state.mesh, parameter):
            for kind in kinds(state, parameter):
                tensor = whole[parameter.name, kind]
                shard = tensor if kind is StateKind.STEP else cut(parameter, tensor, state.mesh.layout.tp, tp_rank)
                flat = shard.reshape(-1)
                if isinstance(state.optimizer, DistributedOptimizer) and kind is not StateKind.WEIGHT:
                    share = state.optimizer.ranges[rank].get(parameter.name)
                    if share is None:
                        continue
                    flat = flat if kind is StateKind.STEP else flat[share.start : share.end]
                held[rank][parameter.name, kind] = flat
    return held


def kinds(state: State, parameter: Parameter) -> list[StateKind]:
    if state.optimizer is None or not parameter.trainable:
        return [StateKind.WEIGHT]
    step = [] if state.optimizer.step_itemsize is None else [StateKind.STEP]
    return [StateKind.WEIGHT, *(tensor.kind for tensor in state.optimizer.states), *step]


def empty_like(held: World) -> World:
    return {rank: {key: np.full_like(flat, PADDING) for key, flat in of.items()} for rank, of in held.items()}


def view(flat: Array, offset: int, stride: int, copy: RegionCopy) -> Array:
    """A copy's region of a flat tensor. Raises AssertionError where it leaves the tensor."""
    assert 0 <= offset <= offset + (copy.rows - 1) * stride + copy.cols <= flat.size
    return np.lib.stride_tricks.as_strided(
        flat[offset:], (copy.rows, copy.cols), (stride * flat.itemsize, flat.itemsize)
    )


def apply(plan: Plan, source: World, target: World) -> None:
    """Carry out a plan between arrays, every copy as it is listed."""
    for part in plan.parts:
        carry((*part.local, *part.receives), source, target)


def carry(copies: Iterable[RegionCopy], source: World, target: World) -> None:
    for copy in copies:
        key = (copy.name, copy.kind)
        taken = view(source[copy.source_rank][key], copy.source_offset, copy.source_stride, copy)
        view(target[copy.target_rank][key], copy.target_offset, copy.target_stride, copy)[:] = taken


def packed(bucket: Bucket, source: Tensors) -> Array:
    """The message of a bucket, as the sender packs it."""
    return np.concatenate(
        [
            view(source[copy.name, copy.kind], copy.source_offset, copy.source_stride, copy).reshape(-1)
            for copy in bucket.copies
        ]
    )


def unpack(bucket: Bucket, message: Array, target: Tensors) -> None:
    for copy in bucket.copies:
        taken, message = message[: copy.num_elements], message[copy.num_elements :]
        into = view(target[copy.name, copy.kind], copy.target_offset, copy.target_stride, copy)
        into[:] = taken.reshape(into.shape)


def assert_same(got: World, want: World) -> None:
    assert got.keys() == want.keys()
    for rank, tensors in want.items():
        assert got[rank].keys() == tensors.keys()
        for key, flat in tensors.items():
            np.testing.assert_array_equal(got[rank][key], flat, err_msg=f"rank {rank} {key}")
