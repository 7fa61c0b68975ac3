"""The rank processes of these tests. Each returns a dict of arrays."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch._C._distributed_c10d import TCPStore

from services.actor.microbatch import Demonstration, TrainSample
from services.actor.settings import TrainerSettings
from services.actor.trainer import MegatronTrainer
from tests.integration.elastic.world_ranks import CPU, join, open_store
from tests.integration.megatron import small_job
from tests.ranks import RankContext, Results
from tidegate.checksums import file_checksum
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.rendezvous import listening_socket
from tidegate.elastic.plan.holders import Holders, Slot, State
from tidegate.elastic.plan.parameters import shard_of
from tidegate.elastic.state.files import StateFiles
from tidegate.megatron import cpu_stand_in
from tidegate.megatron.batching import ReplicaPlace, replica_batches
from tidegate.megatron.gpt_provider import InitialWeights
from tidegate.megatron.log_probs import forward_log_probs
from tidegate.megatron.parallel import ParallelRanks, Rendezvous, parallel
from tidegate.runtime.pacer import Pacer
from tidegate.types import Layout


@contextmanager
def world(context: RankContext, layout: dict[str, int], *, device: torch.device = CPU) -> Iterator[ParallelRanks]:
    rendezvous = Rendezvous(
        rank=context.rank,
        world_size=context.world_size,
        port=context.port,
        timeout_s=context.timeout_s,
        listen_fd=context.listen_fd,
    )
    with parallel(rendezvous, Layout(**layout), device=device, seed=0) as ranks:
        yield ranks


@contextmanager
def trainer(
    context: RankContext,
    layout: dict[str, int],
    settings: TrainerSettings,
    *,
    source: StateFiles | None = None,
    weights: InitialWeights | None = None,
    store: TCPStore | None = None,
    epoch: int = 1,
    device: torch.device = CPU,
    pacer: Pacer | None = None,
) -> Iterator[MegatronTrainer]:
    """A trainer that is started in this layout on all ranks, from `source` or `weights` if set."""
    members = tuple(range(context.world_size))
    epoch_world = join(context, store or open_store(context), epoch=epoch, members=members, device=device)
    actor = MegatronTrainer(settings, epoch_world, weights=weights, pacer=pacer)
    if source is None:
        actor.elastic.start(Layout(**layout))
    else:
        checkpoints.start_from(actor.elastic, source, Layout(**layout))
    yield actor
    actor.elastic.close()
    epoch_world.leave()


def one_update(
    context: RankContext,
    *,
    layout: dict[str, int],
    grpo: dict[str, Any],
    tied: bool = False,
    rate: float = 1e-3,
    precision: str = "fp32",
    max_tokens: int | None = None,
    device: str = "cpu",
) -> Results:
    """Initial parameters, and the loss, gradients and metrics of one update, by logical name with their places."""
    settings = small_job.trainer_settings(
        tied=tied,
        grpo=small_job.grpo_settings(**grpo),
        clip_grad=small_job.NO_CLIPPING,
        precision=precision,
        max_tokens=max_tokens,
    )
    with trainer(context, layout, settings, device=torch.device(device)) as actor:
        results: Results = {}
        by_name = {parameter.name: parameter for parameter in actor.elastic.provider.parameters()}
        skeleton, me = actor.elastic.state.skeleton, actor.elastic.world.me
        holders = Holders(State(skeleton.mesh))
        for name, tensor in local_parameters(actor):
            (holding,) = holders.holdings(by_name[name], Slot.WEIGHT, me)
            results[f"param/{name}"] = tensor.detach().float().cpu().clone().numpy()
            results[f"shape/{name}"] = np.array(by_name[name].shape)
            results[f"rows/{name}"] = np.array(shard_of(by_name[name].shape, by_name[name].cut, tp=1, tp_rank=0).rows)
            results[f"blocks/{name}"] = np.array(holding.blocks).reshape(-1, 6)
        report = actor.train_minibatch(small_job.recorded_samples(), rate)
        for name, gradient in skeleton.gradients().items():
            whole = np.full(results[f"param/{name}"].shape, np.nan, np.float32)
            whole.reshape(-1)[slice(*skeleton.ranges()[name])] = gradient.cpu().clone().numpy()
            results[f"grad/{name}"] = whole
        results["committed"] = np.array(report.committed)
        results["loss"], results["grad_norm"] = np.array(report.loss), np.array(report.grad_norm)
        return results | {f"metric/{name}": np.array(value) for name, value in report.metrics.items()}


def updates(
    context: RankContext,
    *,
    layout: dict[str, int],
    num_updates: int,
    tied: bool = False,
    experts: bool = False,
    seed: int = 0,
    num_logical_shards: int | None = None,
) -> Results:
    """Losses and norms of a run over recorded minibatches, and the final state."""
    settings = small_job.trainer_settings(tied=tied, experts=experts, seed=seed)
    with trainer(context, layout, dataclasses.replace(settings, num_logical_shards=num_logical_shards)) as actor:
        reports = [
            actor.train_minibatch(small_job.recorded_samples(seed=update), 1e-3) for update in range(num_updates)
        ]
        results = {f"state/{name}": tensor.numpy() for name, tensor in copies(actor).items()}
        results["loss"] = np.array([report.loss for report in reports])
        results["absolute_terms"] = np.array([report.metrics["absolute_terms"] for report in reports])
        return results | {"grad_norm": np.array([report.grad_norm for report in reports])}


def poisoned_update(context: RankContext, *, layout: dict[str, int], advantage: float) -> Results:
    """A good update, then one in which one sample's advantage is replaced, then a good one."""
    samples = small_job.recorded_samples()
    poisoned = [dataclasses.replace(samples[0], advantage=advantage), *samples[1:]]
    with trainer(context, layout, small_job.trainer_settings()) as actor:
        actor.train_minibatch(samples, 1e-3)
        before = copies(actor)
        report = actor.train_minibatch(poisoned, 1e-3)
        after = copies(actor)
        next_report = actor.train_minibatch(samples, 1e-3)
    return {
        "committed": np.array(report.committed),
        "loss": np.array(report.loss),
        "grad_norm": np.array(report.grad_norm),
        "unchanged": np.array(all(torch.equal(before[name], after[name]) for name in before)),
        "next_committed": np.array(next_report.committed),
        "next_loss": np.array(next_report.loss),
    }


