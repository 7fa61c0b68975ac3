"""The rank processes of the tests of deaths. Rank 0 serves the store and publishes the epochs; the others train.

A member goes through `places`, with some updates in each, in the order of its updates. When it loses a peer, it waits
for the next epoch and continues there, in `refuge` on the first survivors that the layout needs. One member kills
itself.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from tests.integration.elastic.trainer_ranks import LEARNING_RATE, SEED, adam, minibatch, provider
from tests.integration.elastic.world_ranks import CPU, TIMEOUT_S, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.coordinator import Coordinator, next_membership
from tidegate.elastic.epoch.world import PeerLost, World
from tidegate.elastic.minibatch import NextTokens, RankPlace
from tidegate.elastic.model import compat
from tidegate.elastic.plan.recovery import StateLost
from tidegate.elastic.reshard_preparation import ReshardAborted
from tidegate.elastic.settings import CopyTo, ElasticSettings
from tidegate.elastic.state.files import StateFiles
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.schedule import OnLogits
from tidegate.types import Layout

FORWARD = "forward"
APPLYING = "applying"
FIRST_PORTION = minibatch(100)


@dataclass(frozen=True, slots=True)
class Script:
    places: list[dict[str, Any]]
    refuge: dict[str, int]
    victim: int | None = None
    point: str = ""
    """The point of the first reshard with all members alive; or FORWARD or APPLYING of the update `dies_in`."""
    dies_in: int = -1
    shared: bool = True
    """Whether the tensors are in the host's shared memory, as they are on CPUs."""
    hosted: bool = False
    """Whether a state that is not shared has a folder in host memory, as it has on a device."""
    copies: str = CopyTo.NOWHERE
    copy_every: int = 1
    saves_after: int | None = None
    """The number of updates after which the members save."""
    late: bool = False
    """Whether switches are proved late."""
    carries: bool = False
    """Whether each minibatch has a first portion, which a reshard before it carries."""

    @property
    def num_updates(self) -> int:
        return sum(place["updates"] for place in self.places)


def trains_on(context: RankContext, **script: Any) -> Results:
    store = open_store(context)
    if context.rank == 0:
        return _coordinate(store, context.world_size)
    store.set(f"pid/{context.rank}", str(os.getpid()))
    found = _Member(context.rank, store, Script(**script)).run()
    store.set(f"done/{context.rank}", "")
    return found


