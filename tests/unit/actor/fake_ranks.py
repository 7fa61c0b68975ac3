"""Fake ranks of a trainer. Their weights are the list of their updates, so that a test can read the trained updates.

They reshard as the real ranks do: the prepared state stays beside the state in force until a commit or an abort.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from tests.component_bench import Changes, replied
from tidegate.checksums import file_checksum
from tidegate.codec import decode_layout, decode_sample_id
from tidegate.job import Job
from tidegate.runtime.crew import WorkerRefused
from tidegate.types import Grant, Layout, SampleId
from tidegate.v1 import types_pb2 as wire_types
from tidegate.v1 import workers_pb2 as wire

PLENTY = 1_000_000
_TOGETHER = ("train", "accumulate", "prepare_reshard", "commit_reshard", "abort_reshard", "build_ahead")
"""The calls that only members of an epoch accept."""


@dataclass(slots=True)
class State:
    """The state of one set of ranks. The weights are those of the first rank, which all ranks share."""

    layout: Layout
    ranks: tuple[int, ...]
    weights: list[str]


class FakeRank:
    """One rank; the first rank writes the snapshots. Its next `num_nonfinite` updates are not applied."""

    def __init__(self, grant: Grant, changes: Changes, permits: asyncio.Semaphore, ranks: Ranks) -> None:
        self.grant = grant
        self.worlds: list[wire.JoinWorld] = []
        self.resharded: list[str] = []
        self.prepared: State | None = None
        self.refuses = ""
        """The kind of call that the rank refuses."""
        self.hangs_in = ""
        """The kind of call in which the rank hangs once, until the caller gives up. Its peers leave the epoch."""
        self.num_refused = 0
        self.stays_in = ""
        """The kind of call in which the rank stays until it is killed."""
        self.is_staying = False
        self.is_late = False
        """Whether the rank comes too late to the next commit: its peers have left the epoch."""
        self.strays = False
        """Whether the rank's learning-rate progress differs from its peers'."""
        self.rate_factor = 1.0
        """The rate of its optimizer, divided by the requested rate."""
        self.is_in_epoch = False
        self.suspensions: list[str] = []
        """The calls of suspensions that the rank got."""
        self.is_suspended = False
        """Whether its state is in host memory alone."""
        self.built: list[wire.BuildAhead] = []
        """The layouts that were built ahead, also those that the rank died in."""
        self._ranks = ranks
        self.started: list[wire.StartActor] = []
        self.trained: list[wire.Train] = []
        """The updates, each with the samples of all its portions."""
        self.portions: list[wire.Accumulate] = []
        """The portions whose gradients are uncommitted."""
        self.carried: list[wire.Accumulate] = []
        """The portions of the reshard that is prepared."""
        self.accumulated: list[wire.Accumulate] = []
        """All portions before the last of an update, also those that were dropped."""
        self.weights: list[str] = []
        self.num_asked = 0
        self.num_nonfinite = 0
        self._changes = changes
        self._permits = permits
        self._rank = 0

    def take_seat(self, rank: int) -> None:
        self._rank = rank

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        kind = call.WhichOneof("body") or ""
        if kind == self.refuses:
            self.num_refused += 1
            self._changes.notify()
            raise WorkerRefused(f"{self.grant.gpu} does no {kind}")
        if kind == self.hangs_in:
            self.hangs_in = ""
            self._ranks.lose_epoch()
            raise TimeoutError(f"{self.grant.gpu} did not answer {kind}")
        if kind == "build_ahead":
            self.built.append(call.build_ahead)
        if kind == self.stays_in:
            self.is_staying = True
            self._changes.notify()
            await asyncio.Event().wait()
        if kind in _TOGETHER and not self.is_in_epoch:
            raise WorkerRefused(f"{self.grant.gpu} is in no epoch")
        match kind:
            case "join_world":
                self.worlds.append(call.join_world)
                self.is_in_epoch = True
                yield replied(call, wire.Started(memory_bytes=self._ranks.memory_bytes))
            case "prepare_reshard" | "commit_reshard" | "abort_reshard":
                yield self._reshard(call, kind)
            case "prepare_suspension" | "commit_suspension" | "abort_suspension":
                yield self._suspend(call, kind)
            case "build_ahead":
                assert not self.portions, "a minibatch is begun"
                self._changes.notify()
                yield replied(call, wire.BuiltAhead(is_built=self._ranks.builds, reason=self._ranks.reason))
            case "start_actor":
                yield self._start(call)
            case "warm_up":
                for step in range(1, call.warm_up.num_steps + 1):
                    self.num_asked += 1
                    self._changes.notify()
                    await self._permits.acquire()
                    self.weights.append(f"warm-up {step}")
                    progress = wire.WarmUpProgress(step=step, num_steps=call.warm_up.num_steps, loss=1.0 / step)
                    yield replied(call, progress, last=step == call.warm_up.num_steps)
            case "train":
                self.num_asked += 1
                self._changes.notify()
                await self._permits.acquire()
                yield self._train(call)
            case "accumulate":
                self.num_asked += 1
                self._changes.notify()
                await self._permits.acquire()
                yield self._accumulate(call)
            case "publish":
                yield self._publish(call)
            case "save":
                path = _written(Path(call.save.folder) / f"rank{self._rank}", self.weights)
                saved = wire.SavedShard(file=path.name, size_bytes=path.stat().st_size, checksum=file_checksum(path))
                yield replied(call, saved)

            case "export":
                _written(Path(call.export.folder) / "of", [Path(call.export.checkpoint_dir).name])
                yield replied(call)

    def _start(self, call: wire.WorkerCall) -> wire.WorkerReply:
        if self.member not in call.start_actor.ranks:
            return replied(call, wire.Started())
        self.started.append(call.start_actor)
        self._rank = list(call.start_actor.ranks).index(self.member)
        if call.start_actor.checkpoint_dir:
            self.weights = json.loads((Path(call.start_actor.checkpoint_dir) / f"rank{self._rank}").read_text())
        return replied(call, wire.Started())

    @property
    def lr_mark(self) -> str:
        """The mark of the learning-rate progress of its weights."""
        if self.strays and self.trained:
            return "9 steps after 9 updates"
        return self._ranks.marks.get(self.weights[-1], "") if self.weights else ""

    @property
    def _rate(self) -> float:
        """The optimizer's rate in the last applied update."""
        return self._ranks.rates.get(self.weights[-1], 0.0) * self.rate_factor if self.weights else 0.0

    @property
    def member(self) -> int:
        world = self.worlds[-1]
        return world.members[world.rendezvous.rank]

    def _reshard(self, call: wire.WorkerCall, kind: str) -> wire.WorkerReply:
        self.resharded.append(kind)
        if kind == "prepare_reshard":
            self.carried = list(call.prepare_reshard.portions)
            self._check_carried()
        self.portions = list(self.carried)
        self._changes.notify()
        match kind:
            case "prepare_reshard":
                asked = call.prepare_reshard
                assert set(asked.ranks) <= set(self.worlds[-1].members), "who is to train is no member of the epoch"
                source = self._ranks.trained()
                self.prepared = State(decode_layout(asked.layout), tuple(asked.ranks), list(source.weights))
                report = wire_types.ReshardReport(certificate=str(len(source.weights)), moved_bytes=7)
                report.seconds["transfer"] = 0.5
                return replied(call, report)
            case "commit_reshard":
                assert self.prepared is not None, "nothing is prepared"
                ranks, self.weights = self.prepared.ranks, self.prepared.weights
                self._rank = ranks.index(self.member) if self.member in ranks else PLENTY
                self.prepared, self.is_suspended = None, False
                self.is_in_epoch, self.is_late = not self.is_late, False
                return replied(call, wire.Committed(in_epoch=self.is_in_epoch))
        self.prepared = None
        return replied(call)

    def _check_carried(self) -> None:
        """A rank that trained portions has their gradients, or they are lost. One that comes has none."""
        has_trained = any(portion in self.accumulated for portion in self.carried)
        if self.carried and self.portions != self.carried and (self.portions or has_trained):
            raise WorkerRefused(f"{self.grant.gpu} has {len(self.portions)} portions, not these {len(self.carried)}")

    def _accumulate(self, call: wire.WorkerCall) -> wire.WorkerReply:
        portion = call.accumulate
        if self.lr_mark != portion.lr_before:
            raise WorkerRefused(f"{self.grant.gpu} is not at {portion.lr_before!r}")
        self._check_portions(portion.update_id, portion.num_before)
        self.portions.append(portion)
        self.accumulated.append(portion)
        self._changes.notify()
        return replied(call)

    def _check_portions(self, update_id: str, num_before: int) -> None:
        if num_before == 0:
            self.portions.clear()
        if [portion.update_id for portion in self.portions] != [update_id] * num_before:
            raise WorkerRefused(
                f"{self.grant.gpu} holds {len(self.portions)} portions, not {num_before} of {update_id}"
            )

    def _suspend(self, call: wire.WorkerCall, kind: str) -> wire.WorkerReply:
        if not self.worlds:
            raise WorkerRefused(f"{self.grant.gpu} has joined no world")
        self.suspensions.append(kind)
        self._changes.notify()
        if kind != "commit_suspension":
            return replied(call)
        assert "prepare_suspension" in self.suspensions, "nothing is in host memory"
        self.is_suspended = True
        return replied(call, wire.Suspended(freed_bytes=5, held_bytes=3, kept_bytes=2))

    def _train(self, call: wire.WorkerCall) -> wire.WorkerReply:
        assert not self.is_suspended, "its weights are in host memory alone"
        if call.train.update_id in self.weights:
            known = any(train.update_id == call.train.update_id for train in self.trained)
            report = wire.UpdateReport(update_id=call.train.update_id, committed=True, loss=float("nan"))
            report.lr_mark = self.lr_mark
            report.learning_rates.append(self._rate)
            if known:
                report.loss = 0.25
                report.metrics["kl"] = 0.125
            return replied(call, report)
        if self.lr_mark != call.train.lr_before:
            raise WorkerRefused(f"{self.grant.gpu} is not at {call.train.lr_before!r}")
        self._check_portions(call.train.update_id, call.train.num_portions)
        whole = wire.Train()
        whole.CopyFrom(call.train)
        parts: list[wire.Accumulate | wire.Train] = [*self.portions, call.train]
        del whole.samples[:], whole.bundle_sizes[:]
        whole.samples.extend(sample for part in parts for sample in part.samples)
        whole.bundle_sizes.extend(size for part in parts for size in part.bundle_sizes)
        self.portions.clear()
        self.trained.append(whole)
        committed = self.num_nonfinite == 0
        self.num_nonfinite = max(0, self.num_nonfinite - 1)
        if committed:
            self.weights.append(call.train.update_id)
            self._ranks.marks[call.train.update_id] = call.train.lr_after
            self._ranks.rates[call.train.update_id] = call.train.learning_rate
        report = wire.UpdateReport(
            update_id=call.train.update_id,
            committed=committed,
            loss=0.25 if committed else float("nan"),
            grad_norm=2.0 if committed else float("inf"),
            metrics={"kl": 0.125},
            lr_mark=self.lr_mark,
            learning_rates=[self._rate],
        )
        self._changes.notify()
        return replied(call, report)

    def _publish(self, call: wire.WorkerCall) -> wire.WorkerReply:
        if self._rank:
            return replied(call, wire.PublishedShard())
        path = _written(Path(call.publish.folder) / "rank0", self.weights)
        published = wire.PublishedShard(file=path.name, size_bytes=path.stat().st_size, checksum=file_checksum(path))
        published.weights_sum = len(self.weights)
        return replied(call, published)


