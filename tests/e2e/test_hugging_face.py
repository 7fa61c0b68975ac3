"""A job takes a Hugging Face checkpoint and gives one back. transformers reads it, and the next job starts from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import running, small_job
from tests.e2e.lineage import expected_draws, trained_draws
from tests.hugging_face import save
from tidegate.huggingface.checkpoint import CONFIG, SINGLE_FILE, TOKENIZER
from tidegate.tasks import find_task
from tidegate.tasks.tokenizer import build_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def job_of(name: str, checkpoint: Path, **changes: Any) -> dict[str, Any]:
    # Models with experts cannot be reproducible.
    raw = small_job(name, checkpoint__export=True, **{"actor__num_logical_shards": None, **changes})
    return raw | {"model": {"path": str(checkpoint), "max_seq_len": 64}}


def save_with_tokenizer(folder: Path, name: str) -> None:
    """Saves the model in bf16, with a row for each of the task's words."""
    tokenizer = build_tokenizer(find_task("countdown", 0).words())
    save(folder, name, dtype=torch.bfloat16, vocab_size=tokenizer.vocab_size)
    tokenizer.save(folder / TOKENIZER)


@pytest.mark.parametrize("name", ["Qwen2.5", "Llama 3.2", "Qwen3", "Qwen3 MoE"])
async def test_a_hugging_face_checkpoint_comes_back_trained(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_with_tokenizer(source, name)
    async with running(job_of("trains", source), tmp_path) as job:
        result = await job.result()
        assert trained_draws(job.folder.journal) == expected_draws(iterations=3, prompts=8, group_size=4)
    assert (result["summary"]["lost"], result["summary"]["duplicates"]) == (0, 0)
    exported = job.folder.export
    assert {path.name for path in exported.iterdir()} == {path.name for path in source.iterdir()}
    for beside in (CONFIG, TOKENIZER):
        assert (exported / beside).read_bytes() == (source / beside).read_bytes()
    before, after = load_file(source / SINGLE_FILE), load_file(exported / SINGLE_FILE)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in after.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in before.items()
    }
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    read = AutoModelForCausalLM.from_pretrained(exported)
    assert read(torch.tensor([[1, 5, 9]])).logits.isfinite().all()


async def test_a_job_that_was_stopped_in_its_export_exports_after_the_resume(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_with_tokenizer(source, "Qwen2.5")
    raw = job_of("stopped", source, algorithm__iterations=1)
    async with running(raw, tmp_path) as job:
        await job.result()
    exported = job.folder.export
    want = {path.name: path.read_bytes() for path in exported.iterdir()}
    # The files of a stop between the last checkpoint's name and the export's.
    job.folder.result.unlink()
    shutil.rmtree(job.folder.servers)
    exported.rename(exported.with_name(".export.partial"))
    async with running(raw, tmp_path, "--resume") as again:
        await again.result()
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == want


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
async def test_untrained_weights_are_exported_bit_for_bit_and_the_next_job_starts_from_them(
    precision: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save_with_tokenizer(source, "Qwen2.5")
    still: dict[str, Any] = {"algorithm__iterations": 1, "algorithm__filter_zero_std": True}
    still |= {"actor__learning_rate": 1e-30, "actor__precision": precision}
    checkpoint = source
    for number in range(2):
        async with running(job_of(f"still{number}", checkpoint, actor__warm_up__steps=0, **still), tmp_path) as job:
            await job.result()
        checkpoint = job.folder.export
        want = {path.name: path.read_bytes() for path in source.iterdir()}
        assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == want
