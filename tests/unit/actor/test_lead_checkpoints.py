"""The checkpoints and versions with which the actor's lead ends an iteration, and a resume from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.actor.checkpoints import CheckpointStore
from tests.component_bench import JOB, NODES
from tests.unit.actor.actor_bench import ids, training
from tidegate.codec import fate_of
from tidegate.job import JobFolder
from tidegate.ports.bus import Stage
from tidegate.v1 import events_pb2


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


async def test_a_resume_whose_checkpoint_is_damaged_goes_on_from_the_one_before(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        for iteration in range(2):
            prompts = range(4 * iteration, 4 * iteration + 4)
            await of.scored(prompts, iteration=iteration, version=iteration)
            if iteration == 0:
                old = of.start()
            else:
                of.take(of.bench.open_iteration(iteration))
            of.close(iteration)
            await of.bench.published("weights_published", count=2 + iteration)
        await old.aclose()
        manifest = JobFolder.of(of.bench.config).checkpoints / "inc001-it000002" / "manifest.json"
        manifest.write_text("{}")
        of.bench.new_lead()
        of.take(of.bench.scale_up(of.bench.grants(term=2), incarnation=2, checkpoint="inc001-it000002"))
        *_, committed = await of.bench.published("layout_committed", count=2)
        assert committed.layout_committed.next_iteration == 1
        *_, published = await of.bench.published("weights_published", count=4)
        assert published.weights_published.snapshot.version == 1


async def test_a_missing_checkpoint_fails_before_any_worker_starts(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.take(of.bench.scale_up(checkpoint="inc001-it000009"))
        (failed,) = await of.bench.published("failed")
        assert "inc001-it000009 has no readable manifest" in failed.failed.message
        assert of.bench.instances[NODES[0]].started == []


@pytest.mark.parametrize(("kl_coefficient", "want"), [(0.0, ()), (0.1, (0,))], ids=["without KL", "with KL"])
async def test_opening_an_iteration_frees_the_versions_before_its_own_but_not_the_reference(
    tmp_path: Path, kl_coefficient: float, want: tuple[int, ...]
) -> None:
    async with training(tmp_path, algorithm={"kl_coefficient": kl_coefficient}) as of:
        await of.scored(range(4))
        drops = of.bench.instances[NODES[0]].drops
        of.start()
        of.close()
        await of.bench.published("weights_published", count=2)
        assert drops == [(0, want)], "an engine that comes may still read version 0"
        await of.scored(range(4, 8), iteration=1, version=1)
        of.take(of.bench.open_iteration(1))
        await of.bench.published("iteration_reported", count=2)
        assert drops == [(0, want), (1, want)]
