"""The interface of a model for the elastic actor: its logical parameters, and how a rank of any mesh builds its part.

Every provider must keep these promises:
- Logical tensors are the same in every mesh, from the start. [test_axes: the_initial_weights_are_the_same_bits]
- A rank's local parameters are exactly those that the planner derives from `parameters()` for its place in the mesh.
  [test_skeleton: holds_exactly_what_the_planner_says]
- Every mesh that `mesh` returns can be built. [test_layout_walks: experts_go_through]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import MegatronModule

    from tidegate.elastic.plan.layout import Mesh
    from tidegate.elastic.plan.parameters import Parameter
    from tidegate.types import Layout


class ModelProvider(Protocol):
    def parameters(self) -> tuple[Parameter, ...]:
        """The logical parameters, in order from input to output."""

    def mesh(self, layout: Layout, ranks: tuple[int, ...]) -> Mesh:
        """The layout over these members. Raises LayoutRefused, with the equation and the legal sizes, where it is
        impossible.
        """

    def build(
        self, mesh: Mesh, me: int, groups: ProcessGroupCollection, *, device: torch.device
    ) -> list[MegatronModule]:
        """Member `me`'s chunks, one per virtual stage, with weights of undefined values. All members of the mesh call
        it.
        """

    def local_parameters(
        self, chunks: Sequence[torch.nn.Module], mesh: Mesh, me: int
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Logical names and local tensors in the chunks' order. The chunks may be wrapped by DDP."""

    def initialise(self, chunks: Sequence[torch.nn.Module], mesh: Mesh, me: int, *, seed: int) -> None:
        """Fill the chunks with their parts of the logical tensors that `seed` determines. Padding becomes 0."""
