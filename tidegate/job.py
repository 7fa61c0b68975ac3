"""A job as its processes see it: the config, and what is made of it once: tokenizer, task, model shape, its folder.

A data set's prompts are not among it: only who asks them reads them (`tidegate.data`).
Invariants: every process of a job makes the same `Job` of the same config; the folder's layout is known here only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidegate.attempts import AttemptFolder, newest_attempt
from tidegate.config.checks.evaluation import longest_evaluated
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.huggingface.checkpoint import TOKENIZER, HuggingFaceCheckpoint, open_checkpoint
from tidegate.megatron.family import check_layout, model_parameters, padded_vocab_size, possible_tp_sizes
from tidegate.megatron.torch_dist_checkpoint import TorchDistCheckpoint, open_torch_dist
from tidegate.model_config import ModelConfig
from tidegate.tasks import Task, find_task
from tidegate.tasks.tokenizer import TaskTokenizer, build_tokenizer, load_tokenizer
from tidegate.types import GpuId, NodeId, Role, SampleId

MAX_VOCAB_SIZE = 1 << 20
"""A tokenizer file with more ids than this is taken for a wrong file; the largest in use have about 262,000."""
_NUM_PROMPTS_TRIED = 256
"""Of the endless list, when a job is made: milliseconds. A longer one further on is refused by the engine."""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Where a job keeps what a person or a later run reads."""

    root: Path

    @classmethod
    def of(cls, config: JobConfig) -> JobFolder:
        return cls(Path(config.output_dir).resolve() / config.job)

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer.json"

    @property
    def endpoint(self) -> Path:
        """Where the live job's Control API answers; mode 0600, gone when the job is over."""
        return self.root / "endpoint.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def events(self) -> Path:
        """The event stream, a JSON line each, written as they come."""
        return self.root / "events.jsonl"

    @property
    def readme(self) -> Path:
        """Says what each file here is."""
        return self.root / "README.txt"

    def attempt(self) -> AttemptFolder:
        """What the newest start of the job writes: its logs and its timeline."""
        return newest_attempt(self.root)

    def engine(self, gpu: GpuId) -> Path:
        """What the engine on a GPU keeps: the config and the log of its server."""
        return self.root / "engines" / gpu

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """The final weights as a Hugging Face checkpoint."""
        return self.root / "export"

    @property
    def evaluations(self) -> Path:
        """What each evaluated version answered, a file each."""
        return self.root / "evaluations"

    @property
    def servers(self) -> Path:
        """Data of the embedded NATS and Redis."""
        return self.root / "servers"

    @property
    def journal(self) -> Path:
        """Which samples each optimizer commit held, a JSON line each."""
        return self.root / "journal.jsonl"

    @property
    def samples(self) -> Path:
        """Some samples of each iteration, as a person reads them."""
        return self.root / "samples"

    @property
    def tensorboard(self) -> Path:
        """Metrics of iterations, where `tracking.tensorboard` asks for them: a file a start of the job."""
        return self.root / "tensorboard"

    def node(self, node: NodeId) -> Path:
        """What a node keeps on its local disk: the gate's lock files."""
        return self.root / "nodes" / node

    @property
    def reference(self) -> Path:
        """The reference policy's snapshot, for runs that resume."""
        return self.root / "reference"


def snapshot_folder(config: JobConfig, node: NodeId, *, incarnation: int, version: int) -> Path:
    """Where a node holds one version of the weights, in host memory."""
    return snapshot_root(config, node) / config.job / str(incarnation) / str(version)


def snapshot_root(config: JobConfig, node: NodeId) -> Path:
    """All snapshots on a node."""
    return Path(config.runtime.host_memory_root) / node / "snapshots"


def state_folder(config: JobConfig, node: NodeId) -> Path:
    """Where the actor's workers of a node share the state that they train, in host memory."""
    return Path(config.runtime.host_memory_root) / node / "state" / config.job


def engine_scratch(config: JobConfig, gpu: GpuId) -> Path:
    """Where the server of an engine has its sockets, for as long as it runs."""
    return Path(config.runtime.host_memory_root) / "engines" / gpu


