"""The rollout's lead replaces groups without spread by the prompts that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from services.rollout.lead import RolloutLead
from tests.component_bench import Changes, snapshot, task_of
from tests.unit.rollout.fake_engines import FIRST, SECOND, Engines, RolloutBench, give, rollout
from tests.unit.rollout.fake_tasks import LongIsRight
from tests.unit.rollout.held_publishing import HeldPublishing
from tests.unit.rollout.outcomes import groups_on_stream
from tidegate.candidates import has_spread
from tidegate.codec import decode_sample_id, fate_of
from tidegate.ports.bus import SampleStream, Stage
from tidegate.runtime.lead import rewards_of
from tidegate.v1 import commands_pb2, samples_pb2


def replacing(of: RolloutBench) -> RolloutLead:
    """The lead of a job in which many groups have no spread."""
    lead = of.new_lead()
    lead.job = replace(lead.job, task=LongIsRight(task_of(lead.job)))
    return lead


REPLACED = {"filter_zero_std": True, "max_extra_prompts": 40}


async def assert_enough_with_spread(of: RolloutBench, groups: list[Any]) -> None:
    """Check that the groups are the shortest run with enough groups with spread, and that all are reported."""
    report = (await of.published("iteration_reported"))[-1].iteration_reported
    assert report.generated == fate_of([decode_sample_id(sample.id) for group in groups for sample in group.samples])
    assert [group.prompt for group in groups] == list(range(len(groups)))
    spread = [has_spread(rewards_of(group)) for group in groups]
    assert (sum(spread), spread[-1]) == (4, True)
    assert len(groups) > 4, "some were replaced"


async def test_groups_without_spread_are_replaced_by_the_prompts_that_follow(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines(), algorithm=REPLACED) as of:
        replacing(of)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        await assert_enough_with_spread(of, groups)
        progress = [each.progress for each in await of.published("progress", count=len(groups))]
        assert [each.num_done for each in progress] == list(range(1, len(groups) + 1))
        assert progress[-1].num_total == len(groups)


async def test_no_more_groups_are_replaced_than_there_are_extra_prompts(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines(), algorithm=REPLACED | {"max_extra_prompts": 1}) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        assert [group.prompt for group in groups] == [0, 1, 2, 3, 4]
        assert not any(has_spread(rewards_of(group)) for group in groups)


async def test_a_new_lead_replaces_the_same_groups(tmp_path: Path) -> None:
    async with rollout(tmp_path / "whole", Engines(), algorithm=REPLACED) as of:
        replacing(of)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        want = await groups_on_stream(of)
    engines = Engines()
    engines.num_permits = {FIRST: 4, SECOND: 3}
    async with rollout(tmp_path / "broken", engines, algorithm=REPLACED) as of:
        old = replacing(of)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress", count=2)
        await old.aclose()
        new = replacing(of)
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        new.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        new.take(of.open_iteration())
        await of.published("iteration_reported")
        got = await groups_on_stream(of)
        await assert_enough_with_spread(of, got)
        assert [(each.prompt, list(each.samples)) for each in got] == [
            (each.prompt, list(each.samples)) for each in want
        ]


async def test_an_earlier_leads_copy_of_a_group_decides_whether_it_is_replaced(tmp_path: Path) -> None:
    held: list[HeldPublishing] = []

    def wrap(samples: SampleStream, changes: Changes) -> SampleStream:
        held.append(HeldPublishing(samples, changes, prompt=1))
        return held[0]

    async with rollout(tmp_path, Engines(), wrap=wrap, algorithm=REPLACED | {"max_extra_prompts": 4}) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.changes.until(lambda: held[0].is_holding)
        assert held[0].group is not None
        other = samples_pb2.SampleGroup()
        other.CopyFrom(held[0].group)
        other.samples[0].reward = 1.0
        await of.bus.samples.publish(Stage.GENERATED, other)
        held[0].let_go.set()
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        assert [group.prompt for group in groups] == list(range(8)), (
            "all groups have equal rewards, except the one on the stream"
        )
        (progress, *_) = reversed(await of.published("progress", count=8))
        assert (progress.progress.num_done, progress.progress.num_total) == (8, 8)
