"""An inference worker: one rank of the scorer, driven by its instance's calls.

Every rank of the world gets every `Score` call with all groups, and answers only with the samples that it computed.

A worker is in one of three states:
1. In no world: it has its process, its imports and the device of its slot.
2. At rest in a copy's world: it has the model without weights.
3. At work in a copy's world.

`StartScorer` brings it from any of them to 2 or 3. A rank that stays in its world needs only a load to work again.

Invariants:
- A group is scored only by the version from which it was drawn.
  [test_lead: drawn_from_another_version_is_dead_lettered]
- A scorer at work is not started again in the same world. [test_standby: second_start_in_a_row]
- A refused start changes nothing. [test_standby: second_start_in_a_row]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from services.inference.scorer import LogProbs, MegatronScorer, ScorerSettings
from services.inference.shares import limits_of
from tidegate.config.job_config import JobConfig
from tidegate.elastic.state.files import FileCorrupt, StateFiles
from tidegate.job import load_job
from tidegate.megatron.worker_rank import WorkerWorlds
from tidegate.runtime.free_memory import held_device_bytes, return_free_memory
from tidegate.runtime.pacer import Pacer
from tidegate.runtime.slot_place import take_slot
from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire


class ScorerWorker:
    """Handles one rank's calls."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._worlds = WorkerWorlds(channel)
        self._scorer: MegatronScorer | None = None
        self._is_at_work = False

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
        start = call.start_scorer
        if not (start.world or start.stands_by):
            raise CallRefused("a scorer works in the world of its copy: name it")
        if start.world == self._worlds.name and self._is_at_work and not start.stands_by:
            raise CallRefused(f"the scorer is started already, in the world {start.world}")
        if start.world != self._worlds.name or not start.world:
            self._change_world(start)
        self._is_at_work = not start.stands_by
        held_bytes = 0
        if start.stands_by:
            if self._scorer is not None:
                self._scorer.rest()
            held_bytes = held_device_bytes()
            return_free_memory()
        memory = psutil.Process().memory_info()
        started = wire.Started(
            memory_bytes=memory.rss - (memory.shared if start.stands_by else 0),
            detail=str(self._scorer.ranks) if self._scorer else "",
            held_bytes=held_bytes,
        )
        return Answer(call.call_id, started)

    def _change_world(self, start: wire.StartScorer) -> None:
        if start.world and not start.HasField("rendezvous"):
            here = f"in the world {self._worlds.name}" if self._worlds.name else "in no world"
            raise CallRefused(f"this worker is {here}, not in {start.world}: name a rendezvous to all of its copy")
        job = load_job(JobConfig.from_json(start.config_json))
        self._scorer = None
        self._worlds.leave()
        place = take_slot(job.config.cluster, self._channel.grant.gpu)
        if not start.world:
            return
        ranks = self._worlds.join(start.world, start.rendezvous, start.layout, place=place, seed=job.config.seed)
        settings = ScorerSettings(
            model=job.model,
            padded_vocab=job.padded_vocab,
            temperature=job.config.algorithm.temperature,
            limits=limits_of(job.config),
            precision=job.config.actor.precision,
        )
        self._scorer = MegatronScorer(
            settings, ranks, place.device, Pacer.of(job.config.cluster, self._channel.clock.count)
        )

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
        if self._scorer is None or not self._is_at_work:
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
