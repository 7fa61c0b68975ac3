"""Real embedded engines under the rollout's lead: the worker's own handler, without a process. A test lets them step.

A step makes one token of each running sequence, so that a test knows at which token a move happens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import torch

from services.rollout.lead import RolloutLead
from services.rollout.worker import EngineWorker
from tests.component_bench import JOB, Bench, Changes, bench, replied
from tidegate.checksums import combined_checksum
from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.state.files import write_rank
from tidegate.job import Job, load_job, snapshot_folder
from tidegate.megatron.family import model_parameters
from tidegate.runtime.crew import WorkerRefused
from tidegate.runtime.worker import Answer, CallRefused
from tidegate.types import GpuId, Grant, Layout, Role, SampleId
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire

PLENTY = 1_000_000


class RealEngine:
    """One worker. It makes `steps` steps, and more when it is given more."""

    def __init__(self, grant: Grant, changes: Changes, *, num_steps: int) -> None:
        self.worker = EngineWorker(GpuId(grant.gpu), step_wait_s=0.0)
        self.steps = asyncio.Semaphore(num_steps)
        self.requests: list[wire.GenerationRequest] = []
        self.num_starts = 0
        self._changes = changes
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Queue[wire.WorkerReply]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it has sequences and may not step."""
        return self.worker.busy and self.steps.locked()

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        addressed = wire.WorkerCall()
        addressed.CopyFrom(call)
        addressed.call_id = next(self._ids)
        replies = self._open[addressed.call_id] = asyncio.Queue()
        self.requests += call.generate.requests
        self.num_starts += call.HasField("start_engine")
        try:
            self._send(self.worker.handle(addressed))
        except CallRefused as refused:
            raise WorkerRefused(str(refused)) from refused
        if self.worker.busy and (self._stepping is None or self._stepping.done()):
            self._stepping = asyncio.create_task(self._step())
        self._changes.notify()
        is_last = False
        while not is_last:
            reply = await replies.get()
            reply.call_id, is_last = call.call_id, reply.last
            yield reply

    async def _step(self) -> None:
        while self.worker.busy:
            await self.steps.acquire()
            if self.worker.busy:
                self._send(self.worker.step())
            self._changes.notify()
            await asyncio.sleep(0)

    def _send(self, answers: Iterator[Answer]) -> None:
        for answer in answers:
            call = wire.WorkerCall(call_id=answer.call_id)
            self._open[answer.call_id].put_nowait(replied(call, answer.body, last=answer.last))


class RealEngines:
    """The started workers, the newest of each GPU. A new one of a GPU may make `num_steps` steps."""

    def __init__(self, **num_steps: int) -> None:
        self.num_steps: dict[str, int] = num_steps
        self.of: dict[str, RealEngine] = {}

    def make(self, job: Job, grant: Grant, changes: Changes) -> RealEngine:
        self.of[grant.gpu] = RealEngine(grant, changes, num_steps=self.num_steps.get(grant.gpu, PLENTY))
        return self.of[grant.gpu]

    def open(self, gpu: str) -> None:
        for _ in range(10_000):
            self.of[gpu].steps.release()

    def sent(self, gpu: str) -> dict[SampleId, int]:
        """The tokens of each request's partial, as the engine got it last."""
        return {
            SampleId(each.id.incarnation, each.id.iteration, each.id.prompt, each.id.draw): len(
                each.partial.response_tokens
            )
            for each in self.of[gpu].requests
        }


RealBench = Bench[RolloutLead, RealEngine]


def real_rollout(tmp_path: Path, engines: RealEngines, **options: Any) -> AbstractAsyncContextManager[RealBench]:
    return bench(tmp_path, Role.ROLLOUT, RolloutLead, engines.make, **options)


def published_weights(of: RealBench, version: int, *, never: Sequence[int] = ()) -> types_pb2.Snapshot:
    """A version of random weights, in the host memory of both nodes. They practically never draw the tokens `never`."""
    job = load_job(of.config)
    parameters = model_parameters(job.model, padded_vocab=job.padded_vocab)
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for parameter in parameters:
        shape = parameter.shape
        scale = 0.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        values = torch.randn(shape, generator=generator) * scale + (len(shape) == 1)
        if never and parameter.name == EMBEDDING:
            # One hidden unit is large in every position, and those tokens' logits fall with it.
            values[:, 0] = 5.0
        if never and parameter.name == OUTPUT:
            values[list(never), 0] = -20.0
        tensors[parameter.name, StateKind.WEIGHT] = values.reshape(-1).contiguous()
    state = State(Mesh(Layout(), (0,), even_chunks(job.model.num_layers, pp=1)))
    shards = []
    for node in of.instances:
        folder = snapshot_folder(of.config, node, incarnation=1, version=version)
        written = write_rank(folder, "rank0", parameters=parameters, state=state, me=0, tensors=tensors)
        assert written is not None, "the only rank holds everything"
        shard = types_pb2.SnapshotShard(
            node=node, endpoint=f"at-{node}", file="rank0", size_bytes=written.size_bytes, checksum=written.checksum
        )
        shards.append(shard)
    checksum = combined_checksum({"rank0": shards[0].checksum})
    return types_pb2.Snapshot(job=JOB, incarnation=1, version=version, shards=shards[:1], checksum=checksum)
