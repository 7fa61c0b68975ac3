"""A job as its processes see it: the config, and what each process makes of it once (tokenizer, task, model shape).

`Job` does not hold the prompts of a data set: only the process that asks them reads them (`tidegate.data`).
The layout of the job's folder is known only here.

Invariant: every process of a job makes the same `Job` of the same config. [test_job: every_process_makes_the_same_job]
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from tidegate.attempts import AttemptFolder, newest_attempt
from tidegate.config.base import OUTPUT_DIR
from tidegate.config.checks.actor_layouts import policy_layouts
from tidegate.config.checks.evaluation import longest_evaluated
from tidegate.config.checks.layouts import layout_fault
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.huggingface.checkpoint import TOKENIZER, HuggingFaceCheckpoint, open_checkpoint
from tidegate.length_law import drawn_length
from tidegate.megatron.family import model_parameters, padded_vocab_size, possible_tp_sizes
from tidegate.megatron.packing import token_cost
from tidegate.megatron.torch_dist_checkpoint import TorchDistCheckpoint, open_torch_dist
from tidegate.model_config import ModelConfig
from tidegate.tasks import Task, find_task
from tidegate.tasks.tokenizer import TaskTokenizer, build_tokenizer, load_tokenizer
from tidegate.types import GpuId, Layout, NodeId, Role, SampleId

MAX_VOCAB_SIZE = 1 << 20
"""The limit that tells a wrong file from a tokenizer. The largest tokenizers in use have about 262,000 ids."""
CALLED_VARIABLE = "TIDEGATE_CALLED_CLUSTER"
"""In the environment of a command that another machine has asked for: how its person calls the cluster."""
_TYPED_HERE = ("up", "reload", "down", "backup", "restore")
"""The commands of a cluster that no other machine may ask for."""
_NUM_PROMPTS_CHECKED = 256
"""How many prompts of the endless list are checked when a job is made, which takes milliseconds.

The engine refuses a longer prompt that comes later.
"""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The files of a job that a person or a later run reads."""

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
        """The address of the live job's Control API. The file has mode 0600 and is removed when the job is over."""
        return self.root / "endpoint.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def events(self) -> Path:
        """The event stream, one JSON line for each event, written as they come."""
        return self.root / "events.jsonl"

    @property
    def moves(self) -> Path:
        """The log of the scheduler's decisions and moves (`tidegate.moves_log`)."""
        return self.root / "moves.jsonl"

    @property
    def readme(self) -> Path:
        """Says what each file of the folder is."""
        return self.root / "README.txt"

    def attempt(self) -> AttemptFolder:
        """The files of the newest start of the job: its logs and its timeline."""
        return newest_attempt(self.root)

    def engine(self, gpu: GpuId) -> Path:
        """The files of the engine on a GPU: the config and the log of its server."""
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
        """The answers of each evaluated version, one file for each version."""
        return self.root / "evaluations"

    @property
    def servers(self) -> Path:
        """The data of the embedded NATS and Redis."""
        return self.root / "servers"

    @property
    def journal(self) -> Path:
        """The samples of each optimizer commit, one JSON line for each commit."""
        return self.root / "journal.jsonl"

    @property
    def samples(self) -> Path:
        """Some samples of each iteration, in a form that a person reads."""
        return self.root / "samples"

    @property
    def tensorboard(self) -> Path:
        """Metrics of iterations, one file for each start of the job. Only with `tracking.tensorboard`."""
        return self.root / "tensorboard"

    def command(self, verb: str, *words: str) -> str:
        """`tidegate VERB JOB WORDS` as it works where this process was started."""
        return command_in(self.root.parent, verb, self.root.name, *words)

    def node(self, node: NodeId) -> Path:
        """The files of a node on its local disk: the gate's lock files."""
        return self.root / "nodes" / node

    @property
    def reference(self) -> Path:
        """The reference policy's snapshot, for runs that resume."""
        return self.root / "reference"


def snapshot_folder(config: JobConfig, node: NodeId, *, incarnation: int, version: int) -> Path:
    """The folder in host memory where a node keeps one version of the weights."""
    return snapshot_root(config, node) / config.job / str(incarnation) / str(version)


def snapshot_root(config: JobConfig, node: NodeId) -> Path:
    """The folder of all snapshots on a node."""
    return Path(config.runtime.host_memory_root) / node / "snapshots"


