"""The drained nodes in the JSON of files: `drained` has all, `keeping_jobs` those that keep their jobs.

Earlier releases have no `keeping_jobs`, and read a file of this one as if no node kept its jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.json_text import typed
from tidegate.types import Drain, NodeId


def drained_fields(drained: Mapping[NodeId, Drain]) -> dict[str, list[NodeId]]:
    keeping = [node for node, drain in drained.items() if drain is Drain.STAY]
    return {"drained": sorted(drained), "keeping_jobs": sorted(keeping)}


def drained_of(fields: Mapping[str, Any]) -> dict[NodeId, Drain]:
    """ValueError, KeyError."""
    drained, keeping = (
        [NodeId(typed(str, node, "a node")) for node in typed(list, nodes, name)]
        for name, nodes in (("drained", fields["drained"]), ("keeping_jobs", fields.get("keeping_jobs", [])))
    )
    return {node: Drain.STAY if node in keeping else Drain.LEAVE for node in drained}