@dataclass(frozen=True, slots=True)
class Job:
    """A config with what is made of it."""

    config: JobConfig
    tokenizer: TaskTokenizer
    task: Task | None
    """The built-in one; None for a job on `data`."""
    model: ModelConfig
    checkpoint: HuggingFaceCheckpoint | None = None
    """What the model is, and where its weights come from; None: they are drawn at random."""
    torch_dist: TorchDistCheckpoint | None = None
    """Where the weights come from in place of these."""

    @property
    def padded_vocab(self) -> int:
        """Fixed for the job, whatever layouts its actor goes through."""
        num_slots = len(self.config.placement(Role.ACTOR)) + len(self.config.standby())
        configured = [self.config.layout(role).tp for role in (Role.ACTOR, Role.INFERENCE)]
        return padded_vocab_size(self.model, [*configured, *possible_tp_sizes(self.model, num_ranks=num_slots)])

    def evaluation_seed(self, prompt: int, draw: int) -> int:
        """Of a response to a held-out prompt: the same in every evaluation, so that these differ by the weights."""
        text = f"{self.config.seed}/evaluation/{prompt}/{draw}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def sampling_seed(self, sample: SampleId) -> int:
        """64 bits that decide a response's draws. Without the incarnation: a resumed job samples the same again."""
        text = f"{self.config.seed}/{sample.iteration}/{sample.prompt}/{sample.draw}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def load_job(config: JobConfig) -> Job:
    """Make a job of its config. ConfigError where checkpoint, tokenizer, task or a layout do not fit."""
    try:
        task = find_task(config.task.name, config.seed) if config.task else None
        checkpoint = open_checkpoint(Path(config.model.path)) if config.model.path else None
        limit = checkpoint.model.vocab_size if checkpoint else MAX_VOCAB_SIZE
        if (file := tokenizer_file(config)) is not None:
            ends = checkpoint.end_ids if checkpoint else ()
            tokenizer = load_tokenizer(file, model_vocab_size=limit, end_ids=ends)
            if checkpoint is not None:
                _check_ends(checkpoint, tokenizer, file)
                _check_same_ids(checkpoint, tokenizer, file)
        else:
            assert task is not None, "the config was checked: data comes with a tokenizer"
            tokenizer = build_tokenizer(task.words())
        model = _limited(checkpoint, config) if checkpoint else config.model.shape(tokenizer.vocab_size)
        job = Job(config, tokenizer, task, model, checkpoint)
        for role in (Role.ACTOR, Role.INFERENCE):
            check_layout(job.model, config.layout(role), padded_vocab=job.padded_vocab)
        if config.model.torch_dist:
            parameters = model_parameters(model, padded_vocab=job.padded_vocab)
            job = replace(job, torch_dist=open_torch_dist(Path(config.model.torch_dist), parameters))
        if task is not None:
            _check_room(job, task)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return job


def tokenizer_file(config: JobConfig) -> Path | None:
    """The `tokenizer.json` that the job reads; None: it is made of the task's words."""
    named = config.model.tokenizer or config.model.path
    if not named:
        return None
    return Path(named) / TOKENIZER if Path(named).is_dir() else Path(named)


def _check_ends(checkpoint: HuggingFaceCheckpoint, tokenizer: TaskTokenizer, file: Path) -> None:
    """ConfigError when what ends the model's texts ends none of the tokenizer's: the two are of different models."""
    if checkpoint.end_ids and not any(map(tokenizer.is_special, checkpoint.end_ids)):
        ends = " or ".join(map(str, checkpoint.end_ids))
        raise ConfigError(
            f"tokenizer {file} has no special token of the id {ends}, with which {checkpoint.folder} ends its texts "
            f"(eos_token_id): it is another model's; name the one that belongs to the checkpoint by model.tokenizer"
        )


def _check_same_ids(checkpoint: HuggingFaceCheckpoint, tokenizer: TaskTokenizer, file: Path) -> None:
    """ConfigError where the checkpoint's own tokenizer has other tokens under the ids; more of them are welcome."""
    own = checkpoint.folder / TOKENIZER
    if not own.is_file() or own.read_bytes() == file.read_bytes():
        return
    if conflicts := tokenizer.conflicts(own):
        raise ConfigError(
            f"tokenizer {file}: {len(conflicts)} of its tokens are not what {own} has under their ids, {conflicts[0]} "
            "for one: it is another model's; name one with the same ids by model.tokenizer, or leave that out"
        )


def _limited(checkpoint: HuggingFaceCheckpoint, config: JobConfig) -> ModelConfig:
    """The checkpoint's model, for sequences as long as the job's."""
    longest, wanted = checkpoint.model.max_seq_len, config.model.max_seq_len
    if wanted > longest:
        raise ConfigError(
            f"model.max_seq_len={wanted} is more than the {longest} positions of {checkpoint.folder} "
            "(max_position_embeddings): lower it"
        )
    return replace(checkpoint.model, max_seq_len=wanted)


def _check_room(job: Job, task: Task) -> None:
    """ConfigError unless the task's prompts can be encoded and leave room for the longest response."""
    algorithm, evaluation = job.config.algorithm, job.config.evaluation
    num_prompts = min(algorithm.iterations * algorithm.prompts_per_iteration, _NUM_PROMPTS_TRIED)
    asked = [task.prompt(index).text for index in range(num_prompts)]
    _check_lengths(job, asked, max_new_tokens=algorithm.max_new_tokens, key="algorithm.max_new_tokens")
    if evaluation is not None:
        num_prompts = min(evaluation.num_prompts or _NUM_PROMPTS_TRIED, _NUM_PROMPTS_TRIED)
        asked = [task.held_out(index).text for index in range(num_prompts)]
        key, longest = "evaluation.max_new_tokens", longest_evaluated(job.config)
        _check_lengths(job, asked, max_new_tokens=longest, key=key)


def _check_lengths(job: Job, texts: Sequence[str], *, max_new_tokens: int, key: str) -> None:
    limit, longest = job.model.max_seq_len, max(len(job.tokenizer.encode_prompt(text)) for text in texts)
    if longest + max_new_tokens > limit:
        raise ConfigError(
            f"{key}={max_new_tokens} and a prompt of {longest} tokens (the longest of the first {len(texts)}) make "
            f"{longest + max_new_tokens}, more than model.max_seq_len={limit}: raise the one or lower the other"
        )