def checkpointed(
    context: RankContext, *, layout: dict[str, int], first: int, last: int, folder: str, source: str = ""
) -> Results:
    """Updates `first` to `last`, with a save at the end. With `source` the run starts from it, and saves it
    again first.
    """
    settings = small_job.trainer_settings(tied=True, seed=1 if source else 0)
    with trainer(context, layout, settings, source=state_files(Path(source)) if source else None) as actor:
        file, progress = str(context.rank), [actor.elastic.progress.num_updates]
        if source:
            checkpoints.save(actor.elastic, Path(folder) / "loaded", file)
        minibatches = [small_job.recorded_samples(seed=update) for update in range(first, last)]
        reports = [actor.train_minibatch(minibatch, 1e-3) for minibatch in minibatches]
        checkpoints.save(actor.elastic, Path(folder) / "trained", file)
        progress.append(actor.elastic.progress.num_updates)
        return {
            "loss": np.array([report.loss for report in reports]),
            "absolute_terms": np.array([report.metrics["absolute_terms"] for report in reports]),
            "progress": np.array(progress),
        }


def state_files(folder: Path) -> StateFiles:
    return StateFiles(folder, {path.name: file_checksum(path) for path in sorted(folder.iterdir())})


def copies(actor: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Copies of everything that this rank holds, as KIND/NAME."""
    tensors = actor.elastic.state.skeleton.tensors()
    return {f"{kind}/{name}": tensor.clone() for (name, kind), tensor in tensors.items()}


def local_parameters(actor: MegatronTrainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    skeleton = actor.elastic.state.skeleton
    return actor.elastic.provider.local_parameters(skeleton.chunks, skeleton.mesh, actor.elastic.world.me)


def scored(context: RankContext, *, layout: dict[str, int], tied: bool = False) -> Results:
    """Log-probabilities from the actor and from a frozen model, and an update on exactly those."""
    settings = small_job.trainer_settings(tied=tied)
    samples = small_job.recorded_samples()
    sequences = [sample.tokens for sample in samples]
    with trainer(context, layout, settings) as actor:
        by_actor = actor.log_probs(sequences)
        provider, skeleton, me = actor.elastic.provider, actor.elastic.state.skeleton, actor.elastic.world.me
        built = provider.build(skeleton.mesh, me, skeleton.groups, device=CPU)
        provider.initialise(built, skeleton.mesh, me, seed=settings.seed)
        chunks = [chunk.eval().requires_grad_(False) for chunk in built]
        replicas = skeleton.groups.dp
        place = ReplicaPlace(replicas.rank(), replicas.size())
        batches = replica_batches(sequences, settings.limits, place)
        rows = forward_log_probs(
            chunks,
            batches,
            vocab_size=settings.model.vocab_size,
            temperature=settings.temperature,
            groups=skeleton.groups,
            device=CPU,
        )
        results = {f"actor/{index}": values for index, values in by_actor.items()}
        for batch, log_probs_BS in zip(batches, rows, strict=bool(rows)):
            for row, index in enumerate(batch.sequences):
                results[f"inference/{index}"] = log_probs_BS[row, : len(sequences[index])]
        for name, tensor in local_parameters(actor):
            results[f"param/{name}"] = tensor.detach().clone().numpy()
        if layout:
            return results
        own = [_scored_by(sample, by_actor[index]) for index, sample in enumerate(samples)]
        metrics = actor.train_minibatch(own, 0.0).metrics
        return results | {f"metric/{name}": np.array(value) for name, value in metrics.items()}


def _scored_by(sample: TrainSample, log_probs_S: npt.NDArray[np.float32]) -> TrainSample:
    exact = tuple(map(float, log_probs_S[len(sample.prompt_tokens) :]))
    return dataclasses.replace(sample, old_log_probs=exact, reference_log_probs=exact, engine_log_probs=exact)


def supervised(context: RankContext, *, layout: dict[str, int], num_updates: int) -> Results:
    """The losses of learning a few sequences by heart."""
    demonstrations = [
        Demonstration(tokens=tuple(range(first, first + 10)), loss_mask=(False,) * 2 + (True,) * 8)
        for first in (3, 20, 33, 47)
    ]
    with trainer(context, layout, small_job.trainer_settings()) as actor:
        reports = [actor.supervised_step(demonstrations, 1e-2) for _ in range(num_updates)]
    return {"loss": np.array([report.loss for report in reports])}


def listening_addresses(context: RankContext, *, layout: dict[str, int], own_socket: bool) -> Results:
    """The addresses on which this rank's sockets listen: of an actor that has trained, or of a world with its own
    socket.

    The interface that the environment names does not exist: the world must use the configured one.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "absent0"
    if not own_socket:
        with trainer(context, layout, small_job.trainer_settings()) as actor:
            actor.train_minibatch(small_job.recorded_samples(), 1e-3)
            return {"addresses": np.array(_listening())}
    assert context.listen_fd is not None, "only one rank runs this"
    os.close(context.listen_fd)
    with listening_socket() as free:
        context = dataclasses.replace(context, listen_fd=None, port=free.getsockname()[1])
    with world(context, layout):
        return {"addresses": np.array(_listening())}


def ended_world(context: RankContext, *, layout: dict[str, int]) -> Results:
    """The sockets that listen during the world and after its end."""
    with world(context, layout):
        during = len(_listening())
    return {"during": np.array(during), "after": np.array(len(_listening()))}


def _listening() -> list[str]:
    """The addresses of this process's listening sockets."""
    connections = psutil.Process().net_connections(kind="inet")
    return [found.laddr.ip for found in connections if found.status == psutil.CONN_LISTEN]


def stand_in_facts(context: RankContext) -> Results:
    """The stand-in's answers in a process that has it."""
    before = torch.zeros
    return {
        "installed": np.array(cpu_stand_in.install()),
        "same": np.array(torch.zeros is before),
        "device": np.array(str(torch.zeros(1, device="cuda").device)),
        "current_device": np.array(str(torch.cuda.current_device())),
        "float_type": np.array(torch.zeros(1).type()),
        "int_type": np.array(torch.zeros(1, dtype=torch.int64).type()),
        "cast": np.array(str(torch.zeros(1).type(torch.float64).dtype)),
    }


def two_worlds(context: RankContext, *, first: dict[str, int], second: dict[str, int]) -> Results:
    """The norms of an update in one layout and, in the same processes, of a first update in another."""
    store, norms = open_store(context), []
    for epoch, layout in enumerate((first, second)):
        with trainer(context, layout, small_job.trainer_settings(), store=store, epoch=epoch) as actor:
            norms.append(actor.train_minibatch(small_job.recorded_samples(), 1e-3).grad_norm)
    return {"norms": np.array(norms)}


def hang(context: RankContext) -> Results:
    signal.pause()
    return {}


def fail_on(context: RankContext, *, rank: int, others_hang: bool = False) -> Results:
    if context.rank == rank:
        raise ArithmeticError(f"rank {rank} fails as requested")
    if others_hang:
        signal.pause()
    return {}
