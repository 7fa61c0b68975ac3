"""Opens a Hugging Face checkpoint's folder and checks it before anything starts from it. It reads no tensor.

Order:
1. config.json.
2. The list of files: one, or those of an index.
3. Each file's header.
4. Whether tensors and shapes are those of the architecture.

Invariant: an opened checkpoint has every tensor that its model needs, in its shape, in a whole file, and no other
tensor that would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tidegate.huggingface.families import CheckpointRefused, model_of
from tidegate.huggingface.names import EMBEDDING_TENSOR, OUTPUT_TENSOR, tensors_of
from tidegate.huggingface.tensor_file import StoredTensor, TensorFile, open_tensor_file
from tidegate.json_text import parse_json
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig
from tidegate.short_lists import first_few

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
RECOMPUTED = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Endings of tensor names in old checkpoints that transformers ignores, because the config determines them."""


@dataclass(frozen=True, slots=True)
class HuggingFaceCheckpoint:
    folder: Path
    model: ModelConfig
    files: tuple[TensorFile, ...]
    """In the order of their names."""
    file_of: Mapping[str, TensorFile]
    """By the name of a tensor."""
    end_ids: tuple[int, ...] = ()
    """The ids of the tokens that end a text, from the files; empty where the files name none."""

    def stored(self, name: str) -> StoredTensor:
        return self.file_of[name].tensors[name]


def open_checkpoint(folder: Path) -> HuggingFaceCheckpoint:
    """Raises CheckpointRefused, with the file, the numbers and the remedy."""
    if not folder.is_dir():
        raise CheckpointRefused(
            f"{folder} is not a folder: name the one that holds a model's {CONFIG} and its safetensors"
        )
    try:
        raw = _json(folder / CONFIG)
        model = model_of(raw)
        files = tuple(open_tensor_file(folder / name) for name in _file_names(folder))
        file_of = _placed(folder, files)
        _check_tensors(folder, model, files, file_of)
        beside = _json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
        end_ids = tuple(sorted({*_end_ids(raw), *_end_ids(beside)}))
    except CheckpointRefused as error:
        raise CheckpointRefused(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error
    return HuggingFaceCheckpoint(folder, model, files, MappingProxyType(file_of), end_ids)


def _file_names(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        weight_map = _json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointRefused(f"{folder / INDEX} has no weight_map: fetch it again")
        names = sorted(set(map(str, weight_map.values())))
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointRefused(f"{folder / INDEX} names {outside[0]!r}, which is not a file beside it")
        return names
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    remedy = (
        f"it holds {pickled[0]}, which is pickled and never read: save it as safetensors with transformers"
        if pickled
        else "fetch the checkpoint's missing files"
    )
    raise CheckpointRefused(f"{folder} holds neither {SINGLE_FILE} nor {INDEX}: {remedy}")


def _placed(folder: Path, files: Iterable[TensorFile]) -> dict[str, TensorFile]:
    file_of: dict[str, TensorFile] = {}
    for file in files:
        for name in file.tensors:
            if name in file_of:
                raise CheckpointRefused(f"{folder}: tensor {name} is in {file_of[name].path.name} and {file.path.name}")
            file_of[name] = file
    if (folder / INDEX).is_file():
        weight_map: Mapping[str, Any] = _json(folder / INDEX)["weight_map"]
        misplaced = sorted(
            name for name, file in weight_map.items() if name not in file_of or file_of[name].path.name != file
        )
        if misplaced:
            raise CheckpointRefused(
                f"{folder}: {len(misplaced)} of {len(weight_map)} tensors are not in the file that {INDEX} names: "
                f"{first_few(misplaced)}; fetch {', '.join(sorted({str(weight_map[name]) for name in misplaced}))} "
                "again"
            )
    return file_of


def _check_tensors(
    folder: Path, model: ModelConfig, files: tuple[TensorFile, ...], file_of: Mapping[str, TensorFile]
) -> None:
    least = model.num_layers * (model.num_experts or 1)
    if least > len(file_of):
        # Avoid a list of every tensor of a damaged config: it could have more layers than memory has places.
        raise CheckpointRefused(
            f"{folder}: {CONFIG} implies at least {least:,} tensors, and the files have {len(file_of):,}: fetch the "
            f"files again, or the {CONFIG} that belongs to them"
        )
    want = {
        tensor.name: tensor.shape
        for parameter in model_parameters(model, padded_vocab=model.vocab_size)
        for tensor in tensors_of(parameter, model)
    }
    if missing := sorted(want.keys() - file_of.keys()):
        raise CheckpointRefused(
            f"{folder}: {len(missing)} of {len(want)} tensors of the model are in no file: {first_few(missing)}; fetch "
            f"the files again, or the {CONFIG} that belongs to them"
        )
    spare = {name for name in file_of if name.endswith(RECOMPUTED)}
    if model.tied_embeddings:
        # Some checkpoints keep the copy. It is compared with the embedding when the embedding is read.
        spare.add(OUTPUT_TENSOR)
        want[OUTPUT_TENSOR] = want[EMBEDDING_TENSOR]
    if extra := sorted(file_of.keys() - want.keys() - spare):
        raise CheckpointRefused(
            f"{folder}: {len(extra)} tensors do not belong to the model that {CONFIG} describes, and would be lost: "
            f"{first_few(extra)}; take a checkpoint of the plain architecture"
        )
    for file in files:
        for name, stored in file.tensors.items():
            if name in want and stored.shape != want[name]:
                raise CheckpointRefused(
                    f"{file.path}: tensor {name} has shape {list(stored.shape)}, and {CONFIG} implies "
                    f"{list(want[name])}: the files belong to two models"
                )


def _end_ids(raw: Mapping[str, Any]) -> list[int]:
    found = raw.get("eos_token_id")
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointRefused(f"{path}: {error.strerror}; fetch the checkpoint's missing files") from error
    except ValueError as error:
        raise CheckpointRefused(f"{path} is not JSON ({error}): fetch it again") from error
    if not isinstance(raw, dict):
        raise CheckpointRefused(f"{path} must hold keys and values, found {raw!r}: fetch it again")
    return raw
