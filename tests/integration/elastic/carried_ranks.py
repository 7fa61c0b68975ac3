"""The rank processes of the tests of portions whose gradients a reshard carries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.elastic.refusal_ranks import FailingBuild
from tests.integration.elastic.suspension_ranks import gradient_bytes, suspend
from tests.integration.elastic.trainer_ranks import LEARNING_RATE, SEED, VOCAB, holds_state, logical_state, started
from tests.ranks import RankContext, Results
from tidegate.elastic.agreement import PortionsRefused
from tidegate.elastic.carry.transport import TransferFailed
from tidegate.elastic.minibatch import NextTokens
from tidegate.elastic.reshard_preparation import ReshardAborted
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.types import Layout

NUM_SEQUENCES = 4
"""The sequences of a portion: one each for as many replicas as any test has."""
BUILD = "build"
"""While the new layout is built."""
ELSEWHERE = {"layout": {"dp": 3}}
"""A layout in which no test trains."""


@dataclass(frozen=True, slots=True)
class Part(NextTokens):
    """A portion of a minibatch whose gradients are scaled with the last one."""

    @property
    def scale(self) -> float:
        return 0.25


def portion(number: int) -> Part:
    """The same tokens in every layout."""
    draw = np.random.default_rng((SEED, number))
    sequences = [draw.integers(0, VOCAB, size=int(draw.integers(9, 17))).tolist() for _ in range(NUM_SEQUENCES)]
    return Part(sequences, VOCAB, limits=BatchLimits(max_sequences=1, pad_multiple=16))


class Walk:
    """A trainer through portions, reshards and updates. The caller's `pending` are the portions of the open update."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self.trainer = trainer
        self.pending: list[Part] = []
        self.updates: list[tuple[float, float]] = []
        self.num_portions = 0

    def accumulate(self, count: int) -> None:
        for _ in range(count):
            self.pending.append(self._next())
            self.trainer.accumulate(self.pending[-1])
        self.check()

    def update(self) -> None:
        update = self.trainer.train_minibatch(self._next(), LEARNING_RATE)
        self.pending = []
        self.updates.append((update.sums[0], update.grad_norm) if update else (np.nan, np.nan))
        self.check()

    def carry(self, place: dict[str, Any]) -> tuple[int, int, int]:
        """Returns the portions, the moved bytes and the minimum of the report."""
        report = self.trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"), portions=self.pending)
        self.check()
        return report.num_portions, report.moved_bytes, report.minimum_bytes

    def check(self) -> None:
        """The ranks of the layout have the pending portions, and nobody else has any."""
        assert self.trainer.portions == (tuple(self.pending) if holds_state(self.trainer) else ())

    def _next(self) -> Part:
        self.num_portions += 1
        return portion(self.num_portions)


@contextmanager
def walking(context: RankContext, place: dict[str, Any], **options: Any) -> Iterator[Walk]:
    with started(context, Layout(**place["layout"]), place.get("ranks"), **options) as trainer:
        yield Walk(trainer)


def carried(context: RankContext, *, places: list[dict[str, Any]], visited: bool = False, **options: Any) -> Results:
    """`portions` in each place, an update in the last one, and the update of a whole minibatch there.

    `visited`: each place was there before the first portion. `moments`: the first ones after the first update.
    `files`: this member's in shared memory: within a reshard with portions, and within one without; after the updates.
    """
    first, *others = places
    counts: list[int] = []

    def on_point(point: str) -> None:
        if point == "certified":
            counts.append(num_files(context))

    with walking(context, first, on_point=on_point, **options) as walk:
        for place in [*others, first] if visited else []:
            walk.carry(place)
        walk.accumulate(first["portions"])
        reports = []
        for place in others:
            reports.append(walk.carry(place))
            walk.accumulate(place["portions"])
        walk.update()
        moments = {key: bits for key, bits in logical_state(walk.trainer).items() if key.endswith("/exp_avg")}
        walk.update()
        walk.carry(ELSEWHERE)
        files = [*counts[-2:], num_files(context)]
    return {
        "updates": np.array(walk.updates),
        "reports": np.array(reports),
        "files": np.array(files),
    } | {f"moments/{key}": bits for key, bits in moments.items()}


def num_files(context: RankContext) -> int:
    """This member's files in shared memory that have pages."""
    return sum(path.stat().st_blocks > 0 for path in context.tmpfs.glob(f"*-member{context.rank}-*"))


def carrying_often(context: RankContext, *, places: list[dict[str, Any]]) -> Results:
    """This member's descriptors, files with pages, and mapped files, after a few reshards with portions and many."""
    first, *_ = places
    measures = []
    with walking(context, first) as walk:
        walk.accumulate(1)
        for number in range(1, 17):
            walk.carry(places[number % len(places)])
            if number % 8 == 0:
                mapped = {
                    line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/epoch" in line
                }
                measures.append([len(os.listdir("/proc/self/fd")), num_files(context), len(mapped)])
        walk.update()
    early, late = measures
    return {"early": np.array(early), "late": np.array(late)}


