"""The checkpoint that a resumed run finds in its folder, written by the actor's own store: the newest one, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.actor.checkpoints import Checkpoint, CheckpointStore
from services.actor.ledger import ClosedIteration, SampleLedger
from tests.unit.cli.configs import small_config
from tidegate.config.job_config import ConfigError
from tidegate.job import JobFolder, load_job
from tidegate.launcher.checkpoint import FoundCheckpoint, newest_checkpoint
from tidegate.launcher.claim import Start, claim_folder
from tidegate.types import Layout


def save(folder: Path, *, incarnation: int, next_iteration: int) -> None:
    store = CheckpointStore(folder, keep=99)
    store.begin()
    closed = tuple(ClosedIteration(iteration, 4, 0, 0) for iteration in range(next_iteration))
    ledger = SampleLedger(incarnation, closed=closed, num_trained=4 * next_iteration)
    store.commit(Checkpoint(next_iteration, next_iteration, Layout(), ledger, ()))


def test_the_newest_is_the_last_incarnations_furthest_by_number_and_not_by_spelling(tmp_path: Path) -> None:
    for incarnation, next_iteration in [(2, 9), (999, 7), (1000, 3), (1000, 4)]:
        save(tmp_path, incarnation=incarnation, next_iteration=next_iteration)
    assert newest_checkpoint(tmp_path) == FoundCheckpoint(
        name="inc1000-it000004", incarnation=1000, next_iteration=4, version=4, num_samples_trained=16
    )


def test_a_save_that_did_not_end_and_a_folder_of_another_name_are_no_checkpoints(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, keep=1).begin()
    (tmp_path / "inc009-it000009").mkdir()
    save(tmp_path, incarnation=1, next_iteration=1)
    (tmp_path / "inc001-it000001").rename(tmp_path / "inc001-it000001-copy")
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_a_resume_goes_on_from_the_newest_that_can_be_read(tmp_path: Path) -> None:
    for next_iteration, manifest in enumerate((None, "{}", '{"next_iteration": 3'), start=1):
        save(tmp_path, incarnation=1, next_iteration=next_iteration)
        if manifest is not None:
            (tmp_path / f"inc001-it00000{next_iteration}" / "manifest.json").write_text(manifest)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "inc001-it000001"
    assert [each.partition(" ")[0] for each in found.passed_over] == ["inc001-it000003", "inc001-it000002"]


def test_where_no_manifest_can_be_read_all_are_named(tmp_path: Path) -> None:
    for next_iteration in (1, 2):
        save(tmp_path, incarnation=1, next_iteration=next_iteration)
        (tmp_path / f"inc001-it00000{next_iteration}" / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"can be read: inc001-it000002 \(KeyError.*inc001-it000001 \(KeyError"):
        newest_checkpoint(tmp_path)


def test_only_a_resumed_run_starts_from_the_checkpoint_in_its_folder(tmp_path: Path) -> None:
    job = load_job(small_config(tmp_path))
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as first:
        save(first.folder.checkpoints, incarnation=1, next_iteration=1)
        assert first.checkpoint is None
    with claim_folder(job, Start.RESUME, now_unix_s=0.0) as resumed:
        assert resumed.checkpoint is not None
        assert resumed.checkpoint.name == "inc001-it000001"
    with claim_folder(job, Start.FORCE, now_unix_s=0.0) as started_over:
        assert started_over.checkpoint is None
    assert not list(JobFolder.of(job.config).checkpoints.iterdir())
