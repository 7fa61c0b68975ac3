"""The logical parameters that move: each one's shape, its cut by tensor parallelism, and its place.

A logical parameter is the unsharded tensor under Megatron's name, with the global numbers of layer and expert. It is
read as a matrix: the dims before the cut one are its rows; the cut dim and those after it are its columns. So every cut
of Megatron's is a cut of columns:
- `Whole`: on every tp rank (norms, router, biases of row-parallel layers).
- `Split(dim)`: equal contiguous parts (column-parallel: dim 0, row-parallel: dim 1).
- `Split(dim, stride=2)`: [gate; up], of which each rank holds [gate_i; up_i]; Megatron's `partition_stride`.
- `GroupedQkv`: equal contiguous rows of [queries of group 0, key 0, value 0, queries of group 1, ...]: whole groups.
- `Vocabulary`: equal rows of the padded vocabulary. The padding rows are in no logical tensor.

Sequence parallelism changes no shard. Its marks are kept for readers that set them, on whole parameters only.

Invariants:
- A Parameter is valid when made. [test_parameters: an_impossible_parameter_is_refused]
- Over the tp ranks of one mesh the pieces cover each column exactly once, or once per rank when `Whole`.
  [test_parameters: a_shard_is_what_megatron_cuts]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tidegate.elastic.plan.layout import LayoutRefused, Place, divisors


@dataclass(frozen=True, slots=True)
class Whole:
    """Not cut."""


@dataclass(frozen=True, slots=True)
class Split:
    dim: int
    stride: int = 1
    """The cut dim is this many equal blocks, and each block is cut on its own."""


@dataclass(frozen=True, slots=True)
class GroupedQkv:
    """Rows of fused queries, keys and values, interleaved by key/value group. The bias is cut in the same way."""

    num_groups: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    padded_rows: int
    """Fixed for a job, whatever its layouts, because padding enters the softmax."""


Cut = Whole | Split | GroupedQkv | Vocabulary


@dataclass(frozen=True, slots=True)
class Expert:
    """Expert `index` of the layer's `count`. Expert parallelism gives each rank an equal contiguous run of them."""

    index: int
    count: int

    def ep_rank(self, ep: int) -> int:
        if self.count % ep:
            raise LayoutRefused(f"{self.count} experts do not divide by ep={ep}; legal ep: {divisors(self.count)}")
        return self.index // (self.count // ep)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element of the model's own copy."""
    cut: Cut
    place: Place
    expert: Expert | None = None
    trainable: bool = True
    """A frozen parameter, or a persistent buffer, has no optimizer state."""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1 or self.itemsize < 1:
            raise ValueError(f"{self.name}: shape {self.shape} of {self.itemsize}-byte elements has no element")
        if self.sequence_parallel and not isinstance(self.cut, Whole):
            raise ValueError(
                f"{self.name}: marked sequence-parallel and cut by {self.cut}; Megatron marks only parameters that "
                "each tp rank holds whole"
            )
        if self.expert is not None and not 0 <= self.expert.index < self.expert.count:
            raise ValueError(f"{self.name}: expert {self.expert.index} is not one of {self.expert.count}")
        match self.cut:
            case Split(dim, stride):
                if not 0 <= dim < len(self.shape) or stride < 1 or self.shape[dim] % stride:
                    raise ValueError(f"{self.name}: {self.shape} has no {stride} equal blocks along dim {dim}")
            case GroupedQkv(num_groups):
                if num_groups < 1 or self.shape[0] % num_groups:
                    raise ValueError(f"{self.name}: {self.shape[0]} rows are not {num_groups} equal groups")
            case Vocabulary(padded_rows):
                if padded_rows < self.shape[0]:
                    raise ValueError(f"{self.name}: {self.shape[0]} rows do not fit into {padded_rows} padded ones")
            case Whole():
                pass


class Piece(NamedTuple):
    """`size` columns, which begin at `local` in the shard and at `logical` in the logical matrix."""

    local: int
    logical: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One tp rank's part of a logical matrix: `rows` rows of `width` columns. `pieces` are the columns that are logical
    ones.
    """

    rows: int
    width: int
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return self.rows * self.width


def num_shards(cut: Cut, tp: int) -> int:
    """The number of different shards that the tp ranks hold."""
    return 1 if isinstance(cut, Whole) else tp


def shard_of(shape: tuple[int, ...], cut: Cut, *, tp: int, tp_rank: int) -> Shard:
    """Raises LayoutRefused, with the legal sizes, where the cut is not even."""
    match cut:
        case Whole():
            return Shard(1, prod(shape), (Piece(0, 0, prod(shape)),))
        case Split(dim, stride):
            return _split(shape, dim, stride, tp=tp, tp_rank=tp_rank)
        case GroupedQkv(num_groups):
            if num_groups % tp:
                raise LayoutRefused(
                    f"{num_groups} key/value groups do not divide by tp={tp}; legal tp: {divisors(num_groups)}"
                )
            return _split(shape, 0, 1, tp=tp, tp_rank=tp_rank)
        case Vocabulary(padded_rows):
            if padded_rows % tp:
                raise LayoutRefused(
                    f"{padded_rows} padded vocabulary rows do not divide by tp={tp}; pad to a multiple of every tp"
                )
            inner = prod(shape[1:])
            width = padded_rows // tp * inner
            real = min(width, prod(shape) - tp_rank * width)
            return Shard(1, width, (Piece(0, tp_rank * width, real),) if real > 0 else ())


def _split(shape: tuple[int, ...], dim: int, stride: int, *, tp: int, tp_rank: int) -> Shard:
    block = shape[dim] // stride
    if block % tp:
        raise LayoutRefused(
            f"dim {dim} of {shape}, {stride} block(s) of {block}, does not divide by tp={tp}; "
            f"legal tp: {divisors(block)}"
        )
    inner = prod(shape[dim + 1 :])
    size = block // tp * inner
    pieces = tuple(Piece(k * size, k * block * inner + tp_rank * size, size) for k in range(stride))
    return Shard(prod(shape[:dim]), stride * size, pieces)
