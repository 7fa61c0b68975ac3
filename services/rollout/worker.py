"""A rollout worker: one engine on one slot, driven by its instance's calls.

Generation happens in short steps between calls. Each response is a reply to the call that requested it. The last
response closes that call. A refused call changes nothing.

Invariants:
- Every accepted request comes out once. [test_demo: no_sample_is_lost_or_doubled]
- A worker whose engine failed ends, so that other engines generate its requests.
  [test_sglang: costs_only_the_regeneration]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from services.rollout.engine import (
    Engine,
    EngineFailed,
    FinishReason,
    Generation,
    GenerationRequest,
    RequestId,
    RequestRefused,
    Response,
    SamplingParams,
    VersionSpan,
    WeightsRefused,
)
from services.rollout.engines import start_engine, starts_asleep
from tidegate.codec import decode_sample_id, encode_sample_id
from tidegate.config.job_config import JobConfig
from tidegate.elastic.state.files import FileCorrupt, StateFiles
from tidegate.job import Job, load_job
from tidegate.megatron.family import model_parameters
from tidegate.runtime.free_memory import held_device_bytes
from tidegate.runtime.pacer import OnCounts, Pacer, uncounted
from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.types import GpuId, SampleId
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire

_FINISH = {
    FinishReason.STOP: samples_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: samples_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: samples_pb2.FINISH_REASON_ABORT,
}


_STEP_WAIT_S = 0.01
"""How long a step waits for a server's responses, or generates in this process. A call waits as long for a step."""


class EngineWorker:
    """Handles the calls and makes the steps of one engine on `gpu`."""

    def __init__(self, gpu: GpuId, *, on_counts: OnCounts = uncounted, step_wait_s: float = _STEP_WAIT_S) -> None:
        """`on_counts` takes the counts of steps under a pace."""
        self._gpu = gpu
        self._on_counts = on_counts
        self._step_wait_s = step_wait_s
        self._job: Job | None = None
        self._engine: Engine | None = None
        self._name = ""
        self._is_asleep = False
        self._num_lost_tokens = 0
        self._call_of: dict[RequestId, int] = {}
        self._num_open: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._call_of)

    def step(self) -> Iterator[Answer]:
        """Make a few tokens of every running sequence."""
        _, engine = self._started()
        return self._answers(engine.poll(wait_s=self._step_wait_s))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        match call.WhichOneof("body"):
            case "start_engine":
                yield self._start(call)
            case "load_shards":
                yield self._load(call)
            case "generate":
                self._submit(call)
            case "abort":
                _, engine = self._started()
                yield from self._answers(engine.abort())
                yield Answer(call.call_id, wire.Aborted(num_lost_tokens=self._newly_lost(engine)))
            case "look":
                yield Answer(call.call_id, self._look())
            case other:
                raise CallRefused(
                    f"a rollout worker does not handle {other!r}; send the call to the component that does"
                )

    def _start(self, call: wire.WorkerCall) -> Answer:
        """Build the engine, or wake it. One that is to stand by is built without memory, or put to sleep."""
        stands_by = call.start_engine.stands_by
        if self._engine is not None and not stands_by and not self._is_asleep:
            raise CallRefused("the engine is started already")
        if stands_by and self._call_of:
            raise CallRefused(f"{len(self._call_of)} requests are in the engine: abort them before it stands by")
        self._job = load_job(JobConfig.from_json(call.start_engine.config_json))
        memory_bytes = None
        try:
            if self._engine is None and (starts_asleep(self._job.config) or not stands_by):
                pacer = Pacer.of(self._job.config.cluster, self._on_counts)
                started = start_engine(self._job, self._gpu, pacer)
                self._engine, self._name, memory_bytes = (
                    started.engine,
                    started.engine.features.name,
                    started.memory_bytes,
                )
            if self._engine is not None and stands_by:
                self._engine.sleep()
            elif self._engine is not None:
                self._engine.wake()
        except EngineFailed as error:
            # Refuse the call, so that the lead ends the job. Send only the first line: it names the log with the rest.
            raise CallRefused(str(error).partition("\n")[0]) from error
        self._is_asleep = stands_by
        held_bytes = held_device_bytes() if stands_by else 0
        if stands_by or memory_bytes is None:
            memory = psutil.Process().memory_info()
            memory_bytes = memory.rss - memory.shared + (self._engine.server_bytes if self._engine is not None else 0)
        return Answer(call.call_id, wire.Started(memory_bytes=memory_bytes, detail=self._name, held_bytes=held_bytes))

    def _load(self, call: wire.WorkerCall) -> Answer:
        job, engine = self._started()
        if self._is_asleep:
            # A lead died while it put the engine to rest. The next one finds a member, and wants it at work.
            engine.wake()
            self._is_asleep = False
        shards = call.load_shards
        itemsize = job.config.actor.precision.itemsize
        parameters = model_parameters(job.model, padded_vocab=job.padded_vocab, itemsize=itemsize)
        try:
            files = StateFiles(Path(shards.folder), dict(zip(shards.files, shards.checksums, strict=True)))
            engine.update_weights(shards.version, files.read_whole(parameters))
        except (FileCorrupt, WeightsRefused) as error:
            raise CallRefused(str(error)) from error
        return Answer(call.call_id, wire.LoadedWeights(version=shards.version, checksum=files.checksum))

    def _submit(self, call: wire.WorkerCall) -> None:
        job, engine = self._started()
        taken: list[RequestId] = []
        for request in call.generate.requests:
            identity = RequestId(str(decode_sample_id(request.id)))
            try:
                if identity in self._call_of:
                    raise RequestRefused(f"sample {identity} is being generated here already")
                engine.submit(_request(identity, request, job))
            except RequestRefused as error:
                engine.abort(taken)
                raise CallRefused(str(error)) from error
            taken.append(identity)
        if not taken:
            raise CallRefused("a generate call names no request")
        self._call_of |= dict.fromkeys(taken, call.call_id)
        self._num_open[call.call_id] = len(taken)

    def _look(self) -> wire.EngineLoad:
        _, engine = self._started()
        load, lengths = engine.load(), engine.lengths()
        return wire.EngineLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_used_tokens=load.num_used_tokens,
            num_capacity_tokens=load.num_capacity_tokens,
            samples=[encode_sample_id(SampleId.parse(request)) for request in lengths],
            num_tokens=lengths.values(),
        )

    def _newly_lost(self, engine: Engine) -> int:
        """The tokens that aborts lost since the last call."""
        before, self._num_lost_tokens = self._num_lost_tokens, engine.load().num_lost_tokens
        return self._num_lost_tokens - before

    def _answers(self, generations: Sequence[Generation]) -> Iterator[Answer]:
        if not generations:
            return
        _, engine = self._started()
        load = engine.load()
        for generation in generations:
            call_id = self._call_of.pop(generation.id)
            self._num_open[call_id] -= 1
            last = self._num_open[call_id] == 0
            if last:
                del self._num_open[call_id]
            body = wire.Generated(
                sample=_sample(generation), num_running=load.num_running, num_waiting=load.num_waiting
            )
            yield Answer(call_id, body, last=last)

    def _started(self) -> tuple[Job, Engine]:
        if self._job is None or self._engine is None:
            raise CallRefused("the engine is not started; send StartEngine first")
        return self._job, self._engine


