"""Draws the losses of the elastic example's two runs, and their distance, into docs/img/elastic-loss.svg.

Run it as `python -m tools.draw_curves [FILE.svg]`. It trains for a minute: every point comes from the run that it has
just made. A distance of 0 has its own line, because a log scale has no place for 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.elastic import local
from tidegate.elastic.epoch.world import World
from tidegate.elastic.report import ReshardReport

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "img" / "elastic-loss.svg"
LEFT, RIGHT = 84, 776
EQUAL = 464
"""The y coordinate of the line for equal losses."""
DECADES = (-9, -8, -7, -6, -5)
"""The decades of the distance: fp32 losses of this size are 1e-8 to 4e-7 from the next one."""
STYLE = """
    .card { fill: #ffffff; stroke: #d5dbe1; } .grid { stroke: #d5dbe1; } .axis { stroke: #7b8794; }
    .fixed { fill: none; stroke: #8db4e8; stroke-width: 7; stroke-linecap: round; stroke-linejoin: round; }
    .resized { fill: none; stroke: #b44d12; stroke-width: 1.8; } .apart { fill: #b44d12; }
    .resize { stroke: #52606d; stroke-dasharray: 4 4; }
    text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; font-size: 12.5px;
           fill: #52606d; }
    .h { font-size: 14px; font-weight: 600; fill: #1f2933; } .end { text-anchor: end; } .middle { text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #3d444d; } .grid { stroke: #3d444d; } .axis { stroke: #7d8590; }
      .fixed { stroke: #2f5f9e; } .resized { stroke: #f0a36b; } .apart { fill: #f0a36b; } .resize { stroke: #9198a1; }
      text { fill: #9198a1; } .h { fill: #e6edf3; }
    }
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels, linearly through two pairs."""

    values: tuple[float, float]
    pixels: tuple[float, float]

    def __call__(self, value: float) -> float:
        (low, high), (start, end) = self.values, self.pixels
        return round(start + (value - low) / (high - low) * (end - start), 1)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'  <text x="{x}" y="{y}" class="{kind}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'  <path d="M{x1} {y1}L{x2} {y2}" class="{kind}"/>'


def curve(x: Scale, y: Scale, values: Sequence[float], kind: str) -> str:
    points = "L".join(f"{x(number)} {y(value)}" for number, value in enumerate(values))
    return f'  <path d="M{points}" class="{kind}"/>'


def loss_panel(
    x: Scale, resized: Sequence[float], fixed: Sequence[float], reports: Sequence[ReshardReport]
) -> list[str]:
    top = math.ceil(max(*resized, *fixed))
    y = Scale((0, top), (290, 74))
    body = [text(LEFT, 32, "Loss of a run that is resized three times, and of the same run in one layout", "h")]
    for value in range(top + 1):
        body += [line(LEFT, y(value), RIGHT, y(value), "grid"), text(LEFT - 8, y(value) + 4, f"{value}", "end")]
    starts = [0, *(report.num_updates for report in reports)]
    layouts = [reports[0].source, *(report.target for report in reports)]
    for start, end, layout in zip(starts, [*starts[1:], len(fixed)], layouts, strict=True):
        body += [text((x(start) + x(end - 1)) / 2, 56, f"{layout}", "h middle")]
    for report in reports:
        at = x(report.num_updates - 0.5)
        body += [line(at, 62, at, 290, "resize"), text(at + 6, 88, f"resized in {report.total_s:.2f} s")]
    return [*body, curve(x, y, fixed, "fixed"), curve(x, y, resized, "resized")]


def distance_panel(
    x: Scale, resized: Sequence[float], fixed: Sequence[float], reports: Sequence[ReshardReport]
) -> list[str]:
    y = Scale((DECADES[0], DECADES[-1]), (444, 344))
    body = [text(LEFT, 328, "Distance between the two", "h")]
    for decade in DECADES:
        body += [line(LEFT, y(decade), RIGHT, y(decade), "grid"), text(LEFT - 8, y(decade) + 4, f"1e{decade}", "end")]
    body += [line(LEFT, EQUAL, RIGHT, EQUAL, "axis"), text(LEFT - 8, EQUAL + 4, "equal", "end")]
    for report in reports:
        at = x(report.num_updates - 0.5)
        body += [line(at, 344, at, EQUAL, "resize")]
    for number, (one, other) in enumerate(zip(resized, fixed, strict=True)):
        height = EQUAL if one == other else y(min(max(math.log10(abs(one - other)), DECADES[0]), DECADES[-1]))
        body += [f'  <circle cx="{x(number)}" cy="{height}" r="2.6" class="apart"/>']
    for number in range(0, len(fixed), 15):
        body += [text(x(number), 484, f"{number}", "middle")]
    return [*body, text(RIGHT, 484, "update", "end")]


def draw(resized: Sequence[float], fixed: Sequence[float], reports: Sequence[ReshardReport]) -> str:
    """The picture as SVG. The losses are by update and finite, and the run was resized at least once."""
    x = Scale((0, len(fixed) - 1), (LEFT + 8, RIGHT - 8))
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 520" width="800" height="520" role="img">',
        "  <title>Loss curves of a resized and a fixed run, one on the other, and their distance</title>",
        f"  <style>{STYLE}  </style>",
        '  <rect x="1" y="1" width="798" height="518" rx="14" class="card"/>',
        *loss_panel(x, resized, fixed, reports),
        *distance_panel(x, resized, fixed, reports),
        line(LEFT, 504, LEFT + 26, 504, "fixed"),
        text(LEFT + 36, 508, f"fixed, {reports[0].source}"),
        line(LEFT + 140, 504, LEFT + 166, 504, "resized"),
        text(LEFT + 176, 508, "resized"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main(picture: Path) -> None:
    from examples import elastic_gpt  # import late: it changes which CUDA parts Megatron finds in this process

    def member(world: World, folder: Path) -> None:
        resized, reports = elastic_gpt.train(world, folder, elastic_gpt.RESIZES)
        fixed, _ = elastic_gpt.train(world, folder, {})
        if world.me == 0:
            picture.write_text(draw(resized, fixed, reports))

    local.run(member, num_members=4)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
