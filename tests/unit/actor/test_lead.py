"""The actor's lead over fake ranks: minibatches, the account of every sample, checkpoints, versions, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.actor.checkpoints import CheckpointStore
from services.scheduler.shell.codecs.observed_codec import training_of
from services.scheduler.state.observed import Training as Seen
from tests.component_bench import ACK_WAIT_S, JOB, NODES, snapshot
from tests.unit.actor.actor_bench import FIRST, SECOND, ids, training
from tests.watched_samples import scored_group
from tidegate.codec import fate_of
from tidegate.ports.bus import Stage
from tidegate.types import Layout, SampleId
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2


async def test_in_fixed_order_minibatches_are_runs_of_prompts_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        await of.scored([3, 1, 2, 0])
        of.start()
        report = await of.report()
        assert of.ranks.minibatches() == [ids(0, 1), ids(2, 3)]
        assert report.trained == fate_of(ids(0, 1, 2, 3))
        assert (list(report.filtered), list(report.discarded), report.num_duplicates_dropped) == ([], [], 0)
        assert sorted(of.watch.prompts("ack")) == [0, 1, 2, 3]


async def test_in_arrival_order_the_first_complete_groups_go_first(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm={"minibatch_order": "arrival"}) as of:
        await of.scored([3, 1, 2, 0])
        of.start()
        report = await of.report()
        assert of.ranks.prompts() == [[3, 1], [2, 0]]
        assert report.trained == fate_of(ids(0, 1, 2, 3))


async def test_a_minibatch_is_trained_as_soon_as_its_groups_are_complete(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.start()
        await of.scored([0, 1])
        await of.until_acked(0, 1)
        assert of.ranks.prompts() == [[0, 1]]
        await of.scored([3, 2])
        await of.report()
        assert of.ranks.prompts() == [[0, 1], [2, 3]]


async def test_pictures_show_each_update_at_its_begin_and_at_its_end(tmp_path: Path) -> None:
    async with training(tmp_path, num_permits=0) as of:
        of.start()
        await of.bench.published("training")
        await of.scored([0, 1])
        begun = [training_of(each.training) for each in await of.bench.published("training", count=2)]
        for permits in of.ranks.permits.values():
            permits.release()
            permits.release()
        await of.scored([2, 3])
        await of.report()
        pictures = [event.training for event in of.bench.events.all if event.HasField("training")]

    assert begun == [Seen(0, 0, is_at_boundary=True), Seen(0, 2, is_at_boundary=False)]
    last = training_of(pictures[-1])
    assert (last.num_minibatches_done, last.num_taken, last.is_at_boundary) == (2, 4, True)
    assert [(each.layout, each.rate_tokens_per_s > 0) for each in last.measured] == [(Layout(dp=2), True)]
    assert begun[0].update_s is None
    assert last.update_s is not None


async def test_samples_reach_every_rank_with_their_advantages_and_log_probabilities(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm={"normalize_std": False}) as of:
        await of.scored(range(4), rewards=(0.0, 1.0))
        of.start()
        await of.report()
        samples = of.ranks.same().trained[0].samples
        assert [sample.advantage for sample in samples] == [-0.5, 0.5] * 2
        for sample in samples:
            want = [sample.id.prompt + 3] * (sample.id.draw + 1)
            assert list(sample.response_tokens) == want
            assert list(sample.prompt_tokens) == [3, 4]
            assert list(sample.old_log_probs) == [-1.0] * len(want)
            assert list(sample.engine_log_probs) == [-0.5] * len(want)


async def test_responses_cut_by_the_length_limit_are_masked_where_the_config_says_so(tmp_path: Path) -> None:
    async with training(tmp_path, algorithm={"mask_truncated": True}) as of:
        for prompt in range(4):
            group = scored_group(prompt)
            group.samples[1].finish = samples_pb2.FINISH_REASON_LENGTH
            await of.bench.bus.samples.publish(Stage.SCORED, group)
        of.start()
        await of.report()
        assert [sample.masked for sample in of.ranks.same().trained[0].samples] == [False, True] * 2


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


async def test_figures_that_are_not_finite_are_left_out_of_events_and_null_in_the_journal(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.fail_next(2)
        await of.scored(range(4))
        of.take(of.bench.open_iteration())
        report = await of.report()
        (progress, _) = await of.bench.published("progress", count=2)
        want = {"kl": 0.125, "lr": 1e-3}
        for metrics in (progress.progress.metrics, report.metrics):
            assert {name: metrics[name] for name in ("kl", "lr")} == want
            assert not {"loss", "grad_norm"} & set(metrics)
        assert [(row["loss"], row["grad_norm"]) for row in of.journal()] == [(None, None)] * 2


async def test_an_update_that_is_not_finite_discards_its_samples_and_training_goes_on(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.fail_next(1)
        await of.scored(range(4))
        of.take(of.bench.open_iteration())
        report = await of.report()
        assert report.trained == fate_of(ids(2, 3))
        assert list(report.discarded) == [fate_of(ids(0, 1), reason="nonfinite_update")]
        assert [row["committed"] for row in of.journal()] == [False, True]


async def test_every_update_has_its_own_id_and_number_even_after_a_discarded_one(
    tmp_path: Path,
) -> None:
    async with training(tmp_path) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.fail_next(1)
        await of.scored(range(4))
        of.take(of.bench.open_iteration())
        await of.report()
        assert [row["update"] for row in of.journal()] == ["1.0.0", "1.0.1"]
        progress = [event.progress for event in await of.bench.published("progress", count=2)]
        assert [(each.num_done, each.num_total) for each in progress] == [(1, 2), (2, 2)]


async def test_too_many_updates_in_a_row_that_are_not_finite_fail_the_job_with_the_numbers(tmp_path: Path) -> None:
    async with training(tmp_path, actor={"max_skipped_updates": 1}) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.fail_next(2)
        await of.scored(range(4))
        of.take(of.bench.open_iteration())
        (failed,) = await of.bench.published("failed")
        assert failed.failed.fatal
        assert "2 updates in a row had a non-finite gradient (actor.max_skipped_updates=1)" in failed.failed.message
        assert "lower actor.learning_rate" in failed.failed.message
        assert "iteration_reported" not in await of.bench.kinds()


async def test_a_finite_update_starts_the_count_of_skipped_ones_anew(tmp_path: Path) -> None:
    async with training(tmp_path, actor={"max_skipped_updates": 1}) as of:
        of.take(of.bench.scale_up())
        for iteration in range(2):
            await of.bench.published("weights_published", count=iteration + 1)
            of.ranks.fail_next(1)
            await of.scored(range(4 * iteration, 4 * iteration + 4), iteration=iteration, version=iteration)
            of.take(of.bench.open_iteration(iteration))
            of.close(iteration)
        await of.bench.published("weights_published", count=3)
        assert [row["committed"] for row in of.journal()] == [False, True, False, True]


async def test_an_iteration_ends_with_its_report_then_the_checkpoint_then_the_new_version(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        await of.scored(range(4))
        of.start()
        await of.bench.published("iteration_reported")
        assert (await of.bench.kinds())[-1] == "iteration_reported", "nothing is saved before the accounts add up"
        of.close()
        await of.bench.published("weights_published", count=2)
        kinds = [kind for kind in await of.bench.kinds() if kind not in ("progress", "training")]
        assert kinds == [
            "gpus_acquired",
            "layout_committed",
            "weights_published",
            "iteration_reported",
            "checkpoint_saved",
            "weights_published",
        ]
        first, second = [
            each.weights_published.snapshot for each in await of.bench.published("weights_published", count=2)
        ]
        assert (first.version, second.version) == (0, 1)
        assert first.checksum != second.checksum
        (saved,) = await of.bench.published("checkpoint_saved")
        want = events_pb2.CheckpointSaved(next_iteration=1, version=1, name="inc001-it000001", num_samples_trained=8)
        assert saved.checkpoint_saved == want
        store = CheckpointStore(of.bench.folder.checkpoints, keep=2)
        assert store.load("inc001-it000001").ledger.num_trained == 8


async def test_only_the_configured_number_of_checkpoints_is_kept(tmp_path: Path) -> None:
    async with training(tmp_path, checkpoint={"keep": 1}) as of:
        of.take(of.bench.scale_up())
        for iteration in range(2):
            await of.scored(range(4 * iteration, 4 * iteration + 4), iteration=iteration, version=iteration)
            of.take(of.bench.open_iteration(iteration))
            of.close(iteration)
            await of.bench.published("weights_published", count=iteration + 2)
        store = CheckpointStore(of.bench.folder.checkpoints, keep=1)
        assert store.names() == ["inc001-it000002"]


async def test_a_checkpoint_purges_the_groups_that_it_covers_from_the_stream(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        await of.scored(range(4))
        of.start()
        of.close()
        await of.bench.published("checkpoint_saved")
        await of.bench.published("weights_published", count=2)
        held = await of.bench.bus.samples.published(JOB, Stage.SCORED, incarnation=1, iteration=0)
        assert held == frozenset()


async def test_checkpoints_are_saved_at_the_configured_interval_and_after_the_last_iteration(tmp_path: Path) -> None:
    async with training(tmp_path, checkpoint={"every": 2}) as of:
        of.take(of.bench.scale_up())
        for iteration in range(3):
            await of.scored(range(4 * iteration, 4 * iteration + 4), iteration=iteration, version=iteration)
            of.take(of.bench.open_iteration(iteration))
            of.close(iteration)
            await of.bench.published("weights_published", count=iteration + 2)
        saved = await of.bench.published("checkpoint_saved", count=2)
        assert [each.checkpoint_saved.next_iteration for each in saved] == [2, 3]
        assert (await of.bench.kinds()).count("checkpoint_saved") == 2


async def test_the_last_checkpoint_is_exported_before_it_is_announced(tmp_path: Path) -> None:
    async with training(tmp_path, checkpoint={"export": True}) as of:
        of.take(of.bench.scale_up())
        for iteration in range(3):
            await of.scored(range(4 * iteration, 4 * iteration + 4), iteration=iteration, version=iteration)
            of.take(of.bench.open_iteration(iteration))
            of.close(iteration)
            *_, saved = await of.bench.published("checkpoint_saved", count=iteration + 1)
            exported = of.bench.folder.export / "of"
            assert exported.exists() == (iteration == 2)
        assert json.loads(exported.read_text()) == [saved.checkpoint_saved.name] == ["inc001-it000003"]


async def test_a_resume_from_the_last_checkpoint_exports_it_before_its_version_is_published(tmp_path: Path) -> None:
    async with training(tmp_path, checkpoint={"export": True}) as of:
        old = of.take(of.bench.scale_up())
        for iteration in range(3):
            await of.scored(range(4 * iteration, 4 * iteration + 4), iteration=iteration, version=iteration)
            of.take(of.bench.open_iteration(iteration))
            of.close(iteration)
            await of.bench.published("weights_published", count=iteration + 2)
        await old.aclose()
        exported = of.bench.folder.export / "of"
        exported.unlink()
        for incarnation, next_iteration in ((2, 2), (3, 3)):
            lead = of.bench.new_lead()
            checkpoint = f"inc001-it{next_iteration:06d}"
            grants = of.bench.grants(term=incarnation)
            of.take(of.bench.scale_up(grants, incarnation=incarnation, checkpoint=checkpoint))
            await of.bench.published("weights_published", count=3 + incarnation)
            assert exported.exists() == (next_iteration == 3)
            await lead.aclose()
        assert json.loads(exported.read_text()) == ["inc001-it000003"]


async def test_a_resume_continues_from_the_checkpoint_in_a_higher_incarnation(tmp_path: Path) -> None:
    async with training(tmp_path, actor={"lr_warm_up_samples": 16}) as of:
        await of.scored(range(4))
        old = of.start()
        of.close()
        await of.bench.published("weights_published", count=2)
        want_weights = list(of.ranks.same().weights)
        await old.aclose()
        of.bench.new_lead()
        grants = of.bench.grants(term=2)
        of.take(of.bench.scale_up(grants, incarnation=2, checkpoint="inc001-it000001"))
        *_, committed = await of.bench.published("layout_committed", count=2)
        assert committed.layout_committed.next_iteration == 1
        *_, published = await of.bench.published("weights_published", count=3)
        assert (published.weights_published.snapshot.incarnation, published.weights_published.snapshot.version) == (
            2,
            1,
        )
        assert of.ranks.same().weights == want_weights
        await of.scored(range(4, 8), incarnation=2, iteration=1, version=1)
        of.take(of.bench.open_iteration(1, incarnation=2))
        of.close(1, incarnation=2)
        *_, report = await of.bench.published("iteration_reported", count=2)
        assert report.iteration_reported.trained == fate_of(ids(4, 5, 6, 7, incarnation=2, iteration=1))
        rates = [train.learning_rate for train in of.ranks.same().trained]
        assert rates == [0.5e-3, 0.75e-3], "8 and 12 of 16 samples of the warm-up are trained before"
        *_, saved = await of.bench.published("checkpoint_saved", count=2)
        assert (saved.checkpoint_saved.name, saved.checkpoint_saved.num_samples_trained) == ("inc002-it000002", 16)


async def test_a_resume_in_the_incarnation_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        await of.scored(range(4))
        old = of.start()
        of.close()
        await of.bench.published("weights_published", count=2)
        await old.aclose()
        of.bench.new_lead()
        of.take(of.bench.scale_up(of.bench.grants(term=2), checkpoint="inc001-it000001"))
        (failed,) = await of.bench.published("failed")
        assert "incarnation 1 does not follow the checkpoint's 1" in failed.failed.message


async def test_a_missing_checkpoint_fails_before_any_worker_starts(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.take(of.bench.scale_up(checkpoint="inc001-it000009"))
        (failed,) = await of.bench.published("failed")
        assert "inc001-it000009 has no readable manifest" in failed.failed.message
        assert of.bench.instances[NODES[0]].started == []


async def test_every_rank_is_started_at_its_seat_of_one_world(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("layout_committed")
        ranks = of.ranks.of[FIRST], of.ranks.of[SECOND]
        worlds = [rank.worlds[0] for rank in ranks]
        assert [(world.rendezvous.rank, world.rendezvous.world_size) for world in worlds] == [(0, 2), (1, 2)]
        assert [list(world.members) for world in worlds] == [[0, 1], [0, 1]]
        starts = [rank.started[0] for rank in ranks]
        assert {(tuple(start.ranks), start.layout.dp, start.checkpoint_dir) for start in starts} == {((0, 1), 2, "")}


async def test_the_warm_up_runs_once_before_version_0_is_published(tmp_path: Path) -> None:
    warm_up = {"steps": 3, "batch_size": 4, "learning_rate": 1e-3}
    async with training(tmp_path, actor={"warm_up": warm_up}) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        progress = await of.bench.published("progress", count=3)
        assert [(each.progress.phase, each.progress.num_done) for each in progress] == [
            ("warm_up", n) for n in (1, 2, 3)
        ]
        assert of.ranks.same().weights == ["warm-up 1", "warm-up 2", "warm-up 3"]


async def test_a_job_may_end_in_the_middle_of_the_warm_up(tmp_path: Path) -> None:
    async with training(tmp_path, num_permits=1, actor={"warm_up": {"steps": 3}}) as of:
        up = of.bench.scale_up()
        of.take(up)
        await of.bench.changes.until(lambda: [rank.num_asked for rank in of.ranks.of.values()] == [2, 2])
        of.take(commands_pb2.ScaleDownRequest(header=of.bench.header(), grants=up.grants))
        await of.bench.published("gpus_released")
        assert not {"weights_published", "failed"} & set(await of.bench.kinds())


async def test_the_actor_refuses_to_load_weights(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.take(commands_pb2.LoadWeightsRequest(header=of.bench.header(), weights=snapshot(0)))
        (failed,) = await of.bench.published("failed")
        assert "the actor makes the weights; it cannot load any" in failed.failed.message


@pytest.mark.parametrize(("kl_coefficient", "want"), [(0.0, ()), (0.1, (0,))], ids=["without KL", "with KL"])
async def test_closing_an_iteration_frees_the_versions_before_the_newest_but_not_the_reference(
    tmp_path: Path, kl_coefficient: float, want: tuple[int, ...]
) -> None:
    async with training(tmp_path, algorithm={"kl_coefficient": kl_coefficient}) as of:
        await of.scored(range(4))
        of.start()
        of.close()
        await of.scored(range(4, 8), iteration=1, version=1)
        of.take(of.bench.open_iteration(1))
        await of.bench.published("iteration_reported", count=2)
        assert of.bench.instances[NODES[0]].drops == [(1, want)]
