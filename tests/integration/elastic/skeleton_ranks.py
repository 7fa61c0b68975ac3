"""The rank processes of the skeleton tests."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import MegatronModule

from tests.integration.elastic.world_ranks import CPU, join, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic.epoch.world import World
from tidegate.elastic.model.adam import check_config, optimizer_form
from tidegate.elastic.model.memory import ALIGNMENT_BYTES, Arena, OwnArena, SharedArena
from tidegate.elastic.model.param_groups import assign, rebind, values_of
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.gpt import EMBEDDING
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import DistributedOptimizer, FlatRange, OptimizerRefused, StateKind
from tidegate.elastic.plan.parameters import Parameter
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.state.rng import seed_update
from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.groups import megatron_groups, prepare_megatron
from tidegate.megatron.log_probs import token_log_probs
from tidegate.megatron.updates import Updater
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

PADDED_VOCAB = 32
VOCAB = 29
SEQUENCE = 8

Tensors = dict[TensorKey, torch.Tensor]


@dataclass(frozen=True)
class PartlyFrozen(GptProvider):
    """Embeddings and the first layer's norm are frozen."""

    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(dataclasses.replace(p, trainable=not _is_frozen(p.name)) for p in super().parameters())

    def build(
        self, mesh: Mesh, me: int, groups: ProcessGroupCollection, *, device: torch.device
    ) -> list[MegatronModule]:
        chunks = super().build(mesh, me, groups, device=device)
        for name, tensor in self.local_parameters(chunks, mesh, me):
            tensor.requires_grad_(not _is_frozen(name))
        return chunks


def _is_frozen(name: str) -> bool:
    return name == EMBEDDING or name == "decoder.layers.0.input_layernorm.weight"


def model(*, tied: bool = False, experts: bool = False, bf16: bool = False, frozen: bool = False) -> GptProvider:
    config = ModelConfig(
        num_layers=4,
        hidden_size=16,
        ffn_hidden_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=VOCAB,
        max_seq_len=SEQUENCE,
        tied_embeddings=tied,
        num_experts=4 if experts else None,
        experts_per_token=2 if experts else None,
    )
    kind = PartlyFrozen if frozen else GptProvider
    return kind(config, PADDED_VOCAB, torch.bfloat16 if bf16 else torch.float32)


def adam_config(*, bf16: bool = False, **changed: Any) -> OptimizerConfig:
    settings: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 1e-2,
        "min_lr": 1e-4,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": True,
    }
    return OptimizerConfig(**settings | changed)


@contextmanager
def epoch(context: RankContext) -> Iterator[World]:
    world = join(context, open_store(context), epoch=1, members=tuple(range(context.world_size)))
    yield world
    world.leave()