def gate_folder(config: JobConfig, node: NodeId) -> Path:
    """The folder of a node's gate."""
    if root := config.runtime.gate_root:
        return Path(root) / node
    return JobFolder.of(config).node(node) / "gate"


def state_folder(config: JobConfig, node: NodeId) -> Path:
    """The folder in host memory where the actor's workers on a node share the state that they train."""
    return Path(config.runtime.host_memory_root) / node / "state" / config.job


def engine_scratch(config: JobConfig, gpu: GpuId) -> Path:
    """The folder of the sockets of an engine's server, for as long as the server runs."""
    return Path(config.runtime.host_memory_root) / "engines" / gpu


@dataclass(frozen=True, slots=True)
class Job:
    """A config and what is made of it."""

    config: JobConfig
    tokenizer: TaskTokenizer
    task: Task | None
    """The built-in task. None for a job on `data`."""
    model: ModelConfig
    checkpoint: HuggingFaceCheckpoint | None = None
    """Gives the model's shape and its first weights. None: the first weights are drawn at random."""
    torch_dist: TorchDistCheckpoint | None = None
    """The source of the first weights in place of `checkpoint`."""

    @property
    def prompt_tokens(self) -> int | None:
        """The mean tokens of a prompt of the first iteration. None for a job on `data`, whose files it would read."""
        if self.task is None:
            return None
        prompts = map(self.task.prompt, range(self.config.algorithm.prompts_per_iteration))
        return round(fmean(len(self.tokenizer.encode_prompt(prompt.text)) for prompt in prompts))

    @property
    def token_cost(self) -> int:
        """The attended positions that cost as much as a token in a micro-batch (`tidegate.megatron.packing`)."""
        return token_cost(self.model)

    @property
    def padded_vocab(self) -> int:
        """The same for the whole job, whatever layouts its actor goes through."""
        return padded_vocab_size(self.model, possible_tp_sizes(self.model, num_ranks=len(self.config.gpus)))

    @property
    def num_parameters(self) -> int:
        """The model's, with the padded vocabulary."""
        return sum(math.prod(each.shape) for each in model_parameters(self.model, padded_vocab=self.padded_vocab))

    def layout_fault(self, role: Role, layout: Layout) -> str | None:
        """Why the actor or the inference can never be in this layout; None when it can."""
        return layout_fault(self.config, self.model, layout, role=role, padded_vocab=self.padded_vocab)

    def evaluation_seed(self, prompt: int, draw: int) -> int:
        """The seed of a response to a held-out prompt.

        It is the same in every evaluation, so that two evaluations differ only by the weights.
        """
        text = f"{self.config.seed}/evaluation/{prompt}/{draw}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def drawn_length(self, sample: SampleId) -> int | None:
        """The length of a response by `rollout.length_law`. None: the model ends it."""
        law, longest = self.config.rollout.length_law, self.config.algorithm.max_new_tokens
        return None if law is None else drawn_length(law, sample, max_new_tokens=longest)

    def response_text(self, response: Sequence[int]) -> str:
        """The text of a response, which is rewarded. Under a length law it ends at the first stop token."""
        if self.config.rollout.length_law is not None:
            ends = self.tokenizer.end_ids
            last = next((place for place, token in enumerate(response) if token in ends), len(response))
            response = response[: last + 1]
        return self.tokenizer.decode_response(response)

    def sampling_seed(self, sample: SampleId) -> int:
        """64 bits that decide a response's draws. Without the incarnation: a resumed job samples the same again."""
        text = f"{self.config.seed}/{sample.iteration}/{sample.prompt}/{sample.draw}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def load_job(config: JobConfig) -> Job:
    """Makes a job of its config. ConfigError where the checkpoint, the tokenizer, the task or a layout do not fit."""
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
        model = _with_max_seq_len(checkpoint, config) if checkpoint else config.model.shape(tokenizer.vocab_size)
        _check_reproducible(config, model)
        job = Job(config, tokenizer, task, model, checkpoint)
        for role in (Role.ACTOR, Role.INFERENCE):
            if (fault := job.layout_fault(role, config.layout(role))) is not None:
                raise ConfigError(f"{role}.layout: {fault}")
        for layout in policy_layouts(config):
            if (fault := job.layout_fault(Role.ACTOR, layout)) is not None:
                raise ConfigError(f"actor.layouts: {fault}")
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
    """The `tokenizer.json` that the job reads. None: the tokenizer is made of the task's words."""
    named = config.model.tokenizer or config.model.path
    if not named:
        return None
    return Path(named) / TOKENIZER if Path(named).is_dir() else Path(named)


