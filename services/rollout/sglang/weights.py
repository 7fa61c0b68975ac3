"""A full set of weights as SGLang reads it: cast, in safetensors files with the names of a Hugging Face checkpoint.

The files lie in a folder in host memory. SGLang maps them, so that the weights pass through no socket.

Invariants:
- The set is complete before SGLang reads it, so a refusal changes nothing. [test_sglang_values: refused_set_of_weights]
- No more than one file's tensors is in this process's own memory. [test_sglang_values: several_files]
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.rollout.engine import WeightsRefused
from services.rollout.full_weights import full_weights
from services.rollout.sglang.names import as_held, pieces_of
from tidegate.huggingface.names import tensors_of
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig

FILE_BYTES = 256 << 20
"""The tensor bytes of one file. A larger tensor has a file of its own. More files only make SGLang's log longer."""


def write_weights(
    config: ModelConfig,
    folder: Path,
    *,
    version: int,
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, torch.Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a full set of Megatron tensors into `folder`, which is empty.

    Raises WeightsRefused as `full_weights`, for tensors that are not floats, and where the folder has too little room.
    """
    parameters = {parameter.name: parameter for parameter in model_parameters(config, padded_vocab=config.vocab_size)}
    needed_bytes = sum(math.prod(each.shape) for each in parameters.values()) * dtype.itemsize
    _check_room(folder, needed_bytes, version=version)
    files = _Files(folder, file_bytes)

    def prepare(name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            raise WeightsRefused(f"tensor {name!r} is {tensor.dtype}; weights are floating point: cast it")
        files.add(dict(pieces_of(parameters[name], config, tensor.detach().to(device="cpu", dtype=dtype))))

    full_weights(config, version=version, tensors=tensors, prepare=prepare)
    files.write()


def held_checksums(config: ModelConfig, folder: Path) -> dict[str, str]:
    """The checksums, by Megatron name, of the tensors that SGLang on a CPU holds once it has read the files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.iterdir():
        tensors |= load_file(path)
    return {
        parameter.name: held_checksum(
            as_held(parameter.name, tuple(tensors[piece.name] for piece in tensors_of(parameter, config)))
        )
        for parameter in model_parameters(config, padded_vocab=config.vocab_size)
    }


@dataclass
class _Files:
    """Collects tensors, and writes a file whenever they are enough for one."""

    folder: Path
    file_bytes: int
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _size_bytes: int = 0
    _num_files: int = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._size_bytes + size_bytes > self.file_bytes:
            self.write()
        self._tensors |= tensors
        self._size_bytes += size_bytes

    def write(self) -> None:
        if self._tensors:
            save_file(self._tensors, self.folder / f"{self._num_files:05}.safetensors")
            self._num_files += 1
        self._tensors, self._size_bytes = {}, 0


def held_checksum(tensor: torch.Tensor) -> str:
    """The checksum that SGLang's /weights_checker reports of a tensor in CPU memory: 64 bits of SHA-256, in hex."""
    elements = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(elements.numpy().data).hexdigest()[:16]


def _check_room(folder: Path, needed_bytes: int, *, version: int) -> None:
    space = os.statvfs(folder)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < needed_bytes:
        raise WeightsRefused(
            f"weights version {version} take {needed_bytes} bytes in {folder}, which has {free_bytes} free: make that "
            "file system larger (docker run --shm-size), or set runtime.host_memory_root to another one"
        )
