"""Which events or lines of a log a person asked for: the last ones, those since some time ago, those of some types.

Order: a row has the types and the time that were asked for; `tail` then counts only such rows.
[test_selection: the_tail_counts_only]
"""

from __future__ import annotations

import argparse
import re
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from tidegate.json_text import parse_json
from tidegate.v1 import control_pb2, events_pb2

EVENT_TYPES = tuple(field.name for field in events_pb2.Event.DESCRIPTOR.oneofs_by_name["body"].fields)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGE = re.compile(r"(\d{1,9})([smhd])")

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Selection:
    """All rows by default. `since_unix_s` is on the clock of the rows. Without `types` every type counts."""

    tail: int | None = None
    since_unix_s: float = 0.0
    types: frozenset[str] = frozenset()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Selection:
        """The flags that `add_flags` added."""
        since = 0.0 if args.since is None else time.time() - args.since
        return cls(args.tail, since, frozenset(getattr(args, "types", ())))

    def has_event(self, row: control_pb2.ListEventsResponse) -> bool:
        of_type = not self.types or row.event.WhichOneof("body") in self.types
        return of_type and row.event.occurred_unix_ns >= self.since_unix_s * 1e9

    def has_line(self, line: str) -> bool:
        """A line without a time counts as new: a kill or a full disk may have cut it."""
        try:
            return datetime.fromisoformat(str(parse_json(line)["time"])).timestamp() >= self.since_unix_s
        except (ValueError, KeyError, TypeError, OverflowError):
            return True

    def last(self, rows: Iterable[_Row]) -> Iterable[_Row]:
        return deque(rows, maxlen=self.tail)


def add_flags(parser: argparse.ArgumentParser, *, of_events: bool) -> None:
    parser.add_argument("--tail", type=_count, metavar="N", help="only the last N")
    parser.add_argument("--since", type=_age_s, metavar="AGE", help="only those of the last 30s, 5m, 2h or 1d")
    if of_events:
        types = ", ".join(EVENT_TYPES)
        help_ = f"only those of this type; may be given several times: {types}"
        parser.add_argument(
            "--type", dest="types", action="append", default=[], choices=EVENT_TYPES, metavar="TYPE", help=help_
        )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of rows")
    return int(text)


def _age_s(text: str) -> int:
    if (found := _AGE.fullmatch(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 30s, 5m, 2h or 1d")
    return int(found[1]) * _SECONDS[found[2]]
