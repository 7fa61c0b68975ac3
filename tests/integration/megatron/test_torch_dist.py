"""A rank of any layout reads its part of Megatron's own checkpoint. Folders that are not such checkpoints are
refused.
"""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - to write a file that must not be read
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.component_bench import job_config
from tests.integration.megatron import small_job
from tests.integration.megatron.torch_dist_ranks import MODELS, PADDED_VOCAB
from tests.ranks import RankServer
from tidegate.config.job_config import ConfigError, parse_config
from tidegate.elastic.plan.parameters import num_shards, shard_of
from tidegate.job import load_job
from tidegate.megatron.gpt_provider import GptProvider, fill
from tidegate.megatron.torch_dist_checkpoint import open_torch_dist
from tidegate.megatron.torch_dist_index import FORMAT_FILE, INDEX_FILE, TorchDistRefused
from tidegate.megatron.torch_dist_weights import TorchDistWeights

SAVED: dict[str, tuple[str, dict[str, int]]] = {
    "dense, tp2": ("dense", {"tp": 2}),
    "dense, tp2 pp2": ("dense", {"tp": 2, "pp": 2}),
    "experts, tp2 ep2 dp2": ("experts", {"tp": 2, "ep": 2, "dp": 2}),
}
EVERYDAY = "dense, tp2"
"""In every run of the tests. The others are long."""


def save_in(ranks: RankServer, folder: Path, name: str) -> Path:
    model, layout = SAVED[name]
    num_ranks = prod(size for axis, size in layout.items() if axis != "ep")
    arguments = {"model": model, "layout": layout, "folder": str(folder)}
    ranks.run("tests.integration.megatron.torch_dist_ranks:saved", num_ranks, arguments)
    return folder


@pytest.fixture(scope="module")
def everyday(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_in(ranks, tmp_path_factory.mktemp("saved"), EVERYDAY)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == EVERYDAY else pytest.mark.long) for name in SAVED]
)
def test_every_shard_of_another_layout_has_the_bits_that_were_saved(
    ranks: RankServer, request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    folder = request.getfixturevalue("everyday") if name == EVERYDAY else save_in(ranks, tmp_path, name)
    padded_vocab = 64
    provider = GptProvider(MODELS[SAVED[name][0]], padded_vocab)
    weights = TorchDistWeights(open_torch_dist(folder, provider.parameters()))
    for parameter, tp in product(provider.parameters(), (1, 2, 4)):
        logical = provider.initial_tensor(parameter.name, small_job.trainer_settings().seed)
        for tp_rank in range(num_shards(parameter.cut, tp)):
            shard = shard_of(parameter.shape, parameter.cut, tp=tp, tp_rank=tp_rank)
            got, want = (torch.full((shard.num_elements,), torch.nan) for _ in range(2))
            weights.fill(got, parameter, shard)
            fill(want, logical, shard)
            assert torch.equal(got, want), (parameter.name, tp, tp_rank)


@pytest.fixture
def folder(everyday: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(everyday, tmp_path / "copy"))


def refusal(folder: Path, **other: Any) -> str:
    model = replace(MODELS["dense"], **other)
    with pytest.raises(TorchDistRefused) as refused:
        open_torch_dist(folder, GptProvider(model, 2 * PADDED_VOCAB).parameters())
    return str(refused.value)


def test_a_model_other_than_the_saved_one_is_refused(folder: Path) -> None:
    assert "decoder.layers.self_attention.linear_qkv.weight has shape" in refusal(folder, num_kv_heads=8)
    for num_layers in (1, 3):
        assert "the configured model is another one" in refusal(folder, num_layers=num_layers)
    lost = (
        "1 tensors do not belong to the configured model, and would be lost: decoder.layers.self_attention.linear_qkv"
    )
    assert lost in refusal(folder, qkv_bias=False)
    assert "has no decoder.layers.0.mlp.router.weight" in refusal(folder, num_experts=4, experts_per_token=2)
    assert "embedding.word_embeddings.weight has shape" in refusal(folder, vocab_size=PADDED_VOCAB + 1)


def test_a_damaged_checkpoint_is_refused(folder: Path) -> None:
    data = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1000])
    assert "it is truncated; fetch it again" in refusal(folder)
    data.unlink()
    assert f"{data.name} is missing: fetch it again" in refusal(folder)
    (folder / INDEX_FILE).write_bytes(b"\x80\x04nonsense")
    assert "its index is damaged" in refusal(folder)
    (folder / INDEX_FILE).unlink()
    assert "give the folder of one saved iteration" in refusal(folder)
    (folder / FORMAT_FILE).write_text(json.dumps({"sharded_backend": "zarr"}))
    assert "sharded_backend='zarr' is not supported, only 'torch_dist'" in refusal(folder)


