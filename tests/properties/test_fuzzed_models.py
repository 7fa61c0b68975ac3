"""Whatever bytes are in the files of a person's data, tokenizer or weights: a value, or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import example, given
from hypothesis import strategies as st

from services.actor.snapshots import ReferenceMissing, copy_out
from tests.properties.fuzzing import ODD_TEXTS, damaged_bytes, damaged_json, damaged_values, fuzzed, value_or_refusal
from tests.unit.data.tokenizers_made import make_tokenizer
from tidegate.checksums import file_checksum
from tidegate.config.sections.data import DataSection
from tidegate.data.prompts import PromptReader, training_files
from tidegate.data.records import read_records
from tidegate.huggingface.checkpoint import CONFIG, SINGLE_FILE, open_checkpoint
from tidegate.huggingface.families import CheckpointRefused, config_of, model_of
from tidegate.huggingface.tensor_file import header_of, open_tensor_file
from tidegate.megatron.torch_dist_index import FORMAT_FILE, TorchDistRefused, open_index
from tidegate.model_config import Llama3Scaling, ModelConfig
from tidegate.tasks.tokenizer import TaskTokenizer, load_tokenizer
from tidegate.tasks.tokenizer_config import load_tokenizer_config
from tidegate.v1 import types_pb2

ROWS = [
    {"prompt": "How many?", "answer": 3},
    {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": None},
    {"prompt": "x", "answer": [1, {"a": 2.5}], "tags": ["a"]},
]
lines = st.lists(damaged_json(ROWS) | st.sampled_from(ROWS).map(lambda row: json.dumps(row).encode()), max_size=3)


@fuzzed
@given(content=lines.map(b"\n".join))
def test_records_of_any_bytes_are_read_and_each_faulty_line_is_told(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "train.jsonl").write_bytes(content)
    faults: list[str] = []
    records = list(read_records(path, faults))
    assert len(records) + len(faults) == sum(bool(line.strip()) for line in content.split(b"\n"))
    assert all(str(path) in fault for fault in faults)


@pytest.fixture
def tokenizer(tmp_path: Path) -> TaskTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path / "model"), model_vocab_size=1000)


@fuzzed
@given(content=lines.map(b"\n".join), template=st.sampled_from(["tokenizer", ""]))
def test_prompts_of_any_bytes_are_read_or_refused(
    tmp_path: Path, tokenizer: TaskTokenizer, content: bytes, template: str
) -> None:
    (path := tmp_path / "train.jsonl").write_bytes(content)
    data = DataSection(train=str(path), answer_key="answer", chat_template=template)
    reader = PromptReader(data, tokenizer)
    prompts = value_or_refusal(lambda files: reader.read(files, max_tokens=40), training_files(data), ValueError)
    assert prompts is None or all(reader.encode(prompt) for prompt in prompts)


TOKENIZER = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tools", "template": "x"}],
}


@fuzzed
@given(content=damaged_json([TOKENIZER]))
@example(content=b'{"chat_template": [{"name": ["default"], "template": "x"}]}')
def test_a_tokenizers_config_of_any_bytes_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    config = value_or_refusal(load_tokenizer_config, tmp_path, ValueError)
    assert config is None or isinstance(config.chat_template, str | None)


TENSORS = {"a": ("F32", (2, 2)), "b": ("BF16", (4,))}


def tensor_bytes() -> bytes:
    head, placed = header_of(TENSORS)
    return head + bytes(sum(tensor.size_bytes for tensor in placed.values()))


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(24)


HEADER = json.loads(header_of(TENSORS)[0][8:])


@fuzzed
@given(content=damaged_bytes([tensor_bytes()]) | damaged_json([HEADER]).map(with_header))
@example(content=with_header(b'{"a":{"dtype":"F32","shape":[-2,-3],"data_offsets":[0,24]}}'))
@example(content=with_header(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,24]}}'))
@example(content=(2**62).to_bytes(8, "little"))
def test_weights_of_any_bytes_are_opened_or_refused(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(content)
    opened = value_or_refusal(open_tensor_file, path, CheckpointRefused)
    if opened is not None:
        assert all(size >= 0 for tensor in opened.tensors.values() for size in tensor.shape)
        assert all(tensor.offset + tensor.size_bytes <= len(content) for tensor in opened.tensors.values())


MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    max_seq_len=80,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32),
)
EXPERTS = ModelConfig(2, 16, 32, 2, 2, 8, 64, 80, qk_norm=True, num_experts=4, experts_per_token=2)
MODELS = [config_of(MODEL, dtype="float32"), config_of(EXPERTS, dtype="bfloat16")]


@fuzzed
@given(damaged_values(MODELS))
@example({**MODELS[0], "rope_theta": 10**400})
def test_any_values_are_a_models_config_or_are_refused(values: Any) -> None:
    if isinstance(values, dict):
        model = value_or_refusal(model_of, values, CheckpointRefused)
        assert model is None or model.head_dim > 0


@fuzzed
@given(content=damaged_json(MODELS))
@example(content=json.dumps({**MODELS[0], "num_hidden_layers": 2**62}).encode())
@example(content=json.dumps({**MODELS[1], "num_experts": 2**62}).encode())
def test_a_checkpoint_whose_config_is_damaged_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(tensor_bytes())
    (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(CheckpointRefused):
        open_checkpoint(tmp_path)


@fuzzed
@given(content=damaged_json([{"sharded_backend": "torch_dist", "sharded_backend_version": 1}]))
def test_an_index_without_its_pickle_is_refused_whatever_its_format_says(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FORMAT_FILE).write_bytes(content)
    with pytest.raises(TorchDistRefused):
        open_index(tmp_path)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The reference policy that a job keeps, and a file beside it that is not the job's."""
    (tmp_path / "secret").write_bytes(b"weights")
    (folder := tmp_path / "kept").mkdir()
    (folder / "rank0").write_bytes(b"weights")
    return folder


def reference(file: str) -> dict[str, Any]:
    shard = types_pb2.SnapshotShard(node="n0", endpoint="at-n0", file=file, size_bytes=7, checksum=CHECKSUM)
    snapshot = types_pb2.Snapshot(job="demo", incarnation=1, version=3, shards=[shard], checksum="c")
    fields: dict[str, Any] = MessageToDict(snapshot)
    return fields


CHECKSUM = "0" * 32


@fuzzed
@given(content=damaged_json([reference("rank0")]) | st.sampled_from(ODD_TEXTS))
@example(content=json.dumps(reference("../secret")).encode())
@example(content=json.dumps(reference("/etc/hosts")).encode())
@example(content=json.dumps(reference("")).encode())
def test_a_kept_reference_of_any_bytes_is_restored_or_refused(tmp_path: Path, kept: Path, content: bytes) -> None:
    sound = file_checksum(kept / "rank0").encode()
    (kept / "snapshot.json").write_bytes(content.replace(CHECKSUM.encode(), sound))
    found = value_or_refusal(lambda folder: copy_out(folder, lambda _: tmp_path / "out"), kept, ReferenceMissing)
    restored = {path.name for path in (tmp_path / "out").glob("*")}
    assert restored <= {"rank0"}
    assert found is None or {shard.file for shard in found.shards} <= {"rank0"}
