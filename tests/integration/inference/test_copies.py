"""Real copies of the inference: whatever copies come, leave or die, a sample has the bits that one copy gives it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests import effort
from tests.integration.inference.real_copies import PROMPTS, Bits, RealCopies, config_json, forks, real_copies
from tests.ranks import RankServer
from tidegate.timeline import Window, fill, read_releases, read_spans, state_lengths
from tidegate.types import NO_TOKEN, Grant, Layout

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


@pytest.mark.parametrize("tp", effort.cases([1, 2], always=[1]))
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
        of.process(two[1].gpu).kill()
        await of.publish(range(4, PROMPTS))
        assert await of.scored() == want
        assert two[1].gpu in of.deaths
        watched = of.bench.samples.prompts("fetch")  # type: ignore[attr-defined]  # the bench wraps its stream
        assert sorted(watched) == [*range(PROMPTS)], "neither a move nor a death uses up a delivery"
    spans, releases = read_spans(of.timeline.parent), read_releases(of.timeline.parent)
    for gpu, found in spans.items():
        window = Window(min(span.start_ns for span in found), max(span.end_ns for span in found))
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(sorted(found))), "one holder at a time"
        lengths = state_lengths(fill(found, window, released_ns=releases.get(gpu, ())))
        assert sum(lengths.values()) == window.wall_ns
        assert ("free" in lengths) == (gpu in {grant.gpu for grant in one}), "between its first copy and the next"
        assert "unknown" not in lengths


def stands_by(of: RealCopies, grants: list[Grant]) -> bool:
    return {Grant(grant.gpu, NO_TOKEN) for grant in grants} <= set(of.workers.running())


@pytest.mark.parametrize("tp", effort.cases([1, 2], always=[1]))
async def test_a_copy_that_stood_by_gives_the_same_bits_as_the_same_processes(
    tmp_path: Path, weights: Path, server: Server, tp: int
) -> None:
    want = await scored_by(tmp_path / "one", {"tp": tp}, weights, server)
    async with real_copies(tmp_path, {"tp": tp, "dp": 2}, weights=weights, server=server, policy="tide") as of:
        one, two = of.grants(*range(tp)), of.grants(*range(tp, 2 * tp))
        both = Layout(tp=tp, dp=2)
        of.come([*one, *two], [*one, *two], both)
        of.lead.take(of.bench.open_iteration())
        await of.bench.published("layout_committed")
        processes = [of.process(grant.gpu).pid for grant in two]
        for term in (2, 3):
            await of.bench.published("layout_committed", count=2 * term - 3)
            of.leave(of.grants(*range(tp, 2 * tp), term=term - 1), one, Layout(tp=tp))
            *_, released = await of.bench.published("gpus_released", count=term - 1)
            assert released.gpus_released.held_bytes == 0
            assert stands_by(of, two)
            again = of.grants(*range(tp, 2 * tp), term=term)
            of.come(again, [*one, *again], both)
        await of.bench.published("layout_committed", count=5)
        assert [of.process(grant.gpu).pid for grant in two] == processes
        of.leave(one, again, Layout(tp=tp))
        await of.bench.published("gpus_released", count=3)
        await of.publish(range(PROMPTS))
        assert await of.scored() == want, "by the copy that stood by, alone"
    spans, releases = read_spans(of.timeline.parent), read_releases(of.timeline.parent)
    for grant in two:
        found = spans[grant.gpu]
        window = Window(min(span.start_ns for span in found), max(span.end_ns for span in found))
        lengths = state_lengths(fill(found, window, released_ns=releases[grant.gpu]))
        assert sum(lengths.values()) == window.wall_ns
        assert "free" in lengths
        assert "unknown" not in lengths


async def test_a_copy_one_of_whose_ranks_died_standing_by_comes_back_with_the_same_bits(
    tmp_path: Path, weights: Path, server: Server
) -> None:
    want = await scored_by(tmp_path / "one", {"tp": 2}, weights, server)
    async with real_copies(tmp_path, {"tp": 2, "dp": 2}, weights=weights, server=server, policy="tide") as of:
        one, two = of.grants(0, 1), of.grants(2, 3)
        of.come([*one, *two], [*one, *two], Layout(tp=2, dp=2))
        of.lead.take(of.bench.open_iteration())
        await of.bench.published("layout_committed")
        of.leave(two, one, Layout(tp=2))
        await of.bench.published("gpus_released")
        survivor = of.process(two[0].gpu).pid
        await of.kill(two[1].gpu)
        of.leave(one, [], Layout(tp=2))
        again = of.grants(2, 3, term=2)
        of.come(again, again, Layout(tp=2))
        await of.bench.published("layout_committed", count=3)
        assert of.process(two[0].gpu).pid == survivor
        await of.publish(range(PROMPTS))
        assert await of.scored() == want


async def test_a_standby_refuses_a_stale_token_at_the_gate_and_stands_by_on(
    tmp_path: Path, weights: Path, server: Server
) -> None:
    async with real_copies(tmp_path, {"tp": 1, "dp": 2}, weights=weights, server=server, policy="tide") as of:
        (one,), (two,) = of.grants(0), of.grants(1, term=2)
        of.come([one, two], [one, two], Layout(dp=2))
        await of.bench.published("layout_committed")
        of.leave([two], [one], Layout())
        await of.bench.published("gpus_released")
        (stale,) = of.grants(1, term=1)
        of.come([stale], [one, stale], Layout(dp=2))
        (failed,) = await of.bench.published("failed")
        assert "1.2" in failed.failed.message
        assert "2.2" in failed.failed.message
        assert stands_by(of, [two])
        (again,) = of.grants(1, term=3)
        of.come([again], [one, again], Layout(dp=2))
        await of.bench.published("layout_committed", count=3)
        assert again in of.workers.running()
