"""A checkpoint with a missing or extra tensor or file is refused when it is opened, with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hugging_face import save
from tidegate.huggingface.checkpoint import CONFIG, INDEX, SINGLE_FILE, open_checkpoint
from tidegate.huggingface.checkpoint_weights import mapped
from tidegate.huggingface.families import CheckpointRefused
from tidegate.huggingface.tensor_file import open_tensor_file

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save(folder, "Qwen2.5")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def cut_short(folder: Path) -> None:
    weights = folder / SINGLE_FILE
    weights.write_bytes(weights.read_bytes()[:-100])


def cut_in_the_header(folder: Path) -> None:
    weights = folder / SINGLE_FILE
    weights.write_bytes(weights.read_bytes()[:50])


def cut_to_nothing(folder: Path) -> None:
    (folder / SINGLE_FILE).write_bytes(b"")


def lengthened(folder: Path) -> None:
    weights = folder / SINGLE_FILE
    weights.write_bytes(weights.read_bytes() + b"more")


def pickled_instead(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")


def changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        change(tensors)
        save_file(tensors, folder / SINGLE_FILE)

    return damage


def without_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def config_cut(folder: Path) -> None:
    (folder / CONFIG).write_text('{"architectures": [')


def with_header(header: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header)

    return damage


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a file that ends early": (cut_short, r"tensors end at byte \d+, the file at byte \d+: it is truncated; fetch"),
    "a file that ends in its header": (cut_in_the_header, "50 bytes do not hold a safetensors header"),
    "an empty file": (cut_to_nothing, "0 bytes do not hold a safetensors header"),
    "a file with something added": (lengthened, "something was added to it"),
    "no safetensors": (pickled_instead, "pytorch_model.bin, which is pickled and never read: save it as safetensors"),
    "a tensor that is missing": (changed(lambda t: t.pop(NORM)), f"1 of 26 tensors .* are in no file: {NORM}"),
    "a tensor too many": (
        changed(lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)})),
        "1 tensors do not belong to the model .*: model.layers.0.self_attn.o_proj.bias",
    ),
    "a tensor of another shape": (
        changed(lambda t: t.update({NORM: torch.zeros(32)})),
        r"tensor model.norm.weight has shape \[32\], and config.json implies \[64\]",
    ),
    "a tensor of another kind": (
        changed(lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int8)})),
        "tensor model.norm.weight is I8; weights are read in F32, F16, BF16",
    ),
    "no config": (without_config, "config.json: No such file or directory"),
    "a config that ends early": (config_cut, "config.json is not JSON"),
    "a header that is no JSON": (with_header(b"{{{"), "its header is not that of a safetensors file"),
    "a header that is a list": (with_header(b"[1]"), "its header is not that of a safetensors file"),
    "a header whose tensors overlap": (
        with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'),
        r"tensor a of shape \[2\] has the byte offsets \(4, 12\), but belongs at \(0, 8\)",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_when_it_is_opened(folder: Path, damage: Damage, message: str) -> None:
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises(CheckpointRefused, match=message) as refusal:
        open_checkpoint(folder)
    assert str(folder) in str(refusal.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="is not a folder: name the one that holds a model's"):
        open_checkpoint(tmp_path / "nothing")


def sharded(folder: Path) -> dict[str, str]:
    """Save a checkpoint of several files. Returns the weight map."""
    save(folder, "Qwen3", max_shard_size="60KB")
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    return weight_map


def test_a_checkpoint_of_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert {name: file.path.name for name, file in checkpoint.file_of.items()} == weight_map


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    missing = tmp_path / sorted(sharded(tmp_path).values())[-1]
    missing.unlink()
    with pytest.raises(CheckpointRefused, match=f"{missing.name}: No such file or directory; fetch"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_wrong_file_for_a_tensor_is_refused(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    first, last = min(weight_map.values()), max(weight_map.values())
    moved = weight_map | {NORM: first if weight_map[NORM] != first else last}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointRefused, match=f"1 of {len(moved)} tensors are not in the file .*: {NORM}; fetch"):
        open_checkpoint(tmp_path)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map | {NORM: "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointRefused, match=r"names '\.\./elsewhere.safetensors', which is not a file beside it"):
        open_checkpoint(tmp_path)


def test_the_header_has_the_place_of_each_tensor(saved: Path) -> None:
    file, want = open_tensor_file(saved / SINGLE_FILE), load_file(saved / SINGLE_FILE)
    assert file.tensors.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(mapped(file, name), tensor)
