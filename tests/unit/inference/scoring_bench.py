"""The inference's real lead over ranks that score by a rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.inference.lead import InferenceLead
from tests.component_bench import JOB, Bench, Changes, bench, loaded, replied, snapshot
from tests.watched_samples import WatchedSamples, generated_group
from tidegate.codec import encode_grants, encode_layout
from tidegate.job import Job
from tidegate.ports.bus import Stage
from tidegate.runtime.crew import WorkerRefused
from tidegate.types import Grant, Layout, Role
from tidegate.v1 import commands_pb2, samples_pb2
from tidegate.v1 import workers_pb2 as wire

FIRST, SECOND = "n0/3", "n1/3"
SLOTS = ("n0/0", "n0/1", "n0/2", FIRST, "n1/2", SECOND)
"""All GPUs of the job."""
REFERENCE_IS_AT = -100.0
PLENTY = 1_000_000
ONE_COPY: dict[str, Any] = {"inference": {"layout": {"tp": 2, "dp": 1}}}


class FakeRank:
    """Scores its part of the samples, one call per permit: -(version + 1) per token, and -100 for the reference.

    It joins its world once `may_start` is set. `starts` has what it was asked to be: at rest or at work, in which
    world, and whether it had to join that. `asked` has (prompt, draw) of the samples of each call to score.
    """

    def __init__(self, grant: Grant, changes: Changes, permits: asyncio.Semaphore, may_start: asyncio.Event) -> None:
        self.grant = grant
        self._may_start = may_start
        self.starts: list[tuple[str, str, bool]] = []
        self.memory_bytes = 1 << 20
        self.scored: list[tuple[int, ...]] = []
        self.asked: list[list[tuple[int, int]]] = []
        self.num_asked = 0
        self.loads: list[tuple[int, bool]] = []
        self._permits = permits
        self._changes = changes
        self._rank, self._world_size = 0, 1
        self._world = ""

    @property
    def version(self) -> int | None:
        return next((version for version, reference in reversed(self.loads) if not reference), None)

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        match call.WhichOneof("body"):
            case "start_scorer":
                self._changes.notify()
                start = call.start_scorer
                if not start.stands_by:
                    await self._may_start.wait()
                self._start(start)
                yield replied(call, wire.Started(memory_bytes=self.memory_bytes, held_bytes=7))
            case "load_shards":
                self.loads.append((call.load_shards.version, call.load_shards.reference))
                yield loaded(call)
            case "score":
                self.num_asked += 1
                self.asked.append(
                    [(sample.id.prompt, sample.id.draw) for group in call.score.groups for sample in group.samples]
                )
                self._changes.notify()
                await self._permits.acquire()
                groups = [self._score(group) for group in call.score.groups]
                self.scored.append(tuple(group.prompt for group in groups))
                yield replied(call, wire.Scored(groups=groups))

    def _start(self, start: wire.StartScorer) -> None:
        joins = start.world != self._world
        if joins and start.world and not start.HasField("rendezvous"):
            raise WorkerRefused(f"not in {start.world}")
        if joins:
            self._world, self._rank, self._world_size = (
                start.world,
                start.rendezvous.rank,
                start.rendezvous.world_size,
            )
        if start.stands_by:
            self.loads = []
        self.starts.append(("at rest" if start.stands_by else "at work", start.world, joins))
        self._changes.notify()

    def _score(self, group: samples_pb2.SampleGroup) -> samples_pb2.SampleGroup:
        assert group.version == self.version, "asked for the log-probabilities of another version"
        has_reference = any(reference for _, reference in self.loads)
        samples = [
            samples_pb2.Sample(
                id=sample.id,
                old_log_probs=[-float(group.version + 1)] * len(sample.response_tokens),
                reference_log_probs=[REFERENCE_IS_AT] * len(sample.response_tokens) if has_reference else [],
            )
            for number, sample in enumerate(group.samples)
            if number % self._world_size == self._rank
        ]
        return samples_pb2.SampleGroup(prompt=group.prompt, samples=samples)


class Scoring:
    """The bench with its ranks (the newest of each GPU) and the watched sample stream."""

    def __init__(self, *, num_permits: int) -> None:
        self.ranks: dict[str, FakeRank] = {}
        self.permits = {gpu: asyncio.Semaphore(num_permits) for gpu in SLOTS}
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.bench: Bench[InferenceLead, FakeRank]

    @property
    def watch(self) -> WatchedSamples:
        assert isinstance(self.bench.samples, WatchedSamples)
        return self.bench.samples

    def make(self, job: Job, grant: Grant, changes: Changes) -> FakeRank:
        self.ranks[grant.gpu] = FakeRank(grant, changes, self.permits[grant.gpu], self.may_start)
        return self.ranks[grant.gpu]

    def permit(self, *gpus: str, count: int = 100) -> None:
        for gpu in gpus or self.permits:
            for _ in range(count):
                self.permits[gpu].release()

    def new_lead(self, *commands: Any) -> InferenceLead:
        lead = self.bench.new_lead()
        for command in commands:
            lead.take(command)
        return lead

    def load(self, version: int, *, incarnation: int = 1) -> commands_pb2.LoadWeightsRequest:
        """For all members, as a scheduler names them."""
        header = self.bench.header(incarnation=incarnation)
        header.members.extend(encode_grants(self.bench.grants()))
        return commands_pb2.LoadWeightsRequest(header=header, weights=snapshot(version, incarnation=incarnation))

    def leave(self, *gpus: str, transition: str = "shrink", term: int = 1) -> commands_pb2.ScaleDownRequest:
        """The GPUs leave, under grants of the term, and the others stay."""
        stay = [grant for grant in self.bench.grants() if grant.gpu not in gpus]
        return commands_pb2.ScaleDownRequest(
            header=self.bench.header(transition=transition),
            grants=encode_grants([grant for grant in self.bench.grants(term=term) if grant.gpu in gpus]),
            members=encode_grants(stay),
            layout=encode_layout(Layout(dp=max(1, len(stay)))),
        )

    def come(self, gpu: str, *, term: int = 1, **fields: Any) -> commands_pb2.ScaleUpRequest:
        """A copy on the GPU comes to those that work."""
        (coming,) = [grant for grant in self.bench.grants(term=term) if grant.gpu == gpu]
        others = [grant for grant in self.bench.grants() if grant.gpu != gpu]
        return self.bench.scale_up([coming], members=sorted([*others, coming]), **fields)

    @property
    def batches(self) -> dict[str, list[tuple[int, ...]]]:
        """The prompts of each call that was answered, by GPU."""
        return {gpu: rank.scored for gpu, rank in self.ranks.items()}

    def scored(self) -> list[int]:
        return sorted(prompt for batches in self.batches.values() for batch in batches for prompt in batch)

    async def until_asked(self, **num_calls: int) -> None:
        """Waits until the first and the second rank have got so many calls."""
        gpus = {"first": FIRST, "second": SECOND}
        await self.bench.changes.until(
            lambda: all(
                gpus[name] in self.ranks and self.ranks[gpus[name]].num_asked >= num for name, num in num_calls.items()
            )
        )

    async def generated(self, prompts: Sequence[int], **fields: Any) -> None:
        for prompt in prompts:
            await self.bench.bus.samples.publish(Stage.GENERATED, generated_group(prompt, **fields))

    async def told(self, *responses: samples_pb2.SampleGroup) -> None:
        """Tells of responses once the lead listens."""
        await self.bench.changes.until(lambda: self.watch.num_listeners > 0)
        for response in responses:
            await self.bench.samples.tell_response(response)

    @property
    def asked(self) -> list[list[tuple[int, int]]]:
        """(prompt, draw) of the samples of each call to the present ranks, in the order of ranks."""
        return [call for gpu in SLOTS if gpu in self.ranks for call in self.ranks[gpu].asked]

    async def on_stream(self) -> list[samples_pb2.SampleGroup]:
        """All scored groups, in the order of publishing."""

        async def never(letter: object) -> None:
            raise AssertionError(f"dead letter {letter}")

        consumer = await self.bench.bus.samples.consumer(JOB, Stage.SCORED, "reader", on_dead_letter=never)
        return [delivery.group for delivery in await consumer.fetch(100, timeout_s=0)]

    async def num_unsettled(self) -> int:
        async def never(letter: object) -> None:
            raise AssertionError(f"dead letter {letter}")

        consumer = await self.bench.bus.samples.consumer(JOB, Stage.GENERATED, "inference", on_dead_letter=never)
        return await consumer.num_waiting()


@asynccontextmanager
async def scoring(tmp_path: Path, *, num_permits: int = PLENTY, **sections: Any) -> AsyncIterator[Scoring]:
    made = Scoring(num_permits=num_permits)
    async with bench(tmp_path, Role.INFERENCE, InferenceLead, made.make, wrap=WatchedSamples, **sections) as opened:
        made.bench = opened
        yield made
