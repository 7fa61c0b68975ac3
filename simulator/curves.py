"""Curves over the iterations of a job: points `iteration: value`, and straight lines between them.

Before the first point and after the last one a curve is level. A text has its points on lines or between commas:

    0: 1500, 200: 10000

Text after `#` is a comment.

Invariants:
- A curve goes through its points. [test_curves: through_its_points]
- Iterations rise from point to point. A text in which they do not is refused with its line.
  [test_curves: a_bad_line_is_refused]
"""

from __future__ import annotations

import math
import re
import reprlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_ITERATION = 1_000_000
_POINT = re.compile(r"(?P<iteration>\S+?)\s*[:\s]\s*(?P<value>\S+)")


class BadCurve(ValueError):
    """A curve has a wrong point. The message names the place, the number and the remedy."""


@dataclass(frozen=True, slots=True)
class Curve:
    """At least one point (iteration, value). Iterations rise."""

    points: tuple[tuple[int, float], ...]

    def at(self, iteration: float) -> float:
        after = bisect_right(self.points, iteration, key=lambda point: point[0])
        if after == 0:
            return self.points[0][1]
        (start, low) = self.points[after - 1]
        if after == len(self.points):
            return low
        (end, high) = self.points[after]
        return low + (high - low) * (iteration - start) / (end - start)

    def step(self, iteration: int) -> float:
        """The value of the last point up to the iteration, without a line to the next one."""
        after = bisect_right(self.points, iteration, key=lambda point: point[0])
        return self.points[max(0, after - 1)][1]


def parse_curve(text: str, *, name: str, low: float, high: float, has_lines: bool = False) -> Curve:
    """The curve in `text`. BadCurve: the first wrong point, or no point.

    Values are from `low` to `high`. `has_lines`: a message names the line of `name`, which is a file.
    """
    points: list[tuple[int, float]] = []
    for number, word in _words(text):
        where = f"{name}:{number}" if has_lines else name
        iteration, value = _point(word, where)
        if points and iteration <= points[-1][0]:
            raise BadCurve(
                f"{where}: iteration {iteration} comes after iteration {points[-1][0]}: "
                "write the points in the order of their iterations, each once"
            )
        if not low <= value <= high:
            raise BadCurve(
                f"{where}: {value:,.10g} at iteration {iteration} is not from {low:,.10g} to {high:,.10g}: correct it"
            )
        points.append((iteration, value))
    if not points:
        raise BadCurve(f"{name} has no point: write at least one, such as 0: 1500")
    return Curve(tuple(points))


def curve_text(points: Mapping[object, object]) -> str:
    """The text of a mapping from iterations to values, as YAML reads `{0: 1500, 200: 10000}`."""
    return ", ".join(f"{iteration}: {value}" for iteration, value in points.items())


def _words(text: str) -> Iterator[tuple[int, str]]:
    """The points with the numbers of their lines."""
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.split("#")[0].split(","):
            if word.strip():
                yield number, word.strip()


def _point(word: str, where: str) -> tuple[int, float]:
    found = _POINT.fullmatch(word)
    shown = reprlib.repr(word)
    if found is None:
        raise BadCurve(f"{where}: {shown} is no point: write an iteration, a colon and a number, such as 200: 10000")
    iteration, value = found["iteration"], found["value"]
    if not (iteration.isascii() and iteration.isdecimal() and len(iteration) <= len(str(MAX_ITERATION))):
        raise BadCurve(f"{where}: {shown} names no iteration from 0 to {MAX_ITERATION:,}: write a whole number")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadCurve(f"{where}: {shown} has no number after its iteration: write one, such as 200: 10000")
    return int(iteration), number
