"""The slots of a cluster: how many each node has, and what each of them is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.device_slots import DeviceKind
from tidegate.json_text import typed, whole_number
from tidegate.types import NodeId


@dataclass(frozen=True, slots=True)
class Slots:
    """`per_gpu`: how many slots share a GPU, as `cluster.slots_per_gpu` of a job."""

    nodes: Mapping[NodeId, int]
    device: DeviceKind = "cpu"
    per_gpu: int = 1

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Slots:
        """From JSON. ValueError, KeyError."""
        nodes, device = typed(dict, fields["nodes"], "nodes"), fields["device"]
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device is {device!r}; it must be cpu or cuda")
        per_gpu = whole_number(fields["per_gpu"], "per_gpu")
        return cls({NodeId(node): whole_number(count, node) for node, count in nodes.items()}, device, per_gpu)
