"""Passes a mesh's layers of each stage to Megatron: even stages or not, one chunk or several.

`num_layers_in_first_pipeline_stage` and similar settings describe uneven ends only; `pipeline_model_parallel_layout`
describes any mesh. Upstream reads the own stage and the number of chunks from parallel_state there, which is unused
here or belongs to another mesh. So this class binds them when the layout is made.

Invariant: numbers and offsets of layers are the mesh's.
"""

from __future__ import annotations

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from tidegate.elastic.plan.layout import Mesh


class StageLayers(PipelineParallelLayerLayout):  # type: ignore[misc]  # Megatron is untyped
    """A mesh's layers as one of its stages sees them."""

    def __init__(self, mesh: Mesh, stage: int) -> None:
        rows = [["decoder"] * size for chunk in mesh.chunks for size in chunk]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, mesh.layout.pp)
        self._stage = stage

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """transformer/pipeline_parallel_layer_layout.py:150, without parallel_state."""
        return int(self.layout[self._stage if pp_rank is None else pp_rank][vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """transformer/pipeline_parallel_layer_layout.py:168, without parallel_state."""
        last = (vp_stage or 0, self._stage if pp_rank is None else pp_rank)
        places = ((chunk, stage) for chunk in range(last[0] + 1) for stage in range(self.pipeline_model_parallel_size))
        return sum(self.layout[stage][chunk].count(layer_type) for chunk, stage in places if (chunk, stage) < last)