def train(skeleton: Skeleton, *, seed: int) -> float:
    """Do one update on random tokens, the same on all ranks of the layout. Returns its loss."""
    updater = Updater(skeleton.chunks, skeleton.optimizer, skeleton.groups, num_sums=1)
    tokens_BS = np.random.default_rng(seed).integers(VOCAB, size=(2, SEQUENCE))

    def loss_of(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
        log_probs_BS = token_log_probs(logits_BQV, tokens_BS, vocab_size=VOCAB, temperature=1.0, groups=skeleton.groups)
        loss = -log_probs_BS.mean() / 2 / skeleton.groups.dp.size()
        return loss, loss.detach().reshape(1)

    batches = [TokenBatch((0, 1), tokens_BS), TokenBatch((0, 1), tokens_BS[::-1].copy())]
    update = updater.update(batches, loss_of, 1e-2)
    assert update.committed
    return update.sums[0]


def copies(skeleton: Skeleton) -> Tensors:
    return {key: tensor.clone() for key, tensor in skeleton.tensors().items()}


def fill(skeleton: Skeleton, state: Tensors) -> None:
    for key, tensor in skeleton.tensors().items():
        tensor.copy_(state[key])


def same(left: Tensors, right: Tensors) -> bool:
    """Whether both have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def held_tensors(context: RankContext, *, cases: Sequence[dict[str, Any]]) -> Results:
    """Compare each case's skeleton with the planner's Holdings. Members that are in no mesh stand by."""
    wrong: list[str] = []
    counts: list[int] = []
    with epoch(context) as world:
        for case in cases:
            provider = model(**case.get("model", {}))
            mesh = provider.mesh(Layout(**case["layout"]), tuple(case["ranks"]))
            config = adam_config(bf16=case.get("model", {}).get("bf16", False))
            groups = megatron_groups(world, mesh)
            ranges: dict[str, FlatRange] = {}
            if groups is not None:
                prepare_megatron(groups, seed=1)
                skeleton = Skeleton(
                    provider, mesh, world.me, groups, config, device=CPU, arena=OwnArena(CPU)
                ).complete()
                ranges = skeleton.ranges()
            everyone = world.gather(world.membership.members, json.dumps(ranges).encode())
            if groups is not None:
                found = _difference(provider, mesh, config, skeleton, everyone, world.me)
                wrong += [f"{case}: {text}" for text in found]
                counts.append(len(skeleton.tensors()))
    return {"wrong": np.array(wrong, dtype=str), "counts": np.array(counts)}


def _difference(
    provider: GptProvider, mesh: Mesh, config: OptimizerConfig, skeleton: Skeleton, ranges: dict[int, bytes], me: int
) -> list[str]:
    by_rank = {
        rank: {name: FlatRange(*share) for name, share in json.loads(ranges[rank]).items()} for rank in mesh.ranks
    }
    state = State(mesh, DistributedOptimizer(by_rank, *optimizer_form(config)))
    held = Planner(provider.parameters(), state, state).part(me).source_holdings
    want = {(holding.name, holding.kind): (holding.num_elements, holding.itemsize) for holding in held}
    got = {key: (tensor.numel(), tensor.itemsize) for key, tensor in skeleton.tensors().items()}
    unaligned = [
        f"{name} {kind} is not aligned"
        for (name, kind), tensor in skeleton.tensors().items()
        if kind not in (StateKind.WEIGHT, StateKind.STEP) and tensor.data_ptr() % ALIGNMENT_BYTES
    ]
    differing = [key for key in want.keys() | got if got.get(key) != want.get(key)]
    return unaligned + [f"{key}: {got.get(key)} for {want.get(key)}" for key in differing]


def released_and_filled(
    context: RankContext, *, layout: dict[str, int], model_of: dict[str, Any], folder: str | None
) -> Results:
    """Compare an unbroken run with one whose skeleton is released and filled, and with one on a second skeleton."""
    with epoch(context) as world:
        provider = model(**model_of)
        mesh = provider.mesh(Layout(**layout), world.membership.members)
        config = adam_config(bf16=model_of.get("bf16", False))
        groups = megatron_groups(world, mesh)
        assert groups is not None
        prepare_megatron(groups, seed=1)

        def build(number: int) -> tuple[Skeleton, Arena]:
            path = Path(folder or "") / f"{world.me}-{number}"
            arena = SharedArena(path) if folder else OwnArena(CPU)
            return Skeleton(provider, mesh, world.me, groups, config, device=CPU, arena=arena).complete(), arena

        first, arena = build(1)
        provider.initialise(first.chunks, mesh, world.me, seed=3)
        first.start_anew()
        losses = [train(first, seed=update % 2) for update in range(2)]
        middle = copies(first)
        losses += [train(first, seed=update % 2) for update in range(2, 4)]
        want = copies(first)
        first.release()
        released_bytes = _bytes_held(first, arena)
        first.materialise()
        first.materialise_gradients()
        materialised_bytes = _bytes_held(first, arena)
        fill(first, middle)
        again = [train(first, seed=update % 2) for update in range(2, 4)]
        second, second_arena = build(2)
        second.release()
        second.materialise()
        second.materialise_gradients()
        fill(second, middle)
        elsewhere = [train(second, seed=update % 2) for update in range(2, 4)]
        results = {
            "losses": np.array(losses),
            "again": np.array([again, elsewhere]),
            "same": np.array([same(want, copies(first)), same(want, copies(second)), not same(middle, want)]),
            "steps": np.array(sorted({float(t) for (_, kind), t in want.items() if kind == "step"})),
            "bytes": np.array([released_bytes, materialised_bytes]),
            "expected_bytes": np.array(first.num_bytes.total),
            "gradient_sizes_fit": np.array(
                {name: gradient.numel() for name, gradient in second.gradients().items()}
                == {name: share.end - share.start for name, share in second.ranges().items()}
            ),
        }
        for used in (arena, second_arena):
            if isinstance(used, SharedArena):
                used.unlink()
                used.close()
        return results


def _bytes_held(skeleton: Skeleton, arena: Arena) -> int:
    """The bytes of the arena's file, or of the tensors' own memory, and of the gradients."""
    gradients = _storage_bytes(
        buffer.grad_data for chunk in skeleton.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )
    tensors = skeleton.tensors().values()
    if not isinstance(arena, SharedArena):
        return _storage_bytes(tensors) + gradients
    # `place` raises for a tensor outside the arena.
    assert len({arena.place(tensor).offset_bytes for tensor in tensors}) == len(tensors)
    return os.stat(arena.path).st_blocks * 512 + gradients


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def refusals(context: RankContext) -> Results:
    """The errors for optimizers that cannot change their layout."""

    def refusal_of(provider: GptProvider, config: OptimizerConfig) -> str:
        try:
            check_config(config, provider.parameters())
        except OptimizerRefused as refusal:
            return str(refusal)
        return ""

    fp32 = model()
    texts = {
        "adam": refusal_of(fp32, adam_config()),
        "layer-wise": refusal_of(fp32, adam_config(optimizer="muon", use_layer_wise_distributed_optimizer=True)),
        "offloaded": refusal_of(fp32, adam_config(optimizer_cpu_offload=True)),
        "sgd": refusal_of(fp32, adam_config(optimizer="sgd")),
        "plain": refusal_of(fp32, adam_config(use_distributed_optimizer=False)),
        "bf16 optimizer": refusal_of(fp32, adam_config(bf16=True)),
        "fp32 optimizer": refusal_of(model(bf16=True), adam_config()),
    }
    return {name: np.array(text) for name, text in texts.items()}


def scheduled(context: RankContext, *, experts: bool, layout: dict[str, int], other_layout: dict[str, int]) -> Results:
    """The groups' values in a run, and those of another layout's optimizer that continues half-way."""
    overrides = {
        ParamKey(predicate=ParamPredicate("norms", _is_norm)): ParamGroupOverride(wd_mult=0.0),
        ParamKey(attr="is_embedding_or_output_parameter"): ParamGroupOverride(max_lr=2e-2, min_lr=2e-3),
    }
    with epoch(context) as world:
        provider = model(experts=experts)

        def build(sizes: dict[str, int]) -> Skeleton:
            mesh = provider.mesh(Layout(**sizes), world.membership.members)
            groups = megatron_groups(world, mesh)
            assert groups is not None
            prepare_megatron(groups, seed=1)
            skeleton = Skeleton(
                provider,
                mesh,
                world.me,
                groups,
                adam_config(),
                device=CPU,
                arena=OwnArena(CPU),
                config_overrides=overrides,
            ).complete()
            provider.initialise(skeleton.chunks, mesh, world.me, seed=3)
            skeleton.start_anew()
            return skeleton

        first, second = build(layout), build(other_layout)
        scheduler = _scheduler(first.optimizer)
        first.optimizer.param_groups[0]["lr_mult"] = 0.5
        for update in range(3):
            _scheduled_update(first, scheduler, seed=update)
        wired = json.loads(json.dumps(values_of(first.optimizer)))
        num_steps = scheduler.num_steps
        values = [_scheduled_update(first, scheduler, seed=update) for update in range(3, 6)]
        assign(second.optimizer, wired)
        resumed = _scheduler(second.optimizer)
        rebind(resumed, second.optimizer, num_steps=num_steps)
        again = [_scheduled_update(second, resumed, seed=update) for update in range(3, 6)]
        return {
            "values": np.array(values),
            "again": np.array(again),
            "betas": np.array(str(second.optimizer.param_groups[0]["betas"])),
            "experts": np.array([group["is_expert_parallel"] for group in second.optimizer.param_groups]),
            "strange": np.array(_refused(second.optimizer, wired[:1])),
            "after_refusal": np.array([group["lr_mult"] for group in second.optimizer.param_groups]),
        }


def _is_norm(parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() == 1


def _scheduler(optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=8,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=8,
        wd_incr_style="linear",
    )


def _scheduled_update(skeleton: Skeleton, scheduler: OptimizerParamScheduler, *, seed: int) -> list[list[float]]:
    """Learning rate, weight decay and the rate's multiplier of each group, after the update."""
    for number, gradient in enumerate(skeleton.gradients().values()):
        gradient.normal_(generator=torch.Generator().manual_seed(100 * seed + number))
    skeleton.optimizer.prepare_grads()
    skeleton.optimizer.step_with_ready_grads()
    scheduler.step(1)
    return [[group["lr"], group["weight_decay"], group["lr_mult"]] for group in skeleton.optimizer.param_groups]


def _refused(optimizer: Any, values: Sequence[Any]) -> str:
    try:
        assign(optimizer, values)
    except ValueError as error:
        return str(error)
    return ""


def random_numbers(context: RankContext, *, layouts: Sequence[dict[str, int]]) -> Results:
    """The draws of each rank of each layout from each stream at the start of update 5. For the first layout also those
    of update 6, and those of update 5 once a portion of it has been carried there.
    """
    streams = ("default", "model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")

    def draws(layout: dict[str, int], num_updates: int, num_portions: int = 0) -> Any:
        sizes = Layout(**layout)
        mesh = Mesh(sizes, tuple(range(sizes.num_ranks)), ((4 // sizes.pp,) * sizes.pp,))
        rows = []
        for me in mesh.ranks:
            seed_update(11, num_updates, mesh, me, num_portions=num_portions)
            row = [torch.rand(2)]
            for stream in streams[1:]:
                with get_cuda_rng_tracker().fork(stream):
                    row.append(torch.rand(2))
            rows.append(torch.stack([*row, torch.rand(2)]))
        return torch.stack(rows).numpy()

    found = {str(number): draws(layout, 5) for number, layout in enumerate(layouts)}
    return found | {"next": draws(layouts[0], 6), "carried": draws(layouts[0], 5, num_portions=1)}
