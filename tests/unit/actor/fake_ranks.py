"""Ranks of a trainer whose weights are the list of updates that made them, so that a test can read what was trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

from tests.component_bench import Changes, replied
from tidegate.checksums import file_checksum
from tidegate.codec import decode_sample_id
from tidegate.job import Job
from tidegate.types import Grant, SampleId
from tidegate.v1 import workers_pb2 as wire

PLENTY = 1_000_000


class FakeRank:
    """One rank; the first writes the snapshots. Of its updates, as many as `num_nonfinite` says come to nothing."""

    def __init__(self, grant: Grant, changes: Changes, permits: asyncio.Semaphore) -> None:
        self.grant = grant
        self.started: list[wire.StartActor] = []
        self.trained: list[wire.Train] = []
        self.weights: list[str] = []
        self.num_asked = 0
        self.num_nonfinite = 0
        self._changes = changes
        self._permits = permits
        self._rank = 0

    def take_seat(self, rank: int) -> None:
        self._rank = rank

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        match call.WhichOneof("body"):
            case "start_actor":
                yield self._start(call)
            case "warm_up":
                for step in range(1, call.warm_up.num_steps + 1):
                    self.num_asked += 1
                    self._changes.tell()
                    await self._permits.acquire()
                    self.weights.append(f"warm-up {step}")
                    progress = wire.WarmUpProgress(step=step, num_steps=call.warm_up.num_steps, loss=1.0 / step)
                    yield replied(call, progress, last=step == call.warm_up.num_steps)
            case "train":
                self.num_asked += 1
                self._changes.tell()
                await self._permits.acquire()
                yield self._train(call)
            case "publish":
                yield self._publish(call)
            case "save":
                path = _written(Path(call.save.folder) / f"rank{self._rank}", self.weights)
                saved = wire.SavedShard(file=path.name, size_bytes=path.stat().st_size, checksum=file_checksum(path))
                yield replied(call, saved)

    def _start(self, call: wire.WorkerCall) -> wire.WorkerReply:
        self.started.append(call.start_actor)
        self._rank = call.start_actor.rendezvous.rank
        if call.start_actor.checkpoint_dir:
            self.weights = json.loads((Path(call.start_actor.checkpoint_dir) / f"rank{self._rank}").read_text())
        return replied(call, wire.Started())

    def _train(self, call: wire.WorkerCall) -> wire.WorkerReply:
        self.trained.append(call.train)
        committed = self.num_nonfinite == 0
        self.num_nonfinite = max(0, self.num_nonfinite - 1)
        if committed:
            self.weights.append(call.train.update_id)
        report = wire.UpdateReport(
            update_id=call.train.update_id,
            committed=committed,
            loss=0.25 if committed else float("nan"),
            grad_norm=2.0 if committed else float("inf"),
            metrics={"kl": 0.125},
        )
        self._changes.tell()
        return replied(call, report)

    def _publish(self, call: wire.WorkerCall) -> wire.WorkerReply:
        if self._rank:
            return replied(call, wire.PublishedShard())
        path = _written(Path(call.publish.folder) / "rank0", self.weights)
        published = wire.PublishedShard(file=path.name, size_bytes=path.stat().st_size, checksum=file_checksum(path))
        return replied(call, published)


class Ranks:
    """All that started, the newest of each GPU. `permits` are those of every rank's updates."""

    def __init__(self, *, num_permits: int = PLENTY) -> None:
        self.of: dict[str, FakeRank] = {}
        self.permits: dict[str, asyncio.Semaphore] = {}
        self._num_permits = num_permits

    def make(self, job: Job, grant: Grant, changes: Changes) -> FakeRank:
        self.permits[grant.gpu] = asyncio.Semaphore(self._num_permits)
        self.of[grant.gpu] = FakeRank(grant, changes, self.permits[grant.gpu])
        return self.of[grant.gpu]

    def fail_next(self, count: int) -> None:
        for rank in self.of.values():
            rank.num_nonfinite = count

    def same(self) -> FakeRank:
        """Any of them, once it is sure that all were asked for the same."""
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
