"""What the elastic actor needs to know of a model: its logical parameters, and how a rank of any mesh builds its part.

Invariants of every provider: logical tensors are the same in every mesh, at the start too; a rank's local parameters
are exactly what `parameters()` gives its place of the mesh by the planner's rules; a mesh that can be had can be built.
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
        """The layout over these members; LayoutRefused, with the equation and the legal sizes, where it cannot be."""

    def build(
        self, mesh: Mesh, me: int, groups: ProcessGroupCollection, *, device: torch.device
    ) -> list[MegatronModule]:
        """Member `me`'s chunks, one a virtual stage, with weights of no meaning; all members of the mesh call it."""

    def local_parameters(
        self, chunks: Sequence[torch.nn.Module], mesh: Mesh, me: int
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Logical names and local tensors in the chunks' order, of built chunks or of such that DDP wraps."""

    def initialise(self, chunks: Sequence[torch.nn.Module], mesh: Mesh, me: int, *, seed: int) -> None:
        """Fill the chunks with their parts of the logical tensors that `seed` stands for; padding becomes 0."""