def test_the_rank_that_reads_a_damaged_chunk_refuses_it(folder: Path) -> None:
    provider = GptProvider(MODELS["dense"], PADDED_VOCAB)
    checkpoint = open_torch_dist(folder, provider.parameters())
    for file in folder.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    parameter = provider.parameters()[0]
    shard = shard_of(parameter.shape, parameter.cut, tp=1, tp_rank=0)
    with pytest.raises(TorchDistRefused, match=r"\.distcp: the chunk at byte \d+ is damaged: fetch it again"):
        TorchDistWeights(checkpoint).fill(torch.empty(shard.num_elements), parameter, shard)


class Trap:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return os.mkdir, (self.trap,)


def test_an_index_that_names_a_foreign_class_is_refused_without_loading_it(folder: Path, tmp_path: Path) -> None:
    (folder / INDEX_FILE).write_bytes(pickle.dumps(Trap(tmp_path / "trap")))
    assert ".metadata names posix.mkdir, which is not an entry of an index and is not loaded" in refusal(folder)
    assert not (tmp_path / "trap").exists()


def with_index(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the index through torch's own classes."""
    index = pickle.loads((folder / INDEX_FILE).read_bytes())
    change(index)
    (folder / INDEX_FILE).write_bytes(pickle.dumps(index))


TABLE = "embedding.word_embeddings.weight"


def without_last_chunk(index: Any) -> None:
    index.state_dict_metadata[TABLE].chunks.pop()


def with_sizes(index: Any, sizes: Any) -> None:
    chunk = index.state_dict_metadata[TABLE].chunks[-1]
    object.__setattr__(chunk, "sizes", sizes)


def with_rows(index: Any, num_rows: int) -> None:
    """Change the table's number of rows, in the index alone."""
    table = index.state_dict_metadata[TABLE]
    table.size = torch.Size((num_rows, table.size[1]))


def with_place(index: Any, **fields: Any) -> None:
    for place in index.storage_data.values():
        for name, value in fields.items():
            object.__setattr__(place, name, value)


TAMPERED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a chunk is left out": (without_last_chunk, f"the chunks of {TABLE} have 2048 of 4096 elements"),
    "a chunk leaves its tensor": (lambda index: with_sizes(index, torch.Size((999, 32))), "has a chunk of shape"),
    "a chunk of other dims": (lambda index: with_sizes(index, torch.Size((64,))), "has a chunk of shape"),
    "sizes that are no numbers": (lambda index: with_sizes(index, "many"), "its index is damaged"),
    "a place before the file": (lambda index: with_place(index, offset=-1), "its index is damaged"),
    "a file somewhere else": (
        lambda index: with_place(index, relative_path="../other.distcp"),
        "names '../other.distcp', which is not a file beside it",
    ),
    "places that are missing": (lambda index: index.storage_data.clear(), "its index is damaged"),
}


@pytest.mark.parametrize(("change", "message"), TAMPERED.values(), ids=TAMPERED)
def test_an_inconsistent_index_is_refused(folder: Path, change: Callable[[Any], None], message: str) -> None:
    with_index(folder, change)
    assert message in refusal(folder)


def test_a_table_with_more_rows_than_padding_explains_belongs_to_another_tokenizer(folder: Path) -> None:
    with_index(folder, lambda index: with_rows(index, 61 + 767))
    assert "is not whole" in refusal(folder), "so many rows are padding, and only their elements are missing"
    with_index(folder, lambda index: with_rows(index, 61 + 768))
    message = refusal(folder)
    assert f"{TABLE} has 829 rows, and the model's vocabulary 61: 768 rows more" in message
    assert "saved in 2 parts makes fewer than 768. The tokenizer belongs to another model" in message


def test_a_job_whose_weights_do_not_fit_is_refused_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    raw = job_config(tmp_path).model_dump(mode="json")
    raw["model"] |= {"torch_dist": str(folder)}
    with pytest.raises(ConfigError, match=r"copy: .* has shape .*: the configured model is another one"):
        load_job(parse_config(raw))
    raw["model"] |= {"torch_dist": str(tmp_path / "absent")}
    with pytest.raises(ConfigError, match=r"absent: metadata.json: No such file or directory; give the folder of one"):
        load_job(parse_config(raw))
