"""The rank processes of the elastic trainer tests, and the logical state as numpy arrays, assembled by the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerLayer
from torch._C._distributed_c10d import Store

from tests.integration.elastic.world_ranks import TIMEOUT_S, join, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic.epoch.world import MAX_GROUPS
from tidegate.elastic.minibatch import NextTokens
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.parameters import Parameter, Split
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.report import PARTS
from tidegate.elastic.reshard_preparation import OnPoint, ignore_point
from tidegate.elastic.settings import CopyTo, ElasticSettings
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

VOCAB = 61
PADDED_VOCAB = 64
LEARNING_RATE = 1e-3
SEED = 5
NUM_SEQUENCES = 8
"""The sequences of a minibatch: one each for as many replicas as any test has."""
DROPOUT = 0.2

Logical = dict[str, npt.NDArray[Any]]
"""By `NAME/KIND`: the unsharded tensor's bits."""


@dataclass(frozen=True)
class DroppingOut(GptProvider):
    """A GPT with Megatron's dropout between its layers, which no job of ours configures."""

    def build(
        self, mesh: Mesh, me: int, groups: ProcessGroupCollection, *, device: torch.device
    ) -> list[MegatronModule]:
        chunks = super().build(mesh, me, groups, device=device)
        for chunk in chunks:
            for layer in chunk.modules():
                if isinstance(layer, TransformerLayer):
                    layer.hidden_dropout = DROPOUT
        return chunks


def provider(
    *, experts: bool = False, bf16: bool = False, tied: bool = True, dropping_out: bool = False
) -> GptProvider:
    config = ModelConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        vocab_size=VOCAB,
        max_seq_len=64,
        tied_embeddings=tied,
        num_experts=4 if experts else None,
        experts_per_token=2 if experts else None,
    )
    model = DroppingOut if dropping_out else GptProvider
    return model(config, PADDED_VOCAB, dtype=torch.bfloat16 if bf16 else torch.float32)


def adam(*, bf16: bool = False) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
    )


def minibatch(update: int) -> NextTokens:
    """The tokens of one update, the same in every layout."""
    draw = np.random.default_rng((SEED, update))
    sequences = [draw.integers(0, VOCAB, size=int(draw.integers(9, 17))).tolist() for _ in range(NUM_SEQUENCES)]
    return NextTokens(sequences, VOCAB, limits=BatchLimits(max_sequences=1, pad_multiple=16))


@contextmanager
def started(
    context: RankContext,
    layout: Layout,
    ranks: Sequence[int] | None = None,
    *,
    shared: bool = True,
    keeps_files: bool = False,
    shards: int | None = None,
    on_point: OnPoint = ignore_point,
    max_groups: int = MAX_GROUPS,
    keeps_last: bool = True,
    copies: str = CopyTo.NOWHERE,
    late: bool = False,
    change: Callable[[GptProvider], GptProvider] = lambda provider: provider,
    store: Store | None = None,
    ends_world: bool = True,
    **model: bool,
) -> Iterator[ElasticTrainer]:
    """A trainer over all ranks of the context, in its first layout. `keeps_files`: a suspended state is in files.
    `late`: switches are proved late.

    `store`: one that the caller opened, for further epochs. `ends_world`: whether the first epoch lasts to the end.
    """
    store = store or open_store(context)
    members = tuple(range(context.world_size))
    world = join(context, store, epoch=1, members=members, max_groups=max_groups)
    folder = context.tmpfs if shared else None
    settings = ElasticSettings(
        seed=SEED,
        shared_memory=folder,
        host_memory=context.tmpfs if keeps_files else None,
        timeout_s=TIMEOUT_S,
        num_logical_shards=shards,
        keeps_last=keeps_last,
        copies=CopyTo(copies),
        proves_late=late,
    )
    optimizer_config = adam(bf16=model.get("bf16", False))
    used = change(provider(**model))
    trainer = ElasticTrainer(used, optimizer_config, world=world, settings=settings, on_point=on_point)
    trainer.start(layout, ranks=ranks)
    yield trainer
    trainer.close()
    if ends_world:
        world.leave()


def logical_state(trainer: ElasticTrainer) -> Logical:
    """Assembled by member 0 from all ranks' tensors as they lie in memory. Replicas must agree bit for bit.

    Every member calls it; the others get an empty result.
    """
    location, parameters = trainer.location, provider_parameters(trainer)
    assert location is not None
    end = location.as_end(trainer.optimizer_config)
    planner = Planner(list(parameters.values()), end, end)
    own = b""
    if location.state is not None:
        tensors = location.state.skeleton.tensors()
        holdings = planner.part(trainer.world.me).source_holdings
        own = b"".join(tensors[h.name, h.kind].clone().view(torch.uint8).numpy().tobytes() for h in holdings)
    gathered = trainer.world.gather(trainer.world.membership.members, own)
    if trainer.world.me != 0:
        return {}
    found: Logical = {}
    known: dict[str, npt.NDArray[np.bool_]] = {}
    for rank in location.mesh.ranks:
        offset = 0
        for holding in planner.part(rank).source_holdings:
            flat = np.frombuffer(gathered[rank], f"u{holding.itemsize}", holding.num_elements, offset)
            offset += flat.nbytes
            parameter, key = parameters[holding.name], f"{holding.name}/{holding.kind}"
            shape = _matrix(parameter) if holding.kind is not StateKind.STEP else (1, 1)
            matrix = found.setdefault(key, np.zeros(shape, flat.dtype))
            seen = known.setdefault(key, np.zeros(shape, np.bool_))
            for block in holding.blocks:
                box = np.s_[block.row : block.row + block.rows, block.col : block.col + block.cols]
                strides = (block.stride * flat.itemsize, flat.itemsize)
                value = np.lib.stride_tricks.as_strided(flat[block.offset :], (block.rows, block.cols), strides)
                assert np.array_equal(matrix[box][seen[box]], value[seen[box]]), f"{key} differs on rank {rank}"
                matrix[box] = value
                seen[box] = True
    assert all(seen.all() for seen in known.values())
    return found


