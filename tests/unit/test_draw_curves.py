"""The picture of the elastic example shows each update once, and distinguishes equal losses from close ones."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from tidegate.elastic.report import ReshardReport
from tidegate.types import Layout
from tools.draw_curves import EQUAL, draw

SVG = "{http://www.w3.org/2000/svg}"
REPORT = ReshardReport(
    source=Layout(dp=2),
    source_ranks=(0, 1),
    target=Layout(tp=2),
    target_ranks=(0, 1),
    num_updates=2,
    moved_bytes=0,
    minimum_bytes=0,
    local_bytes=0,
    certificate="",
    seconds={"transfer": 0.25},
)


def heights(picture: str) -> list[float]:
    """The heights of the points that stand for distances."""
    return [float(point.attrib["cy"]) for point in ElementTree.fromstring(picture).iter(f"{SVG}circle")]


def test_each_update_has_its_distance_and_only_equal_losses_lie_on_the_line_of_equal_ones() -> None:
    points = heights(draw([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0 + 1e-6, 1.0 + 1e-12], [REPORT]))
    assert [point == EQUAL for point in points] == [True, True, False, False]
    assert points[2] < points[3], "a larger distance is higher"


def test_a_resize_is_marked_with_its_seconds_and_each_stretch_with_its_layout() -> None:
    later = replace(REPORT, source=Layout(tp=2), target=Layout(pp=2), num_updates=3, seconds={"transfer": 0.5})
    losses = [4.0, 3.0, 2.0, 1.0]
    words = [text.text for text in ElementTree.fromstring(draw(losses, losses, [REPORT, later])).iter(f"{SVG}text")]
    want = ["dp2", "tp2", "pp2", "resized in 0.25 s", "resized in 0.50 s"]
    assert [word for word in words if word in want] == want
