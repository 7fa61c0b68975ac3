"""What goes wrong in a simulated iteration, and when."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.happenings import What
from tidegate.types import GpuId, NodeId


@dataclass(frozen=True, slots=True)
class GpuFault:
    """The GPU is lost, and with it what it was part of: an engine, the trainer's uncommitted minibatch. `back_after_s`:
    when it can be had again, unless another fault has it lost for longer; None: not in this iteration."""

    at_s: float
    gpu: GpuId
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeFault:
    """All GPUs of the node are lost, and every service there with them. `back_after_s`: as of a GPU; no other fault of
    the node begins before it is back."""

    at_s: float
    node: NodeId
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFault:
    """The engine's process dies; its GPUs become free. Engines have numbers from 0, in the order in which they start:
    which of them run then is the policy's doing, and FAULT_MISSED tells of one that does not."""

    at_s: float
    engine: int


@dataclass(frozen=True, slots=True)
class LateFault:
    """The first happening of this kind from `at_s` on is told `late_s` after it happened."""

    at_s: float
    what: What
    late_s: float


Fault = GpuFault | NodeFault | EngineFault | LateFault