def provider_parameters(trainer: ElasticTrainer) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in trainer.provider.parameters()}


def _matrix(parameter: Parameter) -> tuple[int, int]:
    dim = parameter.cut.dim if isinstance(parameter.cut, Split) else 0
    rows = prod(parameter.shape[:dim])
    return rows, prod(parameter.shape) // rows


def same(left: Logical, right: Logical) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


def circuit(num_nodes: int) -> list[int]:
    """A closed walk that takes every ordered pair of different nodes once, after Hierholzer. It begins at 0."""
    ahead = {node: [other for other in range(num_nodes) if other != node] for node in range(num_nodes)}
    path, walk = [0], []
    while path:
        if ahead[path[-1]]:
            path.append(ahead[path[-1]].pop())
        else:
            walk.append(path.pop())
    return walk[::-1]


def walks(
    context: RankContext,
    *,
    places: list[dict[str, Any]],
    updates_between: int = 1,
    hurried_at: int | None = None,
    **options: Any,
) -> Results:
    """Train through all the places, with `updates` in each. Returns each update's results and each switch's moved
    bytes.

    `is_same`: whether the logical state, by member 0, was the same before and after. From the update `hurried_at` on,
    parameters with weight decay learn at eight times the rate. `proved`: the certificate of each switch after the next
    updates, empty where it is late and the member is not in the layout.
    """
    updates: list[tuple[float, float]] = []
    moved, is_same, seconds, certificates, proved = [], [], [], [], []

    def train(trainer: ElasticTrainer, num_updates: int) -> None:
        for _ in range(num_updates):
            if len(updates) == hurried_at:
                _hurry(trainer)
            update = trainer.train_minibatch(minibatch(len(updates)), LEARNING_RATE)
            updates.append((update.sums[0], update.grad_norm) if update else (np.nan, np.nan))

    first, *others = places
    with started(context, Layout(**first["layout"]), first.get("ranks"), **options) as trainer:
        train(trainer, first.get("updates", updates_between))
        for place in others:
            before = logical_state(trainer)
            report = trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"))
            is_same.append(same(before, logical_state(trainer)))
            moved.append((report.moved_bytes, report.minimum_bytes))
            certificates.append(report.certificate)
            seconds.append([report.seconds[part] for part in PARTS])
            train(trainer, place.get("updates", updates_between))
            proved.append(trainer.certificate)
        progress = trainer.progress
        final = logical_state(trainer)
    figures = {
        "updates": np.array(updates),
        "moved": np.array(moved),
        "is_same": np.array(is_same),
        "certificates": np.array(certificates),
        "proved": np.array(proved),
        "seconds": np.array(seconds),
        "progress": np.array([progress.num_updates, progress.num_samples]),
    }
    return figures | {f"final/{key}": value for key, value in final.items()}


def holds_state(trainer: ElasticTrainer) -> bool:
    return trainer.location is not None and trainer.location.state is not None


def _hurry(trainer: ElasticTrainer) -> None:
    if holds_state(trainer):
        for group in trainer.state.skeleton.optimizer.param_groups:
            if group["wd_mult"]:
                group["lr_mult"] = 8.0


def carries_progress(context: RankContext) -> Results:
    """The progress before the first update, after the second, and in a layout of other members."""

    def text_of(trainer: ElasticTrainer) -> str:
        progress = trainer.progress
        return f"{progress.num_updates} {progress.num_samples} {json.dumps(progress.cursor)}"

    with started(context, Layout(dp=2), (0, 1)) as trainer:
        if holds_state(trainer):
            trainer.cursor = {"epoch": 1, "shard": "a"}
        trainer.reshard(Layout(dp=4))
        before = [text_of(trainer)]
        for update in range(2):
            trainer.train_minibatch(minibatch(update), LEARNING_RATE)
        before.append(text_of(trainer))
        trainer.reshard(Layout(tp=2), ranks=(3, 2))
        if holds_state(trainer):
            trainer.cursor = {"epoch": 2, "shard": "b"}
        trainer.train_minibatch(minibatch(2), LEARNING_RATE)
        trainer.reshard(Layout(pp=2))
        return {"before": np.array(before), "after": np.array(text_of(trainer))}


def updates_of(found: Sequence[Results]) -> npt.NDArray[Any]:
    """Loss and gradient norm of each update. All ranks that took part must agree."""
    each = np.stack([of_rank["updates"] for of_rank in found])
    common: npt.NDArray[Any] = np.nanmax(each, axis=0)
    assert np.array_equal(common, np.nanmin(each, axis=0)), "the ranks of a layout report different numbers"
    return common
