"""Where a layout puts its coordinates: a mesh of world ranks, and which stage holds which layer.

- The order is Megatron's default, tp-cp-ep-dp-pp with tp fastest. `ranks[i]` stands at index i of it.
- Dense parameters see the mesh as (tp, cp, dp, pp).
- Expert parameters see each stage as (tp, ep, rest) with rest = dp * cp / ep.
- Layers are dealt chunk by chunk, and within a chunk stage by stage: the `chunks[v][p]` layers of virtual chunk v on
  stage p follow those of stage p - 1. Stages may be uneven.

Invariants:
- A Mesh is valid when made. [test_layout: an_impossible_layout_is_refused]
- Each layer has exactly one home (stage, chunk). [test_layout: layers_are_dealt_out_chunk_by_chunk]
- Each rank has one place. [test_layout: a_ranks_coordinates_are_its_places]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tidegate.types import Layout


class LayoutRefused(ValueError):
    """A model cannot be cut in this way, or not on these ranks. The message has the equation and the legal values."""


class Edge(StrEnum):
    """The end of the pipeline that holds a parameter without a layer."""

    INPUT = "input"
    OUTPUT = "output"
    BOTH = "both"
    """Tied embeddings: one logical parameter. With pp > 1 the first and the last stage hold a copy each."""


Place = int | Edge
"""A layer's global number, from 0, or an end of the pipeline."""


@dataclass(frozen=True, slots=True)
class Home:
    """The place of a layer. `index` is its number within the stage's chunk, as in Megatron's local names."""

    stage: int
    chunk: int
    index: int


@dataclass(frozen=True, slots=True)
class Coordinates:
    tp: int
    cp: int
    dp: int
    stage: int
    ep: int
    """The coordinate among the ranks that divide a stage's experts; 0 without expert parallelism."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A layout over an ordered tuple of world ranks, with the number of layers of each chunk and stage."""

    layout: Layout
    ranks: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        layout = self.layout
        if len(self.ranks) != layout.num_ranks:
            raise LayoutRefused(
                f"layout {layout} needs tp * cp * dp * pp = {layout.tp} * {layout.cp} * {layout.dp} * {layout.pp} = "
                f"{layout.num_ranks} ranks, and got {len(self.ranks)}"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise LayoutRefused(f"layout {layout} names a rank twice in {self.ranks}; each rank has one place")
        if (layout.dp * layout.cp) % layout.ep:
            product = layout.dp * layout.cp
            raise LayoutRefused(
                f"layout {layout}: ep={layout.ep} does not divide dp * cp = {layout.dp} * {layout.cp} = {product}; "
                f"legal ep: {divisors(product)}"
            )
        if any(len(chunk) != layout.pp for chunk in self.chunks):
            raise LayoutRefused(
                f"layout {layout}: every virtual chunk needs the numbers of layers of {layout.pp} stages, got "
                f"{self.chunks}"
            )
        if any(size < 0 for chunk in self.chunks for size in chunk):
            raise LayoutRefused(f"layout {layout}: a stage cannot hold fewer than 0 layers, got {self.chunks}")
        if len(self.chunks) != layout.vpp:
            raise LayoutRefused(
                f"layout {layout}: vpp={layout.vpp} needs as many virtual chunks, got {len(self.chunks)}"
            )

    @property
    def num_layers(self) -> int:
        return sum(map(sum, self.chunks))

    @property
    def num_stage_ranks(self) -> int:
        return self.layout.tp * self.layout.cp * self.layout.dp

    def homes(self) -> Iterator[Home]:
        """The home of each layer, in order of their global numbers."""
        for chunk, sizes in enumerate(self.chunks):
            for stage, size in enumerate(sizes):
                yield from (Home(stage, chunk, index) for index in range(size))

    def coordinates(self, index: int) -> Coordinates:
        """The coordinates of `ranks[index]`."""
        layout = self.layout
        stage, within = divmod(index, self.num_stage_ranks)
        replica, tp = divmod(within, layout.tp)
        dp, cp = divmod(replica, layout.cp)
        return Coordinates(tp=tp, cp=cp, dp=dp, stage=stage, ep=replica % layout.ep)

    def holders(self, stage: int, *, tp: int | None, ep: int | None) -> tuple[int, ...]:
        """The ranks of a stage with these coordinates, in mesh order; None stands for any."""
        step, width = self.layout.ep, self.layout.tp
        first = stage * self.num_stage_ranks
        replicas = range(ep or 0, self.num_stage_ranks // width, 1 if ep is None else step)
        columns = range(width) if tp is None else (tp,)
        return tuple(self.ranks[first + replica * width + column] for replica in replicas for column in columns)


def even_chunks(num_layers: int, *, pp: int, vpp: int = 1) -> tuple[tuple[int, ...], ...]:
    """Equal stages, Megatron's default. Raises LayoutRefused."""
    if pp < 1 or vpp < 1 or num_layers % (pp * vpp):
        legal = ", ".join(str(n) for n in range(1, num_layers + 1) if num_layers % (n * vpp) == 0) or "none"
        raise LayoutRefused(
            f"{num_layers} layers do not divide by pp * vpp = {pp} * {vpp}; legal pp with vpp={vpp}: {legal}; "
            "or set the number of layers of each stage"
        )
    return tuple((num_layers // (pp * vpp),) * pp for _ in range(vpp))


def divisors(number: int) -> str:
    """The divisors as a message lists them."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