def failing(context: RankContext, *, point: str, home: dict[str, Any], target: dict[str, Any]) -> Results:
    """Member 1 fails at a point of a reshard with two portions, or at BUILD. One more portion, and the update, at home.

    `home` is the layout in which a FailingBuild does not fail.
    """
    failures: list[Exception] = [TransferFailed("no bytes")] if context.rank == 1 else []

    def on_point(name: str) -> None:
        if name == point and failures:
            raise failures.pop()

    def change(provider: GptProvider) -> GptProvider:
        if point != BUILD:
            return provider
        return FailingBuild(provider.config, provider.padded_vocab, provider.dtype, failures=failures)

    with walking(context, home, on_point=on_point, change=change) as walk:
        walk.accumulate(2)
        error = _error_of(partial(walk.carry, target), (ReshardAborted, TransferFailed))
        walk.check()
        walk.accumulate(1)
        walk.update()
        walk.update()
        return {"error": np.array(error), "updates": np.array(walk.updates)}


def aborted(context: RankContext, *, home: dict[str, Any], target: dict[str, Any]) -> Results:
    """A prepared reshard with two portions is aborted, and made after one more."""
    with walking(context, home) as walk:
        walk.accumulate(2)
        mesh = walk.trainer.mesh_of(Layout(**target["layout"]), target.get("ranks"))
        prepared = walk.trainer.prepare(mesh, name="a", portions=walk.pending)
        walk.check()
        walk.trainer.abort(prepared)
        walk.check()
        walk.accumulate(1)
        walk.carry(target)
        walk.update()
        walk.update()
        return {"updates": np.array(walk.updates), "files": np.array(num_files(context))}


def refused(context: RankContext, *, home: dict[str, Any], target: dict[str, Any], shards: int | None) -> Results:
    """Requests that carry other portions than the two that are there. One more portion, and the update, at home."""
    with walking(context, home, shards=shards) as walk:
        walk.accumulate(2)
        errors = []
        for wrong in (walk.pending[:1], [*walk.pending, portion(9)]):
            go = partial(walk.trainer.reshard, Layout(**target["layout"]), portions=wrong)
            errors.append(_error_of(go, PortionsRefused))
            walk.check()
        walk.accumulate(1)
        walk.update()
        walk.update()
        return {"errors": np.array(errors), "updates": np.array(walk.updates)}


def dropped(context: RankContext, *, home: dict[str, Any], target: dict[str, Any]) -> Results:
    """Portions that one reshard carries and the next one does not; and those of which `drop_portions` is told."""
    with walking(context, home) as walk:
        walk.accumulate(1)
        walk.carry(target)
        walk.trainer.reshard(Layout(**home["layout"]), ranks=home.get("ranks"))
        walk.pending = []
        walk.check()
        walk.accumulate(1)
        walk.carry(target)
        walk.trainer.drop_portions()
        walk.pending = []
        walk.check()
        walk.update()
        return {"updates": np.array(walk.updates), "files": np.array(num_files(context))}


def suspended(context: RankContext, *, home: dict[str, Any], target: dict[str, Any]) -> Results:
    """Carried portions when the job is suspended, and the update of a whole minibatch after it."""
    with walking(context, home) as walk:
        walk.accumulate(1)
        walk.carry(target)
        suspend(walk.trainer)
        walk.pending = []
        walk.check()
        num_kept = num_files(context)
        walk.trainer.reshard(Layout(**home["layout"]))
        walk.update()
        return {"updates": np.array(walk.updates), "files": np.array(num_kept)}


def buffers_in_reshards(context: RankContext, *, places: list[dict[str, Any]]) -> Results:
    """The bytes of this member's gradient buffers during reshards with the same portion, one after the other."""
    trainers: list[ElasticTrainer] = []
    in_buffers: list[int] = []

    def on_point(point: str) -> None:
        if point == "transferring" and trainers and holds_state(trainers[0]):
            in_buffers.append(gradient_bytes(trainers[0].state.skeleton))

    first, *others = places
    with walking(context, first, on_point=on_point) as walk:
        walk.accumulate(1)
        before = gradient_bytes(walk.trainer.state.skeleton) if holds_state(walk.trainer) else 0
        trainers.append(walk.trainer)
        for place in others:
            walk.carry(place)
        walk.update()
        return {"before": np.array(before), "during": np.array(in_buffers), "updates": np.array(walk.updates)}


def fixed(context: RankContext, *, place: dict[str, Any], first: int) -> Results:
    """The update of one whole minibatch, whose number is `first`."""
    with walking(context, place) as walk:
        walk.num_portions = first - 1
        walk.update()
        return {"updates": np.array(walk.updates)}


def _error_of(call: Callable[[], object], kinds: type[Exception] | tuple[type[Exception], ...]) -> str:
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""
