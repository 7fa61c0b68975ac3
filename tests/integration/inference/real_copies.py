"""The inference's real lead over real workers of one node, with the bus in memory."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from services.inference.lead import InferenceLead
from tests.component_bench import JOB, NODES, Bench, Changes, FakeInstance, bench, job_config
from tests.integration.inference.scoring import publish
from tests.integration.megatron import small_job
from tests.integration.megatron.actor_trainer_ranks import trainer
from tests.integration.runtime.nodes import fork_server
from tests.ranks import RankContext, Results
from tests.watched_samples import WatchedSamples, generated_group
from tidegate.checksums import combined_checksum, file_checksum
from tidegate.codec import decode_sample_id, encode_grants, encode_layout
from tidegate.config.job_config import JobConfig
from tidegate.gate import Gate
from tidegate.job import load_job
from tidegate.ports.bus import Stage
from tidegate.runtime.fork_client import ForkServerLauncher
from tidegate.runtime.instance import LocalInstance
from tidegate.runtime.snapshots import SnapshotStore
from tidegate.runtime.workers import LocalWorkers, WorkerHome
from tidegate.types import Grant, Layout, Role, gpu_id
from tidegate.v1 import commands_pb2, samples_pb2, types_pb2

NODE = NODES[0]
PROMPTS = 8
START_S = 120

Bits = dict[tuple[int, int], bytes]
"""By (prompt, draw)."""


def sections(layout: dict[str, int]) -> dict[str, Any]:
    """The inference has the GPUs from n0/2 on."""
    last = 1 + Layout(**layout).num_ranks
    return {
        "cluster": {
            "nodes": {NODE: 8},
            "component_placement": {"actor": "0", "rollout": "1", "inference": f"2-{last}"},
        },
        "actor": {"layout": {"dp": 1}},
        # The two responses of a group are two micro-batches, so that copies can share it.
        "inference": {"layout": layout, "max_tokens_per_microbatch": 32},
        "algorithm": {"prompts_per_iteration": PROMPTS},
    }


def write_weights(context: RankContext, *, config: str, folder: str) -> Results:
    """A rank of the actor writes the first weights of the job."""
    job = load_job(JobConfig.from_json(config))
    settings = replace(small_job.trainer_settings(), model=job.model, padded_vocab=job.padded_vocab)
    with trainer(context, {}, settings) as actor:
        publish(actor, Path(folder))
    return {}


def generated(prompt: int) -> samples_pb2.SampleGroup:
    """Two responses of other lengths to each prompt, of random tokens that follow from it."""
    generator = np.random.default_rng(prompt)
    group = generated_group(prompt)
    for number, sample in enumerate(group.samples):
        tokens = generator.integers(3, 12, size=4 + 3 * prompt + number).tolist()
        sample.response_tokens[:] = tokens
        sample.engine_log_probs[:] = [-0.5] * len(tokens)
        sample.versions[0].num_tokens = len(tokens)
    return group


class _NoOtherNode:
    def read(self, snapshot: Any, shard: Any, *, timeout_s: float) -> AsyncIterator[bytes]:
        raise AssertionError(f"{shard.file} is on this node")


@dataclass
class RealCopies:
    """The lead at work, its bench, and the processes of its workers."""

    bench: Bench[InferenceLead, Any]
    lead: InferenceLead
    weights: types_pb2.Snapshot
    workers: LocalWorkers
    forks: psutil.Process
    timeline: Path
    deaths: list[str]
    changes: Changes

    def grants(self, *numbers: int, term: int = 1) -> list[Grant]:
        return [self.bench.grants(term=term)[number] for number in numbers]

    def come(self, coming: list[Grant], members: list[Grant], layout: Layout) -> None:
        up = self.bench.scale_up(coming, members=members, weights=self.weights)
        up.layout.CopyFrom(encode_layout(layout))
        self.lead.take(up)

    def leave(self, leaving: list[Grant], members: list[Grant], layout: Layout) -> None:
        self.lead.take(
            commands_pb2.ScaleDownRequest(
                header=self.bench.header(transition="shrink"),
                grants=encode_grants(leaving),
                members=encode_grants(members),
                layout=encode_layout(layout),
            )
        )

    def process(self, gpu: str) -> psutil.Process:
        (worker,) = [each for each in self.forks.children() if gpu in " ".join(each.cmdline())]
        return worker

    async def kill(self, gpu: str) -> None:
        """Returns once its instance has seen the death."""
        self.process(gpu).kill()
        await self.changes.until(lambda: gpu in self.deaths)

    async def publish(self, prompts: range) -> None:
        for prompt in prompts:
            await self.bench.bus.samples.publish(Stage.GENERATED, generated(prompt))

    async def scored(self) -> Bits:
        """The old log-probabilities on the stream, to the bit, once the iteration is reported."""
        await self.bench.published("iteration_reported")
        found: Bits = {}
        for prompt in range(PROMPTS):
            group = await self.bench.bus.samples.stored_group(
                JOB, Stage.SCORED, incarnation=1, iteration=0, prompt=prompt
            )
            assert group is not None
            for sample in group.samples:
                assert len(sample.old_log_probs) == len(sample.response_tokens)
                assert any(sample.old_log_probs)
                draw = decode_sample_id(sample.id).draw
                found[prompt, draw] = np.array(sample.old_log_probs, dtype=np.float32).tobytes()
        return found


@contextmanager
def forks(folder: Path) -> Iterator[tuple[Path, psutil.Process]]:
    """A fork server that has imported what a worker of the inference needs."""
    path = folder / "fork.sock"
    preload = "tidegate.megatron.cpu_stand_in:install,services.inference.worker"
    with fork_server(path, "--preload", preload) as process:
        yield path, psutil.Process(process.pid)


@asynccontextmanager
async def real_copies(
    tmp_path: Path,
    layout: dict[str, int],
    *,
    weights: Path,
    server: tuple[Path, psutil.Process],
    policy: str = "static",
) -> AsyncIterator[RealCopies]:
    def never(*_: object) -> Any:
        raise AssertionError("the workers are real")

    deaths: list[str] = []

    changes = Changes()

    async def died(grant: Grant, status: int, _: str) -> None:
        deaths.append(grant.gpu)
        changes.notify()

    path, forking = server
    launcher = await ForkServerLauncher.connect(path, timeout_s=START_S)
    timeline = tmp_path / "timeline.jsonl"
    home = WorkerHome(
        entry="services.inference.worker:main",
        log_dir=tmp_path / "logs",
        timeline=timeline,
        works_for="bench inference",
        start_timeout_s=START_S,
        stop_timeout_s=2,
    )
    workers = LocalWorkers(home, gate=Gate(tmp_path / "gate"), launcher=launcher, on_death=died)
    snapshots = SnapshotStore(tmp_path / "snapshots", node=NODE, source=_NoOtherNode())
    shutil.copytree(weights, snapshots.folder(JOB, incarnation=1, version=0))
    instance = LocalInstance(
        JOB,
        node=NODE,
        gpus=[gpu_id(NODE, index) for index in range(8)],
        workers=workers,
        gate=Gate(tmp_path / "gate"),
        snapshots=snapshots,
        timeout_s=START_S,
    )
    fields = sections(layout) | {"scheduler": {"policy": policy}}
    async with bench(tmp_path, Role.INFERENCE, InferenceLead, never, wrap=WatchedSamples, **fields) as opened:
        opened.instances[NODE] = _as_fake(instance)
        opened.patience_s = START_S
        try:
            yield RealCopies(opened, opened.new_lead(), _snapshot(weights), workers, forking, timeline, deaths, changes)
        finally:
            for lead in opened.leads:
                await lead.aclose()
            await workers.aclose()
            await launcher.close()


def _as_fake(instance: LocalInstance) -> FakeInstance[Any]:
    """The real instance in the place of the bench's fake one: a lead uses only what both have."""
    return instance  # type: ignore[return-value]


def _snapshot(folder: Path) -> types_pb2.Snapshot:
    shards = [
        types_pb2.SnapshotShard(
            node=NODE, endpoint="at-n0", file=path.name, size_bytes=path.stat().st_size, checksum=file_checksum(path)
        )
        for path in sorted(folder.iterdir())
    ]
    checksum = combined_checksum({shard.file: shard.checksum for shard in shards})
    return types_pb2.Snapshot(job=JOB, incarnation=1, version=0, shards=shards, checksum=checksum)


def config_json(tmp_path: Path) -> str:
    return job_config(tmp_path, **sections({"dp": 1})).to_json()