def _coordinate(store: TCPStore, world_size: int) -> Results:
    """The files that are left in the folder, and whether the reshard during the death was committed: 1, 0, or -1 for
    none.
    """
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    store.set("folder", str(folder))
    alive = {os.pidfd_open(int(store.get(f"pid/{rank}"))): rank for rank in range(1, world_size)}
    poll = select.poll()
    for pidfd in alive:
        poll.register(pidfd, select.POLLIN)
    coordinator = Coordinator(store)
    members = coordinator.publish(sorted(alive.values())).members
    store.set("members", " ".join(map(str, members)))
    committed = -1
    try:
        while alive:
            for pidfd, _ in poll.poll():
                rank = alive.pop(pidfd)
                poll.unregister(pidfd)
                os.close(pidfd)
                if not store.check([f"done/{rank}"]) and alive:
                    outcome = coordinator.end(f"member {rank} died")
                    committed = -1 if outcome is None else int(outcome.committed)
                    coordinator.publish(sorted(alive.values()))
        return {"leftover": np.array([path.name for path in folder.glob("epoch*")]), "committed": np.array(committed)}
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Fatal:
    """A minibatch in whose forward pass this process dies."""

    tokens: NextTokens
    die: Callable[[], None]

    @property
    def num_samples(self) -> int:
        return self.tokens.num_samples

    @property
    def num_sums(self) -> int:
        return self.tokens.num_sums

    @property
    def scale(self) -> float:
        return self.tokens.scale

    def of_rank(self, place: RankPlace) -> tuple[Sequence[TokenBatch], OnLogits]:
        batches, _ = self.tokens.of_rank(place)

        def on_logits(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
            self.die()
            raise AssertionError("a killed process still runs")

        return batches, on_logits


@dataclass(slots=True)
class _Member:
    me: int
    store: TCPStore
    script: Script
    updates: dict[int, tuple[float, float]] = field(default_factory=dict)
    certificates: dict[int, str] = field(default_factory=dict)
    """The certificate of each reshard, by number of updates."""
    meshes: list[str] = field(default_factory=list)
    """The layout and ranks of this member each time it lost a peer."""
    reports: list[str] = field(default_factory=list)
    """For each reshard after a death: the lost members, the origins of their state, and the updates to redo."""
    resumed_at: float = float("nan")
    error: str = ""
    trainer: ElasticTrainer | None = None
    stale: list[str] = field(default_factory=list)

    def run(self) -> Results:
        epoch = 0
        while True:
            membership = next_membership(self.store, after=epoch, timeout_s=TIMEOUT_S)
            epoch = membership.epoch
            world = None
            try:
                world = World.join(membership, me=self.me, store=self.store, device=CPU, timeout_s=TIMEOUT_S)
                self._take_part(world)
                world.leave()
                break
            except (PeerLost, ReshardAborted, DistStoreError):
                if self.trainer is not None:
                    self.meshes.append(str(self.trainer.mesh and (self.trainer.mesh.layout, self.trainer.mesh.ranks)))
                if world is not None:
                    world.leave(abort=True)
        if self.trainer is not None:
            self.trainer.close()
        return self._found()

    def _take_part(self, world: World) -> None:
        if self.trainer is None:
            folder = Path(self.store.get("folder").decode())
            settings = ElasticSettings(
                seed=SEED,
                shared_memory=folder if self.script.shared else None,
                host_memory=folder if self.script.hosted else None,
                timeout_s=TIMEOUT_S,
                copies=CopyTo(self.script.copies),
                copy_every=self.script.copy_every,
                proves_late=self.script.late,
            )
            self.trainer = ElasticTrainer(provider(), adam(), world=world, settings=settings, on_point=self._on_point)
        else:
            self.trainer.rejoin(world)
        trainer = self.trainer
        if trainer.location is None:
            self._walk(trainer)
            return
        try:
            report = trainer.reshard(Layout(**self.script.refuge))
            self.certificates[report.num_updates] = report.certificate
            self.reports.append(
                f"{report.lost} {dict(report.restored)} {report.redone_updates} {report.redone_samples}"
            )
        except StateLost as error:
            self.error = str(error)
            self._resume(trainer)
        if self.script.shared:
            folder = Path(self.store.get("folder").decode())
            world.barrier(world.membership.members)
            self.stale = [
                path.name for path in folder.glob("epoch*") if f"epoch{world.membership.epoch}-" not in path.name
            ]
        for update in range(trainer.progress.num_updates, self.script.num_updates):
            self._train(trainer, update)

    def _save(self, trainer: ElasticTrainer) -> None:
        folder = Path(self.store.get("folder").decode()) / "checkpoint"
        has_state = trainer.location is not None and trainer.location.state is not None
        written = checkpoints.save(trainer, folder, str(self.me)) if has_state else None
        self.store.set(f"saved/{self.me}", "" if written is None else written.checksum)

    def _resume(self, trainer: ElasticTrainer) -> None:
        members = [int(name) for name in self.store.get("members").decode().split()]
        saved = {str(member): self.store.get(f"saved/{member}").decode() for member in members}
        files = StateFiles(
            Path(self.store.get("folder").decode()) / "checkpoint", {name: text for name, text in saved.items() if text}
        )
        checkpoints.start_from(trainer, files, Layout(**self.script.refuge))

    def _walk(self, trainer: ElasticTrainer) -> None:
        first = self.script.places[0]
        trainer.start(Layout(**first["layout"]), ranks=first["ranks"])
        update = 0
        for place in self.script.places:
            if place is not first:
                portions = [FIRST_PORTION] if self.script.carries else []
                for portion in portions:
                    trainer.accumulate(portion)
                report = trainer.reshard(Layout(**place["layout"]), ranks=place["ranks"], portions=portions)
                self.certificates[report.num_updates] = report.certificate
            for _ in range(place["updates"]):
                self._train(trainer, update)
                update += 1
                if update == self.script.saves_after:
                    self._save(trainer)

    def _train(self, trainer: ElasticTrainer, update: int) -> None:
        tokens = minibatch(update)
        fatal = update == self.script.dies_in and self.me == self.script.victim and trainer.world.membership.epoch == 1
        if fatal and self.script.point == APPLYING:
            for link in compat.links(trainer.state.skeleton.optimizer):
                link.optimizer.register_step_post_hook(lambda *_: self._die())
        is_forward = fatal and self.script.point == FORWARD
        if self.script.carries and not trainer.portions:
            trainer.accumulate(FIRST_PORTION)
        done = trainer.train_minibatch(Fatal(tokens, self._die) if is_forward else tokens, LEARNING_RATE)
        if done is not None:
            self.updates[update] = (done.sums[0], done.grad_norm)
            if trainer.world.membership.epoch > 1 and np.isnan(self.resumed_at):
                self.resumed_at = time.monotonic()

    def _on_point(self, point: str) -> None:
        is_first = self.trainer is not None and self.trainer.world.membership.epoch == 1
        if is_first and self.me == self.script.victim and point == self.script.point:
            self._die()

    def _die(self) -> None:
        # The monotonic clock is common to all processes of the machine.
        self.store.set("killed_at", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def _found(self) -> Results:
        killed_at = float(self.store.get("killed_at")) if self.store.check(["killed_at"]) else float("nan")
        return {
            "numbers": np.array(sorted(self.updates)),
            "updates": np.array([self.updates[number] for number in sorted(self.updates)]),
            "certified": np.array(sorted(self.certificates)),
            "certificates": np.array([self.certificates[number] for number in sorted(self.certificates)]),
            "meshes": np.array(self.meshes),
            "reports": np.array(self.reports),
            "error": np.array(self.error),
            "stale": np.array(self.stale),
            "seconds": np.array(self.resumed_at - killed_at),
        }
