"""An imported checkpoint is exported bit for bit, on any ranks. A model without a checkpoint is exported as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.hugging_face import CONFIGS, save
from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT
from tidegate.elastic.plan.parameters import Parameter, Vocabulary, num_shards, shard_of
from tidegate.huggingface.checkpoint import CONFIG, SINGLE_FILE, HuggingFaceCheckpoint, open_checkpoint
from tidegate.huggingface.checkpoint_weights import CheckpointWeights
from tidegate.huggingface.export import export
from tidegate.huggingface.families import CheckpointRefused
from tidegate.huggingface.names import tensors_of
from tidegate.megatron.family import model_parameters
from tidegate.tasks.tokenizer import build_tokenizer, load_tokenizer

PADDED_VOCAB = 64


def parameters_of(checkpoint: HuggingFaceCheckpoint) -> tuple[Parameter, ...]:
    return model_parameters(checkpoint.model, padded_vocab=PADDED_VOCAB)


def rank_parts(checkpoint: HuggingFaceCheckpoint, parameter: Parameter, *, tp: int) -> list[torch.Tensor]:
    """The parts that each of `tp` ranks reads, in fp32. Elements that are not filled stay NaN."""
    parts = []
    for tp_rank in range(num_shards(parameter.cut, tp)):
        shard = shard_of(parameter.shape, parameter.cut, tp=tp, tp_rank=tp_rank)
        local = torch.full((shard.num_elements,), torch.nan)
        CheckpointWeights(checkpoint).fill(local, parameter, shard)
        parts.append(local)
    return parts


def put_together(checkpoint: HuggingFaceCheckpoint, *, tp: int) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter in parameters_of(checkpoint):
        whole = torch.full(parameter.shape, torch.nan)
        for tp_rank, local in enumerate(rank_parts(checkpoint, parameter, tp=tp)):
            shard = shard_of(parameter.shape, parameter.cut, tp=tp, tp_rank=tp_rank)
            for piece in shard.pieces:
                part = local.view(shard.rows, shard.width)[:, piece.local : piece.local + piece.size]
                whole.view(shard.rows, -1)[:, piece.logical : piece.logical + piece.size] = part
        yield parameter.name, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_untrained_weights_are_exported_as_their_original_files(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, name, dtype=dtype, max_shard_size="60KB")
    checkpoint = open_checkpoint(source)
    weights = put_together(checkpoint, tp=2)
    export(target, checkpoint.model, parameters_of(checkpoint), weights, source=checkpoint)
    want = {path.name: path.read_bytes() for path in source.iterdir()}
    assert {path.name: path.read_bytes() for path in target.iterdir()} == want
    assert CONFIG in want


def test_padding_rows_of_the_vocabulary_are_zero_in_a_rank(tmp_path: Path) -> None:
    save(tmp_path, "Llama 2")
    checkpoint = open_checkpoint(tmp_path)
    tables = [parameter for parameter in parameters_of(checkpoint) if isinstance(parameter.cut, Vocabulary)]
    assert [table.name for table in tables] == [EMBEDDING, OUTPUT]
    for table in tables:
        rows = torch.cat([part.view(-1, table.shape[1]) for part in rank_parts(checkpoint, table, tp=4)])
        assert rows.shape[0] == PADDED_VOCAB
        assert not rows[61:].any()
        assert rows[:61].isfinite().all()


def test_each_tensor_is_named_once_and_each_row_is_in_one_tensor(tmp_path: Path) -> None:
    for name in CONFIGS:
        save(tmp_path, name)
        checkpoint = open_checkpoint(tmp_path)
        seen: set[str] = set()
        for parameter in parameters_of(checkpoint):
            rows: list[int] = []
            for tensor in tensors_of(parameter, checkpoint.model):
                assert tensor.name not in seen
                seen.add(tensor.name)
                rows += [row for run in tensor.rows for row in range(run.first, run.first + run.size)]
            assert sorted(rows) == list(range(parameter.shape[0])), parameter.name
        assert seen == set(checkpoint.file_of), name


def with_copy(folder: Path, *, altered: bool) -> HuggingFaceCheckpoint:
    """A tied checkpoint that keeps the output layer too, as some do."""
    save(folder, "Qwen2.5", dtype=torch.bfloat16)
    tensors = load_file(folder / SINGLE_FILE)
    copy = tensors["model.embed_tokens.weight"].clone()
    copy[60, 63] += altered
    save_file(tensors | {"lm_head.weight": copy}, folder / SINGLE_FILE, metadata={"format": "pt"})
    return open_checkpoint(folder)


def test_a_tied_copy_in_the_checkpoint_is_exported_too(tmp_path: Path) -> None:
    checkpoint = with_copy(tmp_path / "source", altered=False)
    parameters = parameters_of(checkpoint)
    export(tmp_path / "target", checkpoint.model, parameters, put_together(checkpoint, tp=2), source=checkpoint)
    want = (tmp_path / "source" / SINGLE_FILE).read_bytes()
    assert (tmp_path / "target" / SINGLE_FILE).read_bytes() == want


def test_a_tied_copy_that_differs_is_refused_by_the_rank_that_holds_the_row(tmp_path: Path) -> None:
    checkpoint = with_copy(tmp_path, altered=True)
    embedding = parameters_of(checkpoint)[0]
    want = shard_of(embedding.shape, embedding.cut, tp=2, tp_rank=0)
    CheckpointWeights(checkpoint).fill(torch.empty(want.num_elements), embedding, want)
    with pytest.raises(CheckpointRefused, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        rank_parts(checkpoint, embedding, tp=2)


def test_trained_weights_are_exported_in_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "source", "Qwen3", dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path / "source")
    trained = [(name, tensor + 0.01) for name, tensor in put_together(checkpoint, tp=1)]
    export(tmp_path / "target", checkpoint.model, parameters_of(checkpoint), trained, source=checkpoint)
    before, after = (load_file(tmp_path / folder / SINGLE_FILE) for folder in ("source", "target"))
    for name, tensor in after.items():
        assert torch.equal(tensor, (before[name].float() + 0.01).bfloat16()), name


def test_transformers_reads_the_export_of_a_model_without_a_checkpoint(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    tokens = torch.tensor([[5, 17, 3, 3, 41]])
    for name in CONFIGS:
        model = save(source, name)
        checkpoint = open_checkpoint(source)
        weights = put_together(checkpoint, tp=1)
        export(target, checkpoint.model, parameters_of(checkpoint), weights)
        read = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", dtype=torch.float32)
        with torch.inference_mode():
            torch.testing.assert_close(read(tokens).logits, model(tokens).logits, atol=1e-6, rtol=0)
        assert open_checkpoint(target).model == checkpoint.model


def test_an_export_replaces_the_former_one_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save(tmp_path / "source", "Llama 2")
    checkpoint = open_checkpoint(tmp_path / "source")
    parameters, weights = parameters_of(checkpoint), list(put_together(checkpoint, tp=1))
    export(target, checkpoint.model, parameters, weights, source=checkpoint)
    whole = (target / SINGLE_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"1 of 21 tensors of the checkpoint are missing, such as lm_head.weight"):
        export(target, checkpoint.model, parameters, weights[:-1], source=checkpoint)
    assert (target / SINGLE_FILE).read_bytes() == whole
    export(target, checkpoint.model, parameters, [(name, tensor * 2) for name, tensor in weights], source=checkpoint)
    assert (target / SINGLE_FILE).read_bytes() != whole
    assert not list(tmp_path.glob(".target*former"))


def test_a_job_s_own_tokenizer_replaces_all_tokenizer_files_of_the_checkpoint(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, "Llama 2")
    names = {"tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"}
    for name in names:
        (source / name).write_text("the source's")
    checkpoint = open_checkpoint(source)
    for tokenizer, want in ((None, names), (build_tokenizer(["own"]), {"tokenizer.json", "tokenizer_config.json"})):
        weights = put_together(checkpoint, tp=1)
        parameters = parameters_of(checkpoint)
        export(target, checkpoint.model, parameters, weights, source=checkpoint, tokenizer=tokenizer)
        found = {name for name in names if (target / name).exists()}
        assert found == want
        assert {(target / name).read_text() == "the source's" for name in found} == {tokenizer is None}
        assert (target / CONFIG).read_bytes() == (source / CONFIG).read_bytes()


def test_an_export_of_a_new_model_has_its_special_tokens_and_begins_prompts_like_the_job(
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, "Llama 2")
    checkpoint = open_checkpoint(source)
    tokenizer = build_tokenizer(["count", "from", "12"])
    weights = put_together(checkpoint, tp=1)
    export(target, checkpoint.model, parameters_of(checkpoint), weights, tokenizer=tokenizer)
    config = AutoConfig.from_pretrained(target)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    theirs = AutoTokenizer.from_pretrained(target)
    assert (theirs.pad_token, theirs.bos_token, theirs.eos_token) == ("<pad>", "<bos>", "<eos>")
    want = tokenizer.encode_prompt("count from 12")
    assert theirs("count from 12")["input_ids"] == want
    again = load_tokenizer(
        target, model_vocab_size=checkpoint.model.vocab_size, end_ids=open_checkpoint(target).end_ids
    )
    assert again.encode_prompt("count from 12") == want
    assert again.encode_response("12") == tokenizer.encode_response("12")
    assert again.end_ids == tokenizer.end_ids


def test_a_model_of_no_family_is_not_exported(tmp_path: Path) -> None:
    save(tmp_path / "source", "Qwen3")
    checkpoint = open_checkpoint(tmp_path / "source")
    odd = replace(checkpoint.model, qkv_bias=True)
    with pytest.raises(CheckpointRefused, match="it cannot be exported"):
        export(tmp_path / "target", odd, model_parameters(odd, padded_vocab=64), [])


def test_an_export_of_a_job_with_a_chat_template_has_it_and_adds_nothing_before_prompts(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, "Llama 2")
    checkpoint = open_checkpoint(source)
    plain = build_tokenizer(["say", "red", ":"])
    tokenizer = plain.with_template("{{ messages[0]['content'] }} :")
    weights = put_together(checkpoint, tp=1)
    export(target, checkpoint.model, parameters_of(checkpoint), weights, tokenizer=tokenizer)
    theirs = AutoTokenizer.from_pretrained(target)
    want = plain.encode_rendered("say red :")
    assert theirs("say red :")["input_ids"] == want
    rendered = theirs.apply_chat_template([{"role": "user", "content": "say red"}], tokenize=False)
    assert (rendered, theirs.eos_token) == ("say red :", "<eos>")
