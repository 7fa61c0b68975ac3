"""What the actor's lead does with an update that is not finite."""

from __future__ import annotations

from pathlib import Path

from tests.unit.actor.actor_bench import ids, training
from tidegate.codec import fate_of


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
