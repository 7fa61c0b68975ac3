"""The account of every sample by the actor's lead: trained once, repeated, foreign, filtered or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import ACK_WAIT_S, NODES
from tests.unit.actor.actor_bench import SECOND, ids, training
from tests.watched_samples import scored_group
from tidegate.codec import fate_of
from tidegate.ports.bus import Stage
from tidegate.types import SampleId
from tidegate.v1 import commands_pb2, samples_pb2


async def test_the_journal_holds_a_sample_before_its_group_is_acknowledged(tmp_path: Path) -> None:
    async with training(tmp_path) as of:

        def is_journalled(group: samples_pb2.SampleGroup) -> None:
            rows = [row for row in of.journal() if str(SampleId(1, 0, group.prompt, 0)) in row["samples"]]
            assert [row["committed"] for row in rows] == [True]

        of.watch.before_ack = is_journalled
        await of.scored(range(4))
        of.start()
        await of.report()
        assert sorted(of.watch.prompts("ack")) == [0, 1, 2, 3]
        assert [row["samples"] for row in of.journal()] == [
            [str(sample) for sample in ids(*m)] for m in [(0, 1), (2, 3)]
        ]


async def test_nothing_is_acknowledged_while_its_update_is_under_way(tmp_path: Path) -> None:
    async with training(tmp_path, num_permits=0) as of:
        await of.scored(range(4))
        of.start()
        await of.bench.changes.until(lambda: [rank.num_asked for rank in of.ranks.of.values()] == [1, 1])
        assert of.watch.prompts("ack") == []
        of.bench.instances[NODES[0]].kill(SECOND)
        of.take(commands_pb2.ScaleDownRequest(header=of.bench.header(), grants=of.bench.scale_up().grants))
        await of.bench.published("gpus_released")
        assert of.watch.prompts("ack") == []
        assert of.journal() == []
        assert not {"iteration_reported", "failed"} & set(await of.bench.kinds()), "its instance tells the death"


async def test_a_group_delivered_again_after_its_update_is_dropped_and_counted(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.watch.lost_acks.add(0)
        of.start()
        await of.scored([0, 1])
        await of.until_acked(0, 1)
        await of.bench.clock.advance(ACK_WAIT_S)
        await of.until_acked(0, 1, 0)
        await of.scored([2, 3])
        report = await of.report()
        assert report.num_duplicates_dropped == 2
        assert report.trained == fate_of(ids(0, 1, 2, 3))
        assert of.ranks.prompts() == [[0, 1], [2, 3]]


async def test_a_group_delivered_again_while_it_waits_for_its_minibatch_is_counted_and_acknowledged_after_its_update(
    tmp_path: Path,
) -> None:
    async with training(tmp_path) as of:
        of.start()
        await of.scored([0])
        await of.bench.changes.until(lambda: of.watch.prompts("fetch") == [0])
        await of.bench.clock.advance(ACK_WAIT_S)
        await of.bench.changes.until(lambda: of.watch.prompts("fetch") == [0, 0])
        await of.scored([2])
        await of.bench.changes.until(lambda: of.watch.prompts("fetch") == [0, 0, 2])
        assert of.watch.prompts("ack") == [], "it is not trained yet: a crash must bring it again"
        await of.scored([1, 3])
        report = await of.report()
        assert report.num_duplicates_dropped == 2
        assert of.ranks.prompts() == [[0, 1], [2, 3]]
        assert sorted(of.watch.prompts("ack")) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "fields", [{"incarnation": 2}, {"iteration": 1, "version": 1}], ids=["incarnation", "iteration"]
)
async def test_a_group_of_a_future_incarnation_or_iteration_is_delayed_ever_longer(
    tmp_path: Path, fields: dict[str, int]
) -> None:
    async with training(tmp_path) as of:
        of.start()
        await of.scored([0], **fields)
        for num_naks, delay_s in enumerate((1.0, 2.0, 4.0), start=1):
            await of.bench.changes.until(lambda num_naks=num_naks: len(of.watch.prompts("nak")) == num_naks)  # type: ignore[misc]
            await of.bench.clock.advance(delay_s)
        assert "dead_lettered" not in await of.bench.kinds()


async def test_groups_that_wait_for_their_minibatch_get_in_progress_acks(tmp_path: Path) -> None:
    async with training(tmp_path, runtime={"ack_wait_s": 0.03}) as of:
        of.start()
        await of.scored([1, 3])
        await of.bench.changes.until(lambda: {1, 3} <= set(of.watch.prompts("in progress")))
        await of.scored([0, 2])
        assert (await of.report()).num_duplicates_dropped == 0


async def test_a_group_of_an_older_incarnation_is_acknowledged_untrained(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        await of.scored([0], incarnation=1)
        await of.scored(range(4), incarnation=2)
        of.take(of.bench.scale_up(incarnation=2), of.bench.open_iteration(incarnation=2))
        report = await of.report()
        assert report.trained == fate_of(ids(0, 1, 2, 3, incarnation=2))
        assert report.num_duplicates_dropped == 0
        assert of.watch.prompts("ack").count(0) == 2


@pytest.mark.parametrize(
    ("prompt", "fields", "want"),
    [
        (0, {"rewards": (0.0, 1.0, 0.0)}, "group of prompt 0 holds 3 samples"),
        (0, {"version": 5}, "version 5; iteration 0 takes prompts 0-3 in groups of 2 from version 0"),
        (9, {}, "group of prompt 9"),
    ],
    ids=["of another size", "of another version", "of no prompt of the iteration"],
)
async def test_a_foreign_group_is_dead_lettered_with_the_prompts_that_the_iteration_takes(
    tmp_path: Path, prompt: int, fields: dict[str, Any], want: str
) -> None:
    async with training(tmp_path) as of:
        of.start()
        await of.scored([prompt], **fields)
        (letter,) = await of.bench.published("dead_lettered")
        assert want in letter.dead_lettered.reason
        assert of.ranks.same().trained == []


async def test_groups_of_equal_rewards_are_filtered_and_accounted_where_the_config_says_so(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm={"filter_zero_std": True}) as of:
        await of.scored([0, 2, 3], rewards=(1.0, 1.0))
        await of.scored([1])
        of.start()
        report = await of.report()
        assert of.ranks.minibatches() == [ids(1)]
        assert report.trained == fate_of(ids(1))
        assert list(report.filtered) == [fate_of(ids(0, 2, 3), reason="zero_std")]
        assert report.metrics["reward_mean"] == 0.875, "what was filtered was sampled all the same"
        assert sorted(of.watch.prompts("ack")) == [0, 1, 2, 3]


async def test_the_report_counts_the_rewards_that_failed_on_samples_with_and_without_an_update(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm={"filter_zero_std": True}) as of:
        trained, filtered = scored_group(1), scored_group(2, rewards=(0.0, 0.0))
        for sample in (trained.samples[0], *filtered.samples):
            sample.failures.add(reward="grading:score", message="it raised")
        for group in (scored_group(0), trained, filtered, scored_group(3)):
            await of.bench.bus.samples.publish(Stage.SCORED, group)
        of.start()
        assert (await of.report()).metrics["num_failed_rewards"] == 3


REPLACED = {"filter_zero_std": True, "max_extra_prompts": 3}


async def test_groups_without_spread_are_filtered_and_replaced_in_order_of_prompts(
    tmp_path: Path,
) -> None:
    async with training(tmp_path, algorithm=REPLACED) as of:
        of.start()
        await of.scored([5])
        await of.scored([3, 1], rewards=(1.0, 1.0))
        await of.scored([2, 0])
        await of.until_acked(0, 1, 2)
        assert of.ranks.minibatches() == [ids(0, 2)], "it starts when its groups are there"
        await of.scored([4])
        report = await of.report()
        assert of.ranks.minibatches() == [ids(0, 2), ids(4, 5)]
        assert report.trained == fate_of(ids(0, 2, 4, 5))
        assert list(report.filtered) == [fate_of(ids(1, 3), reason="zero_std")]
        assert report.metrics["groups_with_spread"] == 4 / 6
        assert sorted(of.watch.prompts("ack")) == [0, 1, 2, 3, 4, 5]


async def test_when_extra_prompts_run_out_the_remaining_groups_with_spread_are_trained(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm=REPLACED) as of:
        of.start()
        await of.scored([1, 2, 4, 5], rewards=(1.0, 1.0))
        await of.scored([0, 3, 6])
        report = await of.report()
        assert of.ranks.minibatches() == [ids(0, 3), ids(6)]
        assert report.trained == fate_of(ids(0, 3, 6))
        assert list(report.filtered) == [fate_of(ids(1, 2, 4, 5), reason="zero_std")]


async def test_an_iteration_without_any_spread_trains_nothing_and_accounts_for_all_samples(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm=REPLACED) as of:
        of.start()
        await of.scored(range(7), rewards=(0.0, 0.0))
        report = await of.report()
        assert of.ranks.same().trained == []
        assert list(report.filtered) == [fate_of(ids(*range(7)), reason="zero_std")]
        assert of.journal() == []


async def test_a_resume_goes_on_after_the_extra_prompts_that_the_checkpoint_covers(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm=REPLACED) as of:
        await of.scored([1], rewards=(0.0, 0.0))
        await of.scored([0, 2, 3, 4])
        old = of.start()
        of.close()
        await of.bench.published("weights_published", count=2)
        await old.aclose()
        of.bench.new_lead()
        of.take(of.bench.scale_up(of.bench.grants(term=2), incarnation=2, checkpoint="inc001-it000001"))
        first, again = await of.bench.published("layout_committed", count=2)
        assert [each.layout_committed.next_prompt for each in (first, again)] == [0, 5]
        await of.scored(range(5, 9), incarnation=2, iteration=1, version=1)
        of.take(of.bench.open_iteration(1, incarnation=2, first_prompt=5))
        *_, report = await of.bench.published("iteration_reported", count=2)
        assert report.iteration_reported.trained == fate_of(ids(5, 6, 7, 8, incarnation=2, iteration=1))
