"""Writes a model's weights as a Hugging Face checkpoint, one tensor after another.

- With a source checkpoint, the files, heads, dtypes and other files are the source's: untrained weights make the same
  bytes.
- Without one, there is a single file in fp32, and a config.json of an architecture that computes the model.

Order: a partial folder, the heads, each tensor as it arrives, the other files, fsync, rename.

Invariants:
- A folder with its final name is complete.
- Every tensor of every file is written once.
- The vocabulary's padding rows are omitted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from tidegate.elastic.plan.parameters import Parameter
from tidegate.folder_swap import empty_partial, swap_in
from tidegate.huggingface.checkpoint import (
    CONFIG,
    GENERATION,
    INDEX,
    RECOMPUTED,
    SINGLE_FILE,
    TOKENIZER,
    HuggingFaceCheckpoint,
)
from tidegate.huggingface.checkpoint_weights import DTYPES, mapped
from tidegate.huggingface.families import config_of
from tidegate.huggingface.names import EMBEDDING_TENSOR, OUTPUT_TENSOR, TensorOf, tensors_of
from tidegate.huggingface.tensor_file import StoredTensor, header_of
from tidegate.model_config import ModelConfig
from tidegate.tasks.tokenizer import TaskTokenizer
from tidegate.tasks.tokenizer_config import CONFIG_FILE, TEMPLATE_FILE

TOKENIZERS = (
    TOKENIZER,
    CONFIG_FILE,
    TEMPLATE_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
)
BESIDE = (CONFIG, INDEX, GENERATION, "LICENSE")
"""The files that are copied from the source checkpoint besides a tokenizer's files."""


@dataclass(frozen=True, slots=True)
class _NewFile:
    head: bytes
    tensors: Mapping[str, StoredTensor]


def export(
    folder: Path,
    model: ModelConfig,
    parameters: Sequence[Parameter],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    source: HuggingFaceCheckpoint | None = None,
    tokenizer: TaskTokenizer | None = None,
) -> None:
    """Write `folder`, replacing any folder of this name. `weights` are the whole parameters by name, in any order.

    `tokenizer` replaces the source's. Raises CheckpointRefused for a model of no family, and ValueError when a
    parameter is missing.
    """
    partial = empty_partial(folder)
    if source:
        files = {file.path.name: _NewFile(file.head, file.tensors) for file in source.files}
        _copy(source.folder, partial, BESIDE if tokenizer else (*BESIDE, *TOKENIZERS))
    else:
        files = {SINGLE_FILE: _new_file(model, parameters)}
        raw = config_of(model, dtype="float32") | (_special_ids(tokenizer) if tokenizer else {})
        (partial / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.export(partial)
    with ExitStack() as stack:
        streams = {name: stack.enter_context((partial / name).open("wb")) for name in files}
        writer = _Writer(files, streams)
        _write_all(writer, model, {parameter.name: parameter for parameter in parameters}, weights, source)
        writer.finish()
    swap_in(partial, folder)


class _Writer:
    """Writes tensors to the places in the heads, each once."""

    def __init__(self, files: Mapping[str, _NewFile], streams: Mapping[str, BinaryIO]) -> None:
        self._streams = streams
        self._places = {
            name: (streams[file], stored) for file, new in files.items() for name, stored in new.tensors.items()
        }
        self.missing = set(self._places)
        for file, new in files.items():
            streams[file].write(new.head)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        stream, stored = self._places[name]
        assert tuple(tensor.shape) == stored.shape, f"{name}: {tuple(tensor.shape)} for {stored.shape}"
        elements = tensor.detach().to(device="cpu", dtype=DTYPES[stored.dtype]).contiguous()
        stream.seek(stored.offset)
        stream.write(elements.reshape(-1).view(torch.uint8).numpy().data)
        self.missing.remove(name)

    def finish(self) -> None:
        """Raises ValueError when a tensor was not written."""
        if self.missing:
            raise ValueError(
                f"{len(self.missing)} of {len(self._places)} tensors of the checkpoint are missing, such as "
                f"{min(self.missing)}: pass the weights of every parameter"
            )
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())


def _write_all(
    writer: _Writer,
    model: ModelConfig,
    parameters: Mapping[str, Parameter],
    weights: Iterable[tuple[str, torch.Tensor]],
    source: HuggingFaceCheckpoint | None,
) -> None:
    if source is not None:
        for name in sorted(name for name in writer.missing if name.endswith(RECOMPUTED)):
            writer.write(name, mapped(source.file_of[name], name))
    for parameter, weight in weights:
        for tensor in tensors_of(parameters[parameter], model):
            rows = _rows(tensor, weight)
            writer.write(tensor.name, rows)
            if tensor.name == EMBEDDING_TENSOR and model.tied_embeddings and OUTPUT_TENSOR in writer.missing:
                writer.write(OUTPUT_TENSOR, rows)


def _rows(tensor: TensorOf, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[run.first : run.first + run.size] for run in tensor.rows])


def _new_file(model: ModelConfig, parameters: Iterable[Parameter]) -> _NewFile:
    tensors = {
        tensor.name: ("F32", tensor.shape) for parameter in parameters for tensor in tensors_of(parameter, model)
    }
    return _NewFile(*header_of(tensors))


def _special_ids(tokenizer: TaskTokenizer) -> dict[str, int | None]:
    has_pad = tokenizer.pad_id != tokenizer.eos_id
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id if has_pad else None,
    }


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the files that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
