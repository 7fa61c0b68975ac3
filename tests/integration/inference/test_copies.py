"""Real copies of the inference: whatever copies come, leave or die, a sample has the bits that one copy gives it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.integration.inference.real_copies import PROMPTS, Bits, config_json, forks, real_copies
from tests.ranks import RankServer
from tidegate.timeline import Window, fill, read_releases, read_spans, state_lengths
from tidegate.types import Layout

Server = tuple[Path, psutil.Process]


@pytest.fixture(scope="module")
def weights(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    arguments = {"config": config_json(folder.with_name("job")), "folder": str(folder)}
    ranks.run("tests.integration.inference.real_copies:write_weights", 1, arguments)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with forks(tmp_path_factory.mktemp("forks")) as running:
        yield running


async def scored_by(tmp_path: Path, layout: dict[str, int], weights: Path, server: Server) -> Bits:
    """By all copies of the layout, from the first group to the last."""
    async with real_copies(tmp_path, layout, weights=weights, server=server) as of:
        of.come([*of.bench.grants()], [*of.bench.grants()], Layout(**layout))
        of.lead.take(of.bench.open_iteration())
        await of.publish(range(PROMPTS))
        return await of.scored()


@pytest.mark.parametrize("tp", [1, 2])
async def test_two_copies_give_the_bits_of_one(tmp_path: Path, weights: Path, server: Server, tp: int) -> None:
    want = await scored_by(tmp_path / "one", {"tp": tp}, weights, server)
    assert await scored_by(tmp_path / "two", {"tp": tp, "dp": 2}, weights, server) == want


async def test_copies_that_come_leave_and_die_in_an_iteration_change_no_bit(
    tmp_path: Path, weights: Path, server: Server
) -> None:
    want = await scored_by(tmp_path / "one", {"tp": 2}, weights, server)
    async with real_copies(tmp_path / "moves", {"tp": 2, "dp": 2}, weights=weights, server=server) as of:
        one, two = of.grants(0, 1), of.grants(2, 3)
        of.come(one, one, Layout(tp=2))
        of.lead.take(of.bench.open_iteration())
        await of.publish(range(2))
        of.come(two, [*one, *two], Layout(tp=2, dp=2))
        await of.bench.published("layout_committed", count=2)
        await of.publish(range(2, 4))
        of.leave(one, two, Layout(tp=2))
        await of.bench.published("gpus_released")
        again = of.grants(0, 1, term=2)
        of.come(again, [*again, *two], Layout(tp=2, dp=2))
        await of.bench.published("layout_committed", count=4)
        of.kill(two[1].gpu)
        await of.publish(range(4, PROMPTS))
        assert await of.scored() == want
        assert two[1].gpu in of.deaths
        watched = of.bench.samples.prompts("fetch")  # type: ignore[attr-defined]  # the bench wraps its stream
        assert sorted(watched) == [*range(PROMPTS)], "neither a move nor a death uses up a delivery"
    spans, releases = read_spans(of.timeline.parent), read_releases(of.timeline.parent)
    for gpu, found in spans.items():
        window = Window(min(span.start_ns for span in found), max(span.end_ns for span in found))
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(sorted(found))), "one holder at a time"
        lengths = state_lengths(fill(found, window, released_ns=releases[gpu]))
        assert sum(lengths.values()) == window.wall_ns
        assert ("free" in lengths) == (gpu in {grant.gpu for grant in one}), "between its first copy and the next"
        assert "unknown" not in lengths
