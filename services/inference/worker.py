"""An inference worker: one rank of the scorer, driven by its instance's calls.

Every rank of the world gets every `Score` call with all groups, and answers only with the samples that it computed.

Invariant: a group is scored only by the version from which it was drawn.
[test_lead: drawn_from_another_version_is_dead_lettered]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from services.inference.scorer import LogProbs, MegatronScorer, ScorerSettings
from tidegate.config.job_config import JobConfig
from tidegate.elastic.state.files import FileCorrupt, StateFiles
from tidegate.job import load_job
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.worker_rank import join_world
from tidegate.runtime.pacer import Pacer
from tidegate.runtime.slot_place import take_slot
from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire


class ScorerWorker:
    """Handles one rank's calls."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._scorer: MegatronScorer | None = None

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        match call.WhichOneof("body"):
            case "start_scorer":
                yield self._start(call)
            case "load_shards":
                yield self._load(call)
            case "score":
                yield self._score(call)
            case other:
                raise CallRefused(
                    f"an inference worker does not handle {other!r}; send the call to the component that does"
                )

    def _start(self, call: wire.WorkerCall) -> Answer:
        if self._scorer is not None:
            raise CallRefused("the scorer is started already")
        start = call.start_scorer
        job = load_job(JobConfig.from_json(start.config_json))
        place = take_slot(job.config.cluster, self._channel.grant.gpu)
        ranks = join_world(start.rendezvous, start.layout, self._channel, place=place, seed=job.config.seed)
        settings = ScorerSettings(
            model=job.model,
            padded_vocab=job.padded_vocab,
            temperature=job.config.algorithm.temperature,
            limits=BatchLimits(max_tokens=job.config.inference.max_tokens_per_microbatch),
            precision=job.config.actor.precision,
        )
        self._scorer = MegatronScorer(
            settings, ranks, place.device, Pacer.of(job.config.cluster, self._channel.clock.count)
        )
        return Answer(call.call_id, wire.Started(memory_bytes=psutil.Process().memory_info().rss, detail=str(ranks)))

    def _load(self, call: wire.WorkerCall) -> Answer:
        scorer, shards = self._started(), call.load_shards
        try:
            files = StateFiles(Path(shards.folder), dict(zip(shards.files, shards.checksums, strict=True)))
            scorer.load(files, version=shards.version, reference=shards.reference)
        except FileCorrupt as error:
            raise CallRefused(str(error)) from error
        return Answer(call.call_id, wire.LoadedWeights(version=shards.version, checksum=files.checksum))

    def _score(self, call: wire.WorkerCall) -> Answer:
        scorer = self._started()
        groups = call.score.groups
        for group in groups:
            if group.version != scorer.version:
                raise CallRefused(
                    f"group of prompt {group.prompt} was drawn from version {group.version}, but the loaded "
                    f"version is {scorer.version}"
                )
        tokens = [[[*group.prompt_tokens, *sample.response_tokens] for sample in group.samples] for group in groups]
        policy = scorer.policy_log_probs(tokens)
        reference = scorer.reference_log_probs(tokens) if scorer.has_reference else {}
        return Answer(call.call_id, wire.Scored(groups=_with_own_samples(groups, policy, reference)))

    def _started(self) -> MegatronScorer:
        if self._scorer is None:
            raise CallRefused("the scorer is not started; send StartScorer first")
        return self._scorer


def _with_own_samples(
    groups: Sequence[samples_pb2.SampleGroup], policy: LogProbs, reference: LogProbs
) -> list[samples_pb2.SampleGroup]:
    """The groups with the ids and log-probabilities of the samples that this rank computed."""
    scored: list[samples_pb2.SampleGroup] = []
    for number, group in enumerate(groups):
        first = len(group.prompt_tokens)
        samples = [
            samples_pb2.Sample(
                id=sample.id,
                old_log_probs=policy[number, index][first:].tolist(),
                reference_log_probs=reference[number, index][first:].tolist() if reference else [],
            )
            for index, sample in enumerate(group.samples)
            if (number, index) in policy
        ]
        scored.append(samples_pb2.SampleGroup(prompt=group.prompt, samples=samples))
    return scored


def main(channel: WorkerChannel) -> None:
    """The worker's entry, in the forked process."""
    run_worker(channel, ScorerWorker(channel), waits_for="samples")