def _request(identity: RequestId, request: wire.GenerationRequest, job: Job) -> GenerationRequest:
    # Both have fields of the same names. The request's own sampling overrides the job's.
    own = request.HasField("sampling")
    source = request.sampling if own else job.config.algorithm
    length = None if own else job.drawn_length(decode_sample_id(request.id))
    sampling = SamplingParams(
        max_new_tokens=length or source.max_new_tokens,
        temperature=source.temperature,
        top_p=source.top_p,
        seed=request.seed,
        stop_token_ids=() if length else job.tokenizer.end_ids,
    )
    partial = _response(identity, request.partial)
    return GenerationRequest(
        id=identity, prompt_tokens=tuple(request.prompt_tokens), sampling=sampling, partial=partial
    )


def _response(identity: RequestId, sample: samples_pb2.Sample) -> Response:
    """What another engine made. Raises RequestRefused where tokens, log-probabilities and versions do not agree."""
    ends = list(itertools.accumulate((run.num_tokens for run in sample.versions), initial=0))
    try:
        return Response(
            tokens=tuple(sample.response_tokens),
            log_probs=tuple(sample.engine_log_probs),
            versions=tuple(
                VersionSpan(run.version, start, end)
                for run, (start, end) in zip(sample.versions, itertools.pairwise(ends), strict=True)
            ),
        )
    except ValueError as error:
        raise RequestRefused(f"request {identity}: its partial cannot be continued: {error}") from error


def _sample(generation: Generation) -> samples_pb2.Sample:
    response = generation.response
    return samples_pb2.Sample(
        id=encode_sample_id(SampleId.parse(generation.id)),
        response_tokens=response.tokens,
        engine_log_probs=response.log_probs,
        versions=[
            samples_pb2.VersionRun(version=span.version, num_tokens=span.end - span.start) for span in response.versions
        ],
        finish=_FINISH[generation.finish_reason],
    )


def main(channel: WorkerChannel) -> None:
    """The worker's entry, in the forked process."""
    worker = EngineWorker(GpuId(channel.grant.gpu), on_counts=channel.clock.count)
    try:
        run_worker(channel, worker, stepper=worker, waits_for="prompts")
    finally:
        worker.close()