class Ranks:
    """All started ranks, the newest of each GPU. Each update of a rank takes one of its `permits`."""

    memory_bytes = 1 << 20
    builds = True
    """Whether layouts can be built ahead, and else the reason."""
    reason = ""

    def __init__(self, *, num_permits: int = PLENTY) -> None:
        self.of: dict[str, FakeRank] = {}
        self.permits: dict[str, asyncio.Semaphore] = {}
        self.marks: dict[str, str] = {}
        """The learning-rate progress after each applied update."""
        self.rates: dict[str, float] = {}
        """The rate of each applied update."""
        self._num_permits = num_permits

    def make(self, job: Job, grant: Grant, changes: Changes) -> FakeRank:
        self.permits[grant.gpu] = asyncio.Semaphore(self._num_permits)
        self.of[grant.gpu] = FakeRank(grant, changes, self.permits[grant.gpu], self)
        changes.notify()
        return self.of[grant.gpu]

    def trained(self) -> FakeRank:
        """A rank with the newest weights."""
        return max(self.of.values(), key=lambda rank: len(rank.weights))

    def lose_epoch(self) -> None:
        """Take all ranks out of the epoch, as when one of them gives no answer for too long."""
        for rank in self.of.values():
            rank.is_in_epoch = False

    def fail_next(self, count: int) -> None:
        for rank in self.of.values():
            rank.num_nonfinite = count

    def same(self) -> FakeRank:
        """Any rank, after a check that all ranks got the same updates."""
        first, *others = self.of.values()
        for other in others:
            assert [train.SerializeToString(deterministic=True) for train in other.trained] == [
                train.SerializeToString(deterministic=True) for train in first.trained
            ]
            assert other.weights == first.weights
        return first

    def minibatches(self) -> list[list[SampleId]]:
        """The samples of each update, in order."""
        return [[decode_sample_id(sample.id) for sample in train.samples] for train in self.same().trained]

    def prompts(self) -> list[list[int]]:
        """The prompts of each update, in order, each once."""
        return [list(dict.fromkeys(sample.prompt for sample in samples)) for samples in self.minibatches()]


def _written(path: Path, weights: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(weights))
    return path
