"""A job with a checkpoint uses its model and its tokenizer, or is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import job_config
from tests.hugging_face import save
from tests.unit.data.tokenizers_made import make_tokenizer
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.huggingface.checkpoint import CONFIG, GENERATION, SINGLE_FILE, TOKENIZER, open_checkpoint
from tidegate.job import load_job
from tidegate.tasks import find_task
from tidegate.tasks.tokenizer import build_tokenizer

VOCAB_SIZE = 70
"""More than the tokenizer has, as in real checkpoints."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with the task's tokenizer."""
    save(tmp_path / "model", "Qwen2.5", vocab_size=VOCAB_SIZE)
    build_tokenizer(find_task("countdown", 0).words()).save(tmp_path / "model" / TOKENIZER)
    return tmp_path / "model"


def config_of(tmp_path: Path, **model: Any) -> JobConfig:
    raw = job_config(tmp_path).model_dump(mode="json")
    return parse_config(raw | {"model": {"max_seq_len": 80, "path": str(tmp_path / "model")} | model})


def test_the_model_is_the_checkpoint_s_with_the_job_s_sequence_length(folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    job = load_job(JobConfig.from_json(config.to_json()))
    assert job.model == replace(open_checkpoint(folder).model, max_seq_len=80)
    assert job.model.vocab_size == VOCAB_SIZE > job.tokenizer.vocab_size
    assert job.checkpoint is not None
    assert job.checkpoint.folder == folder


def test_a_configured_tokenizer_replaces_the_checkpoint_s(folder: Path, tmp_path: Path) -> None:
    (folder / TOKENIZER).rename(tmp_path / "other.json")
    job = load_job(config_of(tmp_path, tokenizer=str(tmp_path / "other.json")))
    assert job.tokenizer.vocab_size < VOCAB_SIZE


def test_a_configured_tokenizer_may_have_more_tokens_than_the_checkpoint_s(folder: Path, tmp_path: Path) -> None:
    words = [*find_task("countdown", 0).words(), "more"]
    build_tokenizer(words).save(tmp_path / "other.json")
    job = load_job(config_of(tmp_path, tokenizer=str(tmp_path / "other.json")))
    assert job.tokenizer.vocab_size == len(words) + 3 <= VOCAB_SIZE


def test_a_tokenizer_with_other_tokens_under_the_checkpoint_s_ids_is_refused(folder: Path, tmp_path: Path) -> None:
    words = list(find_task("countdown", 0).words())
    words[2:4] = "other", words[2]
    build_tokenizer(words).save(tmp_path / "other.json")
    message = (
        rf"other.json: 2 of its tokens are not what .*model/{TOKENIZER} has under their ids, 'other' \(5, none there\)"
    )
    with pytest.raises(ConfigError, match=message):
        load_job(config_of(tmp_path, tokenizer=str(tmp_path / "other.json")))


def test_a_model_from_a_checkpoint_needs_no_warm_up(folder: Path, tmp_path: Path) -> None:
    assert "warm_up" in " ".join(job_config(tmp_path).warnings())
    assert "warm_up" not in " ".join(config_of(tmp_path).warnings())


def too_large_a_tokenizer(folder: Path) -> None:
    words = [f"word{number}" for number in range(VOCAB_SIZE)]
    build_tokenizer(words).save(folder / TOKENIZER)


def ends_with(folder: Path, *tokens: int) -> None:
    (folder / GENERATION).write_text(json.dumps({"eos_token_id": list(tokens)}))


def test_a_text_may_end_with_any_of_the_ids_that_the_checkpoint_names(folder: Path, tmp_path: Path) -> None:
    ends_with(folder, 60, 2)
    job = load_job(config_of(tmp_path))
    assert job.checkpoint is not None
    assert job.checkpoint.end_ids == (2, 60)


def test_a_response_ends_with_any_special_token_that_ends_the_checkpoint_s_texts(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    save(folder, "Qwen2.5", vocab_size=264)
    end_of_turn, end_of_text, letter = 257, 256, 70
    ends_with(folder, end_of_turn, end_of_text, letter)
    tokenizer = load_job(config_of(tmp_path, max_seq_len=200)).tokenizer
    assert (tokenizer.eos_id, tokenizer.end_ids) == (end_of_turn, (end_of_text, end_of_turn))
    for end in tokenizer.end_ids:
        assert tokenizer.decode_response([letter, end, letter, end]) == tokenizer.decode([letter, end, letter])


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tokenizer of another model": (
        too_large_a_tokenizer,
        rf"tokenizer.json has {VOCAB_SIZE + 3} ids and the model's vocabulary {VOCAB_SIZE};",
    ),
    "a tokenizer of another model, with ids that fit": (
        lambda folder: ends_with(folder, 60, 69),
        r"tokenizer.json has no special token of the id 60 or 69, with which .*/model ends its texts \(eos_token_id\)",
    ),
    "no tokenizer": (lambda folder: (folder / TOKENIZER).unlink(), r"no tokenizer at .*tokenizer.json"),
    "weights that end early": (
        lambda folder: (folder / SINGLE_FILE).write_bytes((folder / SINGLE_FILE).read_bytes()[:-1]),
        r"model.safetensors: its tensors end at byte .*: it is truncated; fetch it again",
    ),
    "an architecture that is not supported": (
        lambda folder: (folder / CONFIG).write_text(
            (folder / CONFIG).read_text().replace("Qwen2ForCausalLM", "Gemma3ForCausalLM")
        ),
        r"architectures=\['Gemma3ForCausalLM'\] .* is not supported; supported: LlamaForCausalLM",
    ),
}


@pytest.mark.parametrize(("damage", "message"), WRONG.values(), ids=WRONG)
def test_a_checkpoint_that_does_not_fit_the_job_is_a_config_error_before_anything_starts(
    folder: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    load_job(config_of(tmp_path))
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        load_job(config_of(tmp_path))


def test_sequences_longer_than_the_checkpoint_has_positions_for_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.max_seq_len=300 is more than the 256 positions of .*: lower it"):
        load_job(config_of(tmp_path, max_seq_len=300))
