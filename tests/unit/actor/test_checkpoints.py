"""A checkpoint is complete or absent, and checked before its use. Pruning keeps the newest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.actor.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from services.actor.ledger import ClosedIteration, SampleLedger
from tidegate.checkpoint_manifest import MANIFEST, manifest_text, read_manifest
from tidegate.checksums import WrittenFile, file_checksum
from tidegate.types import Layout


def _checkpoint(folder: Path, *, next_iteration: int = 1, incarnation: int = 0) -> Checkpoint:
    path = folder / "rank00000.safetensors"
    path.write_bytes(b"weights" * next_iteration)
    closed = tuple(ClosedIteration(iteration, 4, 0, 0) for iteration in range(next_iteration))
    ledger = SampleLedger(incarnation=incarnation, closed=closed, num_trained=4 * next_iteration)
    file = WrittenFile(path.name, path.stat().st_size, file_checksum(path))
    return Checkpoint(next_iteration, next_iteration, Layout(dp=2), ledger, (file,))


def _saved(store: CheckpointStore, *, next_iteration: int = 1, incarnation: int = 0) -> Checkpoint:
    checkpoint = _checkpoint(store.begin(), next_iteration=next_iteration, incarnation=incarnation)
    store.commit(checkpoint)
    return checkpoint


def test_a_commit_removes_no_checkpoint_because_the_new_one_is_not_announced_yet(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for iteration in (1, 2):
        _saved(store, next_iteration=iteration)
    assert store.names() == ["inc000-it000001", "inc000-it000002"]


def test_a_loaded_checkpoint_equals_the_saved_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    want = _saved(store)
    assert store.load(want.name) == want


def test_pruning_lets_the_newest_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for iteration in (1, 2, 3):
        _saved(store, next_iteration=iteration)
    store.prune()
    assert store.names() == ["inc000-it000002", "inc000-it000003"]


def test_a_checkpoint_of_a_later_incarnation_is_newer_than_one_of_a_later_iteration(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    _saved(store, next_iteration=5, incarnation=1)
    _saved(store, next_iteration=3, incarnation=2)
    store.prune()
    assert store.names() == ["inc002-it000003"]


def test_a_save_that_did_not_end_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _saved(store)
    _checkpoint(store.begin(), next_iteration=2)
    assert store.names() == ["inc000-it000001"]


def test_a_commit_that_is_a_repeat_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    want = _saved(store)
    assert _saved(store) == want
    assert store.load(want.name) == want


def test_a_damaged_file_is_named_when_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    checkpoint = _saved(store)
    (store.path(checkpoint.name) / "rank00000.safetensors").write_bytes(b"else")
    with pytest.raises(CheckpointError, match=r"rank00000.safetensors has checksum .* resume from another checkpoint"):
        store.load(checkpoint.name)


def _without_file(folder: Path) -> None:
    (folder / "rank00000.safetensors").unlink()


def _with_flipped_bit(folder: Path) -> None:
    content = bytearray((folder / "rank00000.safetensors").read_bytes())
    content[3] ^= 1
    (folder / "rank00000.safetensors").write_bytes(content)


def _with_a_cut_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a file is gone": _without_file,
    "a bit of a file is flipped": _with_flipped_bit,
    "the manifest is cut": _with_a_cut_manifest,
    "the manifest is of other values": lambda folder: (folder / "manifest.json").write_text('{"format": 3}'),
    "the manifest is no map": lambda folder: (folder / "manifest.json").write_text("[3]"),
    "the manifest is no text": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "all of it is gone": shutil.rmtree,
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_newest_sound_one_and_is_set_aside(case: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    _saved(store, next_iteration=1)
    want = _saved(store, next_iteration=2)
    newest = _saved(store, next_iteration=3)
    DAMAGES[case](store.path(newest.name))

    found, faults = store.load_newest(newest.name)

    assert found == want
    assert len(faults) == 1
    assert newest.name in faults[0]
    assert store.names() == ["inc000-it000001", "inc000-it000002"]
    assert (tmp_path / f"{newest.name}.damaged").exists() == (case != "all of it is gone")


def test_where_no_checkpoint_is_sound_the_newest_is_named_and_nothing_changes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for next_iteration in (1, 2):
        _without_file(store.path(_saved(store, next_iteration=next_iteration).name))
    with pytest.raises(CheckpointError, match=r"inc000-it000002/rank00000\.safetensors is missing"):
        store.load_newest("inc000-it000002")
    assert store.names() == ["inc000-it000001", "inc000-it000002"]


@pytest.mark.parametrize("case", ["another format", "a manifest that is a folder"])
def test_a_checkpoint_that_may_be_sound_is_neither_passed_over_nor_set_aside(case: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for next_iteration in (1, 2):
        _saved(store, next_iteration=next_iteration)
    manifest = tmp_path / "inc000-it000002" / "manifest.json"
    if case == "another format":
        manifest.write_text('{"format": 9}')
    else:
        manifest.unlink()
        manifest.mkdir()
    with pytest.raises(CheckpointError, match=r"inc000-it000002 (has format 9|cannot be read now)"):
        store.load_newest("inc000-it000002")
    assert store.names() == ["inc000-it000001", "inc000-it000002"]


def test_work_that_a_later_incarnation_superseded_is_nothing_to_fall_back_to(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    want = _saved(store, next_iteration=2, incarnation=1)
    _saved(store, next_iteration=5, incarnation=1)
    _without_file(store.path(_saved(store, next_iteration=3, incarnation=2).name))
    assert store.load_newest("inc002-it000003")[0] == want


def test_a_checkpoint_with_a_missing_file_is_not_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    folder = store.begin()
    checkpoint = _checkpoint(folder)
    (folder / "rank00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.commit(checkpoint)
    assert store.names() == []


def test_loading_an_unknown_checkpoint_lists_the_complete_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _saved(store)
    with pytest.raises(CheckpointError, match="complete: inc000-it000001"):
        store.load("inc000-it000009")


def test_counters_without_a_unit_are_left_to_the_jobs_legacy_policy(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    checkpoint = _saved(store)
    folder = store.path(checkpoint.name)
    counters = json.dumps({"num_steps": 8429, "lr_decay_steps": 2400})
    (folder / MANIFEST).write_text(manifest_text({**read_manifest(folder), "lr": counters}))
    assert store.load(checkpoint.name).lr is None


@pytest.mark.parametrize("lr", [{}, 3, "{"])
def test_an_unreadable_learning_rate_ledger_is_named(tmp_path: Path, lr: object) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    checkpoint = _saved(store)
    folder = store.path(checkpoint.name)
    (folder / MANIFEST).write_text(manifest_text({**read_manifest(folder), "lr": lr}))
    with pytest.raises(CheckpointError, match=r"the learning-rate ledger is no JSON .* resume from another one"):
        store.load(checkpoint.name)
