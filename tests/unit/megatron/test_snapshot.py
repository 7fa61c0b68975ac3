"""Snapshots: what one layout writes, any other reads bit for bit; a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tidegate.checksums import combined_checksum
from tidegate.megatron.family import padded_vocab_size
from tidegate.megatron.regions import FirstHolder, RegionsMissing
from tidegate.megatron.shards import Shard, logical_shapes, shard_of
from tidegate.megatron.snapshot import SnapshotCorrupt, SnapshotReader, write_shards
from tidegate.model_config import ModelConfig

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_heads=4,
    num_kv_heads=4,
    head_dim=2,
    vocab_size=13,
    max_seq_len=16,
)
PADDED_VOCAB = padded_vocab_size(CONFIG, [1, 2, 4])


def _logical() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in logical_shapes(CONFIG).items()}


def _shard(name: str, *, tp: int, tp_rank: int) -> Shard:
    return shard_of(CONFIG, name, tp=tp, tp_rank=tp_rank, padded_vocab=PADDED_VOCAB)


def _cut(shard: Shard, logical: torch.Tensor) -> torch.Tensor:
    local = torch.zeros(shard.local_shape)
    for piece in shard.pieces:
        rows = logical.narrow(shard.dim, piece.logical, piece.size)
        local.narrow(shard.dim, piece.local, piece.size).copy_(rows)
    return local


def _write(folder: Path, *, tp: int) -> dict[str, str]:
    checksums = {}
    for tp_rank in range(tp):
        shards = [(_shard(name, tp=tp, tp_rank=tp_rank), tensor) for name, tensor in _logical().items()]
        written = write_shards(folder, f"rank{tp_rank}.safetensors", [(s, _cut(s, t)) for s, t in shards])
        checksums[written.file] = written.checksum
    return checksums


@pytest.mark.parametrize("source_tp", [1, 2, 4])
@pytest.mark.parametrize("target_tp", [1, 2, 4])
def test_any_layout_reads_what_any_other_wrote_bit_for_bit(tmp_path: Path, source_tp: int, target_tp: int) -> None:
    reader = SnapshotReader(tmp_path, _write(tmp_path, tp=source_tp))
    for name, logical in _logical().items():
        for tp_rank in range(target_tp):
            target = _shard(name, tp=target_tp, tp_rank=tp_rank)
            got = torch.zeros(target.local_shape)
            reader.read_into(target, got)
            assert torch.equal(got, _cut(target, logical)), name


def test_a_whole_parameter_is_read_without_vocabulary_padding(tmp_path: Path) -> None:
    reader = SnapshotReader(tmp_path, _write(tmp_path, tp=4))
    for name, want in _logical().items():
        assert torch.equal(reader.read_whole(name), want)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    checksums = _write(tmp_path, tp=2)
    path = tmp_path / "rank1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SnapshotCorrupt, match=r"rank1.safetensors has checksum .* its writer said"):
        SnapshotReader(tmp_path, checksums)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    checksums = _write(tmp_path, tp=2)
    (tmp_path / "rank0.safetensors").unlink()
    with pytest.raises(SnapshotCorrupt, match=r"rank0.safetensors is missing"):
        SnapshotReader(tmp_path, checksums)


def test_rows_that_no_source_holds_are_an_error_that_names_them() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    half = _shard(name, tp=2, tp_rank=1)
    with pytest.raises(RegionsMissing, match=r"linear_qkv.weight: no source holds index 0 of 24"):
        FirstHolder().copies([half], _shard(name, tp=1, tp_rank=0))


def test_a_tensor_of_another_shape_than_its_shard_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    shard = _shard("decoder.final_layernorm.weight", tp=1, tp_rank=0)
    with pytest.raises(ValueError, match=r"the tensor is \(3,\), its shard \(8,\)"):
        write_shards(tmp_path, "rank0.safetensors", [(shard, torch.zeros(3))])
    assert list(tmp_path.iterdir()) == []


def test_the_snapshots_checksum_does_not_depend_on_the_order_of_its_files() -> None:
    assert combined_checksum({"a": "1", "b": "2"}) == combined_checksum({"b": "2", "a": "1"})
    assert combined_checksum({"a": "1", "b": "2"}) != combined_checksum({"a": "2", "b": "1"})
