"""The output layer that some checkpoints of tied embeddings keep besides the embedding. It must equal the embedding.

Bytes are compared, without torch: the launcher checks a job before anything imports torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidegate.huggingface.checkpoint import CONFIG, HuggingFaceCheckpoint
from tidegate.huggingface.families import CheckpointRefused
from tidegate.huggingface.names import EMBEDDING_TENSOR, OUTPUT_TENSOR
from tidegate.huggingface.tensor_file import TensorFile

_COMPARED_BYTES = 1 << 24


def has_copy(checkpoint: HuggingFaceCheckpoint) -> bool:
    return checkpoint.model.tied_embeddings and OUTPUT_TENSOR in checkpoint.file_of


def check_copy(checkpoint: HuggingFaceCheckpoint) -> None:
    """Raises CheckpointRefused when a tied copy differs from its original in any byte.

    It reads both tensors, so call it once per job, not per rank.
    """
    if not has_copy(checkpoint):
        return
    copy, original = (stored_bytes(checkpoint.file_of[name], name) for name in (OUTPUT_TENSOR, EMBEDDING_TENSOR))
    is_equal = copy.size == original.size and all(
        np.array_equal(copy[at : at + _COMPARED_BYTES], original[at : at + _COMPARED_BYTES])
        for at in range(0, copy.size, _COMPARED_BYTES)
    )
    if not is_equal:
        raise copy_differs(checkpoint)


def copy_differs(checkpoint: HuggingFaceCheckpoint) -> CheckpointRefused:
    return CheckpointRefused(
        f"{checkpoint.folder}: {OUTPUT_TENSOR} differs from {EMBEDDING_TENSOR}, but {CONFIG} ties them "
        "(tie_word_embeddings): set that to false if the model has both"
    )


def stored_bytes(file: TensorFile, name: str) -> npt.NDArray[np.uint8]:
    """A tensor's bytes, mapped copy on write. Only the bytes that are accessed are read."""
    stored = file.tensors[name]
    return np.memmap(file.path, dtype=np.uint8, mode="c", offset=stored.offset, shape=(stored.size_bytes,))
