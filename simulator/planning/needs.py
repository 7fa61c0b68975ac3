"""What a job whose GPUs move needs: memory of GPUs and hosts, and spare slots. Computed from its model's shape.

A GPU has one owner at a time. While another component has it, a component keeps on the host:

    snapshots   2 versions of the weights on each node: one is in use while the next one is published
    trainer     weights and its part of the optimizer, of each rank that waits (`physics.memory.Memory.kept_bytes`)
    processes   one on standby for each component and GPU, up to its `standby_memory_mib`

Of an engine beside the trainer on one GPU, both would have to fit there. It says whether an engine could sleep without
a load from the host.

Invariant: what no shape tells is left out and named. [test_hardware: without_a_shape]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.physics.memory import Memory
from tidegate.config.job_config import JobConfig
from tidegate.types import Layout, Precision, Role

_SNAPSHOTS = 2
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Need:
    """`size_bytes`: of one GPU or one node (`of`). None: it is not known, and `note` says why."""

    what: str
    of: str
    size_bytes: float | None
    note: str


def needs_of(
    config: JobConfig, memory: Memory | None, layout: Layout, *, unknown: str, is_gpu_named: bool
) -> list[Need]:
    """`layout`: of the trainer in its split. `unknown`: why there is no `memory`. `is_gpu_named`: whether the GPU of
    `memory` is the job's, or stands for none."""
    per_node = max(config.cluster.nodes.values())
    found = [*_of_shape(config, memory, layout, per_node, is_gpu_named)] if memory else [_not_known(unknown)]
    limits = config.actor.standby_memory_mib + config.rollout.standby_memory_mib + config.inference.standby_memory_mib
    standby = f"at most: {limits:,} MiB for each of {per_node} GPUs, by the three standby_memory_mib"
    return [*found, Need("processes on standby", "host of a node", limits * _MIB * per_node, standby)]


def spare_slots(config: JobConfig) -> int:
    """The cluster's GPUs in no placement. A move needs none: it takes the GPU of another component."""
    return len(config.cluster.gpus()) - sum(len(config.placement(role)) for role in Role)


def _not_known(unknown: str) -> Need:
    return Need("weights, trainer and snapshots", "GPU and host", None, f"the model's shape is not known: {unknown}")


def _of_shape(config: JobConfig, memory: Memory, layout: Layout, per_node: int, is_gpu_named: bool) -> Iterator[Need]:
    itemsize = 4 if config.actor.precision is Precision.FP32 else 2
    weights = itemsize * memory.shape.num_parameters
    trainer = memory.of_trainer(layout)
    yield Need("trainer", "GPU", trainer.total, f"in layout {layout}: {trainer}")
    yield Need(
        "weights of an engine", "GPU", weights, f"{memory.shape.num_parameters:,} parameters in {itemsize} bytes"
    )
    both = trainer.total + weights
    yield Need("both at once, without a cache", "GPU", both, _fits(memory, both, is_gpu_named))
    note = f"{_SNAPSHOTS} versions of the weights, while the next one is published"
    yield Need("snapshots", "host of a node", _SNAPSHOTS * weights, note)
    waiting = min(per_node, layout.num_ranks)
    kept = memory.kept_bytes(layout) * waiting
    yield Need("a trainer that waits", "host of a node", kept, f"state of the {waiting} ranks of a node")


def _fits(memory: Memory, num_bytes: float, is_gpu_named: bool) -> str:
    if not is_gpu_named:
        return "name the GPU with --hardware to see whether it fits"
    capacity = memory.gpu.memory_bytes
    if num_bytes <= capacity:
        return f"fits on the GPU of {capacity / 1e9:.0f} GB: an engine could sleep there with its weights"
    return f"more than the GPU's {capacity / 1e9:.0f} GB: an engine loads its weights from the host at each move"
