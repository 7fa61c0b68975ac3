"""The actor's lead over fake ranks: which samples its minibatches have, its pictures, its start and the warm-up."""

from __future__ import annotations

from pathlib import Path

from services.scheduler.shell.codecs.observed_codec import training_of
from services.scheduler.state.observed import Training as Seen
from tests.component_bench import snapshot
from tests.unit.actor.actor_bench import FIRST, SECOND, ids, training
from tests.watched_samples import scored_group
from tidegate.codec import fate_of
from tidegate.ports.bus import Stage
from tidegate.types import Layout
from tidegate.v1 import commands_pb2, samples_pb2


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
