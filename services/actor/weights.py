"""The source of the actor's first weights (a Hugging Face or Megatron checkpoint), and the export of its last ones.

The job opened the checkpoints and checked them against the model when it was loaded. The exceptions in
`WEIGHTS_REFUSED` report tensors that turn out to be damaged.

Invariant: an export has the tokenizer that the job was trained with. [test_hugging_face: checkpoint_comes_back_trained]
"""

from __future__ import annotations

from pathlib import Path

from services.actor.checkpoints import files_of
from tidegate.data.prompts import template_source
from tidegate.elastic.state.files import StateFiles
from tidegate.huggingface.checkpoint import TOKENIZER
from tidegate.huggingface.checkpoint_weights import CheckpointWeights
from tidegate.huggingface.export import export
from tidegate.huggingface.families import CheckpointRefused
from tidegate.job import Job, JobFolder
from tidegate.megatron.family import model_parameters
from tidegate.megatron.gpt_provider import InitialWeights
from tidegate.megatron.torch_dist_index import TorchDistRefused
from tidegate.megatron.torch_dist_weights import TorchDistWeights
from tidegate.tasks.tokenizer import TaskTokenizer
from tidegate.tasks.tokenizer_config import load_tokenizer_config

WEIGHTS_REFUSED = (CheckpointRefused, TorchDistRefused)


def initial_weights(job: Job) -> InitialWeights | None:
    """The checkpoint's weights. None: the weights are drawn at random."""
    if job.torch_dist is not None:
        return TorchDistWeights(job.torch_dist)
    return CheckpointWeights(job.checkpoint) if job.checkpoint else None


def export_weights(job: Job, checkpoint: Path, folder: Path) -> None:
    """Write a saved checkpoint's weights in Hugging Face's format, tensor by tensor, from the files of all ranks.

    Raises CheckpointError, and the errors of `StateFiles`. After an error the former export is as it was."""
    itemsize = job.config.actor.precision.itemsize
    parameters = model_parameters(job.model, padded_vocab=job.padded_vocab, itemsize=itemsize)
    weights = StateFiles(checkpoint, files_of(checkpoint)).read_whole(parameters)
    export(folder, job.model, parameters, weights, source=job.checkpoint, tokenizer=_tokenizer_to_export(job))


def _tokenizer_to_export(job: Job) -> TaskTokenizer | None:
    """The tokenizer that made the prompts. None where it is the source checkpoint's own, to be copied from there."""
    data = job.config.data
    template = None if data is None else template_source(data, job.tokenizer)
    if template is not None and (job.tokenizer.config is None or job.tokenizer.config.chat_template != template):
        return job.tokenizer.with_template(template)
    if job.checkpoint is not None and _came_with(job.checkpoint.folder, JobFolder.of(job.config).tokenizer):
        return None
    return job.tokenizer


def _came_with(source: Path, tokenizer: Path) -> bool:
    """Whether the job's tokenizer is the source's own.

    The export then copies the source's other tokenizer files too."""
    file = source / TOKENIZER
    if not file.is_file() or file.read_bytes() != tokenizer.read_bytes():
        return False
    return load_tokenizer_config(source) == load_tokenizer_config(tokenizer.parent)
