"""The drained nodes in the JSON of files: `drained` has all, `keeping_jobs` those that keep their jobs.

Earlier releases have no `keeping_jobs`, and read a file of this one as if no node kept its jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tidegate.json_text import typed
from tidegate.types import Drain, NodeId


def drained_fields(drained: Mapping[NodeId, Drain]) -> dict[str, list[NodeId]]:
    return {"drained": sorted(drained), "keeping_jobs": keeping(drained)}


def keeping(drained: Mapping[NodeId, Drain]) -> list[NodeId]:
    """The nodes that keep their jobs."""
    return sorted(node for node, drain in drained.items() if drain is Drain.STAY)


def drained_by(nodes: Iterable[str], keeping: Collection[str]) -> dict[NodeId, Drain]:
    """`keeping`: those of them that keep their jobs."""
    return {NodeId(node): Drain.STAY if node in keeping else Drain.LEAVE for node in nodes}


def drained_of(fields: Mapping[str, Any]) -> dict[NodeId, Drain]:
    """ValueError, KeyError."""
    lists = {"drained": fields["drained"], "keeping_jobs": fields.get("keeping_jobs", [])}
    drained, keeps = ([typed(str, node, "a node") for node in typed(list, lists[name], name)] for name in lists)
    return drained_by(drained, keeps)
