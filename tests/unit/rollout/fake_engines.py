"""Fake engines, which make each response from its request's seed when they get a permit, and their lead on a bench."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from services.rollout.lead import RolloutLead
from tests.component_bench import Bench, Changes, bench, loaded, replied, task_of
from tidegate.codec import decode_sample_id, encode_sample_id
from tidegate.job import Job
from tidegate.runtime.crew import WorkerRefused
from tidegate.runtime.lead import Command
from tidegate.types import Grant, Role, SampleId
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire

FIRST, SECOND = "n0/2", "n1/2"
PLENTY = 1_000_000


class FakeEngine:
    """Makes each response from its request's seed, one per permit."""

    def __init__(self, job: Job, grant: Grant, changes: Changes, *, num_permits: int) -> None:
        self.grant = grant
        self.permits = asyncio.Semaphore(num_permits)
        self.asked: list[SampleId] = []
        self.made: list[SampleId] = []
        self.num_aborts = 0
        self.refusal = ""
        self.lies_about_weights = False
        self.hangs_in_start = False
        self.aborts_first = False
        self._job = job
        self._changes = changes
        self._version: int | None = None

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        match call.WhichOneof("body"):
            case "start_engine":
                if self.hangs_in_start:
                    self._changes.notify()
                    await asyncio.Event().wait()
                yield replied(call, wire.Started())
            case "load_shards":
                self._version = call.load_shards.version
                reply = loaded(call)
                if self.lies_about_weights:
                    reply.loaded.checksum = "of something else"
                yield reply
            case "abort":
                self.num_aborts += 1
                yield replied(call)
            case "look":
                yield replied(call, self._load())
            case "generate":
                async for reply in self._generate(call):
                    yield reply

    def _load(self) -> wire.EngineLoad:
        """The load: it runs all requests inside, each with one token until its response is complete."""
        inside = [sample for sample in self.asked if sample not in self.made]
        return wire.EngineLoad(
            num_running=len(inside),
            num_used_tokens=len(inside),
            num_capacity_tokens=1000,
            samples=[encode_sample_id(sample) for sample in inside],
            num_tokens=[1] * len(inside),
        )

    async def _generate(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        if self.refusal:
            raise WorkerRefused(self.refusal)
        requests = call.generate.requests
        self.asked += [decode_sample_id(request.id) for request in requests]
        self._changes.notify()
        assert self._version is not None, "asked to generate before it holds weights"
        for number, request in enumerate(requests):
            await self.permits.acquire()
            sample = response(self._job, request, version=self._version)
            if self.aborts_first:
                self.aborts_first = False
                sample.finish = samples_pb2.FINISH_REASON_ABORT
            yield replied(call, wire.Generated(sample=sample), last=number + 1 == len(requests))
            # When the caller asks for the next reply, it has taken this one.
            if sample.finish != samples_pb2.FINISH_REASON_ABORT:
                self.made.append(decode_sample_id(request.id))
            self._changes.notify()


def response(job: Job, request: wire.GenerationRequest, *, version: int) -> samples_pb2.Sample:
    """A right answer for an even seed, and the begin of one for an odd seed."""
    text = task_of(job).demonstration(request.seed % 50).response
    tokens = job.tokenizer.encode_response(text)
    if request.seed % 2:
        tokens = tokens[:1]
    return samples_pb2.Sample(
        id=request.id,
        response_tokens=tokens,
        engine_log_probs=[-0.5] * len(tokens),
        versions=[samples_pb2.VersionRun(version=version, num_tokens=len(tokens))],
        finish=samples_pb2.FINISH_REASON_LENGTH if request.seed % 2 else samples_pb2.FINISH_REASON_STOP,
    )


class Engines:
    """All started engines, the newest of each GPU. A new engine of a GPU gets `num_permits` permits."""

    def __init__(self) -> None:
        self.num_permits = {FIRST: PLENTY, SECOND: PLENTY}
        self.of: dict[str, FakeEngine] = {}
        self.hang_in_start: set[str] = set()
        """The GPUs whose next engines do not get past their start."""

    def make(self, job: Job, grant: Grant, changes: Changes) -> FakeEngine:
        self.of[grant.gpu] = FakeEngine(job, grant, changes, num_permits=self.num_permits[grant.gpu])
        self.of[grant.gpu].hangs_in_start = grant.gpu in self.hang_in_start
        return self.of[grant.gpu]

    def open(self, gpu: str) -> None:
        for _ in range(100):
            self.of[gpu].permits.release()


RolloutBench = Bench[RolloutLead, FakeEngine]


def rollout(tmp_path: Path, engines: Engines, **options: Any) -> AbstractAsyncContextManager[RolloutBench]:
    return bench(tmp_path, Role.ROLLOUT, RolloutLead, engines.make, **options)


def give(of: RolloutBench, *commands: Command) -> RolloutLead:
    """Give commands to the present lead, or to a new one if there is none."""
    lead = of.leads[-1] if of.leads else of.new_lead()
    for command in commands:
        lead.take(command)
    return lead


async def engine_at_work(of: RolloutBench, engines: Engines, gpu: str, *, num_made: int) -> FakeEngine:
    """The engine, once it has requests and has made `num_made` responses."""

    def works() -> bool:
        engine = engines.of.get(gpu)
        return engine is not None and bool(engine.asked) and len(engine.made) == num_made

    await of.changes.until(works)
    return engines.of[gpu]