def _check_reproducible(config: JobConfig, model: ModelConfig) -> None:
    """ConfigError where updates are to have the same bits in all layouts, and the model's cannot."""
    num_shards = config.actor.num_logical_shards
    if num_shards is not None and model.num_experts is not None:
        raise ConfigError(
            f"actor.num_logical_shards={num_shards}, but the model has {model.num_experts} experts: which tokens meet "
            "in an expert's product depends on the layout, so its updates cannot have the same bits in all; leave "
            "num_logical_shards out"
        )


def _check_ends(checkpoint: HuggingFaceCheckpoint, tokenizer: TaskTokenizer, file: Path) -> None:
    """ConfigError when none of the ids that end the model's texts is a special token: they are of different models."""
    if checkpoint.end_ids and not any(map(tokenizer.is_special, checkpoint.end_ids)):
        ends = " or ".join(map(str, checkpoint.end_ids))
        raise ConfigError(
            f"tokenizer {file} has no special token of the id {ends}, with which {checkpoint.folder} ends its texts "
            f"(eos_token_id): it is another model's; name the one that belongs to the checkpoint by model.tokenizer"
        )


def _check_same_ids(checkpoint: HuggingFaceCheckpoint, tokenizer: TaskTokenizer, file: Path) -> None:
    """ConfigError where the checkpoint's own tokenizer has other tokens under the same ids. More tokens are allowed."""
    own = checkpoint.folder / TOKENIZER
    if not own.is_file() or own.read_bytes() == file.read_bytes():
        return
    if conflicts := tokenizer.conflicts(own):
        raise ConfigError(
            f"tokenizer {file}: {len(conflicts)} of its tokens are not what {own} has under their ids, {conflicts[0]} "
            "for one: it is another model's; name one with the same ids by model.tokenizer, or leave that out"
        )


def _with_max_seq_len(checkpoint: HuggingFaceCheckpoint, config: JobConfig) -> ModelConfig:
    """The checkpoint's model, for sequences as long as the job's."""
    longest, configured = checkpoint.model.max_seq_len, config.model.max_seq_len
    if configured > longest:
        raise ConfigError(
            f"model.max_seq_len={configured} is more than the {longest} positions of {checkpoint.folder} "
            "(max_position_embeddings): lower it"
        )
    return replace(checkpoint.model, max_seq_len=configured)


def _check_room(job: Job, task: Task) -> None:
    """ConfigError unless the task's prompts can be encoded and leave room for the longest response."""
    algorithm, evaluation = job.config.algorithm, job.config.evaluation
    num_prompts = min(algorithm.iterations * algorithm.prompts_per_iteration, _NUM_PROMPTS_CHECKED)
    texts = [task.prompt(index).text for index in range(num_prompts)]
    _check_lengths(job, texts, max_new_tokens=algorithm.max_new_tokens, key="algorithm.max_new_tokens")
    if evaluation is not None:
        num_prompts = min(evaluation.num_prompts or _NUM_PROMPTS_CHECKED, _NUM_PROMPTS_CHECKED)
        texts = [task.held_out(index).text for index in range(num_prompts)]
        key, longest = "evaluation.max_new_tokens", longest_evaluated(job.config)
        _check_lengths(job, texts, max_new_tokens=longest, key=key)


def _check_lengths(job: Job, texts: Sequence[str], *, max_new_tokens: int, key: str) -> None:
    limit, longest = job.model.max_seq_len, max(len(job.tokenizer.encode_prompt(text)) for text in texts)
    if longest + max_new_tokens > limit:
        raise ConfigError(
            f"{key}={max_new_tokens} and a prompt of {longest} tokens (the longest of the first {len(texts)}) make "
            f"{longest + max_new_tokens}, more than model.max_seq_len={limit}: raise the one or lower the other"
        )


def command_in(output_dir: Path, verb: str, *words: str) -> str:
    """`tidegate VERB WORDS` for the jobs of a folder, as it works where a person has typed what this process does."""
    called = os.environ.get(CALLED_VARIABLE)
    if called and verb not in _TYPED_HERE:
        return shlex.join(["tidegate", verb, *words, "--cluster", called])
    elsewhere = [] if output_dir == Path(OUTPUT_DIR).resolve() else ["--output-dir", str(output_dir)]
    return shlex.join(["tidegate", verb, *words, *elsewhere])
