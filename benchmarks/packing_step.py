"""Times GRPO updates of the demo's model: micro-batches of a fixed number of sequences, and under a token cap.

All sides may use the same number of positions. The fixed number of sequences is the number that fits with the longest
legal sample. Its micro-batches have consecutive samples (`fixed`) or samples sorted by length, the longest first
(`fixed_by_length`, the actor's way without a cap). One tree of ranks trains the same minibatches with each side in
turn, in the actor's own trainer. A step begins when all ranks are ready and ends with the last of them. The first
minibatch is a warm-up and is not timed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.actor.grpo import GrpoSettings, token_weights
from services.actor.grpo_minibatch import GrpoMinibatch
from services.actor.microbatch import TrainBatch, TrainSample, train_batch
from services.actor.settings import OptimizerSettings, TrainerSettings
from services.actor.trainer import MegatronTrainer
from tests.integration.elastic.world_ranks import join, open_store
from tests.ranks import RankContext, Results
from tidegate.config.files import Sources, load_sources
from tidegate.job import load_job
from tidegate.megatron.batching import BatchLimits, Limits, ReplicaPlace, deal, pad
from tidegate.megatron.packing import TokenCap
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

DEMO = Path(__file__).resolve().parent.parent / "tidegate" / "demo.yaml"
MAX_SEQ_LEN = 1024
"""Longer than the demo's own 80 tokens, which leave no room for a tail."""
MAX_TOKENS = 4096
NUM_SEQUENCES = MAX_TOKENS // MAX_SEQ_LEN
NUM_PROMPT_TOKENS = 16
MEDIAN_RESPONSE = 64
SIGMA = 1.0


def measure_step(context: RankContext, *, num_runs: int, num_samples: int) -> Results:
    """By side: the begin and the end of each step on the host's monotonic clock, its micro-batches and its positions on
    this rank. Also the tokens of each minibatch."""
    shape = load_job(load_sources(Sources([DEMO])).config).model
    model = replace(shape, max_seq_len=MAX_SEQ_LEN)
    world = join(context, open_store(context), epoch=1, members=tuple(range(context.world_size)))
    settings = TrainerSettings(
        model=model,
        padded_vocab=model.vocab_size,
        seed=0,
        temperature=1.0,
        limits=BatchLimits(),
        grpo=GrpoSettings(),
        optimizer=OptimizerSettings(),
    )
    trainer = MegatronTrainer(settings, world)
    trainer.elastic.start(Layout(dp=context.world_size))
    found: dict[str, list[float]] = {}
    for run in range(num_runs + 1):
        samples = drawn_samples(run, num_samples, model.vocab_size)
        sides = list(sides_of(model).items())
        for name, limits in sides[:: 1 if run % 2 else -1]:
            kind = InOrder if name == "fixed" else GrpoMinibatch
            minibatch = kind(samples, replace(settings, limits=limits))
            world.barrier(world.membership.members)
            began = time.monotonic()
            trainer.elastic.train_minibatch(minibatch, 0.0)
            figures = {"began": began, "ended": time.monotonic()}
            batches = minibatch.micro_batches(ReplicaPlace(context.rank, context.world_size))
            figures["num_batches"] = len(batches)
            figures["num_positions"] = sum(batch.batch.tokens_BS.size for batch in batches)
            for key, value in figures.items() if run else ():
                found.setdefault(f"{name}/{key}", []).append(value)
        if run:
            found.setdefault("num_tokens", []).append(sum(len(sample.tokens) for sample in samples))
    trainer.elastic.close()
    world.leave()
    return {name: np.array(values) for name, values in found.items()}


def sides_of(model: ModelConfig) -> dict[str, Limits]:
    fixed = BatchLimits(max_sequences=NUM_SEQUENCES)
    return {"fixed": fixed, "fixed_by_length": fixed, "capped": TokenCap.of_model(model, MAX_TOKENS)}


class InOrder(GrpoMinibatch):
    """Micro-batches of consecutive samples: a minibatch that is cut without sorting."""

    def micro_batches(self, place: ReplicaPlace) -> list[TrainBatch]:
        indices = range(len(self.samples))
        cut = [tuple(indices[first : first + NUM_SEQUENCES]) for first in indices[::NUM_SEQUENCES]]
        weights = token_weights(self.samples, self.settings.grpo)
        sequences = [sample.tokens for sample in self.samples]
        own = deal(cut, num_replicas=place.num_replicas, replica=place.replica)
        return [train_batch(self.samples, weights, pad(sequences, batch, self.settings.limits)) for batch in own]


def drawn_samples(seed: int, count: int, vocab_size: int) -> list[TrainSample]:
    """Samples with responses of lognormal lengths."""
    draw = np.random.default_rng(seed)
    longest = MAX_SEQ_LEN - NUM_PROMPT_TOKENS
    lengths = np.clip(draw.lognormal(np.log(MEDIAN_RESPONSE), SIGMA, count), 1, longest).astype(int)
    samples = []
    for length in lengths.tolist():
        old = tuple((-np.log(vocab_size) + 0.1 * draw.standard_normal(length)).tolist())
        samples.append(
            TrainSample(
                prompt_tokens=tuple(draw.integers(0, vocab_size, NUM_PROMPT_TOKENS).tolist()),
                response_tokens=tuple(draw.integers(0, vocab_size, length).tolist()),
                advantage=float(draw.standard_normal()),
                old_log_probs=old,
                reference_log_probs=(),
                engine_log_probs=old,
            )
        )
    return samples
