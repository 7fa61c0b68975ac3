"""How far the monotonic clocks of other machines are from this one's. So one timeline shows all nodes.

A clock is asked over the network, and reads `there_ns` at some time between question and answer (Cristian 1989):

    offset = there_ns - (asked_ns + answered_ns) / 2,   within (answered_ns - asked_ns) / 2

Of several exchanges the fastest counts. Offsets are measured again and again. Between two of them a clock's offset is
taken to change evenly, before the first and after the last it is theirs. Where it changes faster than any clock drifts,
the machine has started anew in between, and the earlier one counts. (Its times are told from earlier ones until its new
clock has come as far as the old one.)

Invariants:
- A time that a clock read between question and answer is found within the error. [test_clocks: within_the_error]
- Times of one clock keep their order. [test_clocks: keep_their_order]
- A machine that started anew disturbs no time of before or after, until its clock has come as far as the old one.
  [test_clocks: started_anew]
- A line that was cut off is left out. [test_clocks: cut_off]
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tidegate.json_text import parse_json, typed
from tidegate.types import NodeId

DRIFT = 50e-6
"""What a clock that nobody steers may gain or lose in a second. Ours: most quartzes are within it."""
MOST_DRIFT = 1e-3
"""No clock drifts so fast."""
EVERY_S = 30.0
"""Clocks are asked so often: in between they drift by 1.5 ms at most."""
FILE = "clocks.jsonl"
"""In the folder of the spans."""


@dataclass(frozen=True, order=True, slots=True)
class Offset:
    """At `there_ns` of its own, a clock is `offset_ns` ahead of this machine's, give or take `error_ns`."""

    there_ns: int
    offset_ns: int
    error_ns: int

    @classmethod
    def measured(cls, asked_ns: int, there_ns: int, answered_ns: int) -> Offset:
        """`asked_ns`, `answered_ns`: of this machine's clock."""
        return cls(there_ns, there_ns - (asked_ns + answered_ns) // 2, (answered_ns - asked_ns + 1) // 2)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The offsets of other machines' nodes, by time. A node without any shares this machine's clock."""

    offsets: Mapping[NodeId, tuple[Offset, ...]]

    @classmethod
    def read(cls, folder: Path) -> Clocks:
        """The offsets in a folder of spans; none where it has no file of them."""
        found: dict[NodeId, list[Offset]] = {}
        try:
            lines = (folder / FILE).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            nodes, offset = _of_line(line) or ((), None)
            if offset is not None:
                for node in nodes:
                    found.setdefault(node, []).append(offset)
        return cls({node: tuple(sorted(each)) for node, each in found.items()})

    def here_ns(self, node: NodeId, there_ns: int) -> int:
        """A time of the node's clock on this machine's."""
        own = self.offsets.get(node, ())
        if not own:
            return there_ns
        at = bisect_right(own, there_ns, key=lambda each: each.there_ns)
        if at in (0, len(own)):
            return there_ns - own[max(0, at - 1)].offset_ns
        before, after = own[at - 1], own[at]
        passed, between = there_ns - before.there_ns, after.there_ns - before.there_ns
        change = after.offset_ns - before.offset_ns
        if abs(change) > MOST_DRIFT * between + before.error_ns + after.error_ns:
            return there_ns - before.offset_ns
        return there_ns - before.offset_ns - change * passed // between

    def error_ns(self) -> dict[NodeId, int]:
        """By node of another machine: by how much its times may be off, while its clock is asked. The largest error of
        an offset, and what a clock drifts in the longest time between two."""
        return {
            node: max(each.error_ns for each in own) + round(DRIFT * _gap_ns(own)) for node, own in self.offsets.items()
        }


def _gap_ns(offsets: Sequence[Offset]) -> int:
    """The longest time between two offsets, and at least that in which the next one follows."""
    gaps = (after.there_ns - before.there_ns for before, after in pairwise(offsets))
    return max((round(EVERY_S * 1e9), *gaps))


def line_of(nodes: Iterable[NodeId], offset: Offset) -> str:
    fields = {"there_ns": offset.there_ns, "offset_ns": offset.offset_ns, "error_ns": offset.error_ns}
    return json.dumps({"nodes": [*nodes], **fields}) + "\n"


def _of_line(line: str) -> tuple[tuple[NodeId, ...], Offset] | None:
    try:
        row = typed(dict, parse_json(line), "an offset")
        nodes = tuple(NodeId(typed(str, node, "a node")) for node in typed(list, row["nodes"], "nodes"))
        there_ns, offset_ns, error_ns = (typed(int, row[name], name) for name in ("there_ns", "offset_ns", "error_ns"))
        return nodes, Offset(there_ns, offset_ns, error_ns)
    except (ValueError, KeyError):
        return None
