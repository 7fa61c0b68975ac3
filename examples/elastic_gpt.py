"""Trains a small GPT on four processes, changes its layout three times, and compares the losses with a fixed layout."""

from __future__ import annotations

from pathlib import Path

from tidegate.elastic import local

local.on_cpu()

import numpy as np
from megatron.core.optimizer import OptimizerConfig

from tidegate.elastic.minibatch import NextTokens
from tidegate.elastic.report import ReshardReport
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.elastic.world import World
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

MODEL = ModelConfig(4, 64, 192, num_heads=4, num_kv_heads=4, head_dim=16, vocab_size=64, max_seq_len=64)
RESIZES = {15: Layout(dp=2), 30: Layout(pp=2, dp=2), 45: Layout(tp=2, dp=2)}  # by the number of the next update


def counting_up(update: int) -> NextTokens:  # sequences with random starts and steps, modulo the vocabulary
    draw = np.random.default_rng(update)
    first, step = draw.integers(0, 64, (8, 1)), draw.integers(1, 4, (8, 1))
    return NextTokens(((first + step * np.arange(32)) % 64).tolist(), 64, limits=BatchLimits(max_sequences=2))


def train(world: World, folder: Path, resizes: dict[int, Layout]) -> tuple[list[float], list[ReshardReport]]:
    adam = OptimizerConfig(optimizer="adam", lr=0.0, clip_grad=1.0, use_distributed_optimizer=True)
    settings = ElasticSettings(shared_memory=folder, num_logical_shards=4)
    trainer = ElasticTrainer(GptProvider(MODEL, 64), adam, world=world, layouts=resizes.values(), settings=settings)
    trainer.start(Layout(dp=4))
    losses, reports = list[float](), list[ReshardReport]()
    for number in range(60):
        if number in resizes:
            reports.append(trainer.reshard(resizes[number]))
        update = trainer.train_minibatch(counting_up(number), learning_rate=3e-3)
        losses.append(update.sums[0] if update else float("nan"))  # None: on standby
    trainer.close()
    return losses, reports


def member(world: World, folder: Path) -> None:
    (resized, reports), (fixed, _) = train(world, folder, RESIZES), train(world, folder, {})
    if world.me == 0:
        for done in reports:
            print(f"{done.num_updates}: {done.source} -> {done.target}, {done.moved_bytes} bytes, {done.total_s:.3f} s")
        apart = max(abs(a - b) for a, b in zip(resized, fixed, strict=True))
        print(f"loss {resized[0]:.3f} -> {resized[-1]:.3f}; never further from the fixed run than {apart:.1e}")


if __name__ == "__main__":
    local.run(member, num_members=4)
