"""Trains a small GPT on four processes and changes its layout three times on the way; the loss does not notice.

python examples/elastic_gpt.py [CURVES.json]: beside it runs the same job in one fixed layout.
"""

import json
import sys
from pathlib import Path

from tidegate.megatron import cpu_stand_in

cpu_stand_in.install()  # before Megatron is imported; does nothing where CUDA is present

import numpy as np  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402

from tidegate.elastic import local  # noqa: E402
from tidegate.elastic.minibatch import NextTokens  # noqa: E402
from tidegate.elastic.settings import ElasticSettings  # noqa: E402
from tidegate.elastic.trainer import ElasticTrainer  # noqa: E402
from tidegate.elastic.world import World  # noqa: E402
from tidegate.megatron.batching import BatchLimits  # noqa: E402
from tidegate.megatron.gpt_provider import GptProvider  # noqa: E402
from tidegate.model_config import ModelConfig  # noqa: E402
from tidegate.types import Layout  # noqa: E402

MODEL = ModelConfig(4, 64, 192, num_heads=4, num_kv_heads=4, head_dim=16, vocab_size=64, max_seq_len=64)
RESIZES = {15: Layout(tp=2, pp=2), 30: Layout(dp=2), 45: Layout(tp=2, dp=2)}


def minibatch(update: int) -> NextTokens:
    """Numbers that count upwards from a random one in random steps, modulo the vocabulary."""
    draw = np.random.default_rng(update)
    first, step = draw.integers(0, 64, (8, 1)), draw.integers(1, 4, (8, 1))
    return NextTokens((first + step * np.arange(32)).__mod__(64).tolist(), 64, limits=BatchLimits(max_sequences=2))


def train(world: World, shared_memory: Path, resizes: dict[int, Layout]) -> list[float]:
    optimizer = OptimizerConfig(optimizer="adam", lr=0.0, clip_grad=1.0, use_distributed_optimizer=True)
    settings = ElasticSettings(shared_memory=shared_memory)
    trainer = ElasticTrainer(GptProvider(MODEL, padded_vocab=64), optimizer, world=world, settings=settings)
    trainer.start(Layout(dp=4))
    losses = []
    for number in range(60):
        if number in resizes:
            report = trainer.reshard(resizes[number])
            if world.me == 0:
                print(f"{number}: {report.source} -> {report.target}, {report.moved_bytes} bytes, {report.total_s:.2f} s")
        update = trainer.train_minibatch(minibatch(number), learning_rate=3e-3)
        losses.append(update.sums[0] if update else float("nan"))
    trainer.close()
    return losses


def member(world: World, shared_memory: Path) -> None:
    resized, fixed = train(world, shared_memory, RESIZES), train(world, shared_memory, {})
    if world.me == 0:
        apart = max(abs(a - b) for a, b in zip(resized, fixed, strict=True))
        print(f"loss {resized[0]:.3f} -> {resized[-1]:.3f}; never further from the fixed run than {apart:.1e}")
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps({"resized": resized, "fixed": fixed}))


if __name__ == "__main__":
    local.run(member, num_members=4)
