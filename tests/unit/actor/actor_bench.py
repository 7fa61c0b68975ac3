"""The bench of the actor's lead: fake ranks, scored groups, and a sample stream that is watched."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.actor.lead import ActorLead
from tests.component_bench import Bench, bench
from tests.unit.actor.fake_ranks import PLENTY, FakeRank, Ranks
from tests.watched_samples import WatchedSamples, scored_group
from tidegate.ports.bus import Stage
from tidegate.types import Role, SampleId
from tidegate.v1 import commands_pb2, events_pb2

FIRST, SECOND = "n0/0", "n0/1"
MOVING: dict[str, Any] = {
    "scheduler": {"policy": "tide"},
    "cluster": {
        "nodes": {"n0": 3, "n1": 1},
        "component_placement": {"actor": "0-1", "rollout": "2", "inference": "3"},
    },
    "inference": {"layout": {}},
}
"""The sections of a config in which the actor may get all four slots. It has the first two."""


class Training:
    """The bench with its ranks, and the sample stream, which records what is done on it."""

    def __init__(self, bench: Bench[ActorLead, FakeRank], ranks: Ranks) -> None:
        self.bench = bench
        self.ranks = ranks
        assert isinstance(bench.samples, WatchedSamples)
        self.watch = bench.samples

    def take(self, *commands: Any) -> ActorLead:
        """The lead takes the commands; the first one makes it."""
        lead = self.bench.leads[-1] if self.bench.leads else self.bench.new_lead()
        for command in commands:
            lead.take(command)
        return lead

    def start(self) -> ActorLead:
        return self.take(self.bench.scale_up(), self.bench.open_iteration())

    def close(self, iteration: int = 0, *, incarnation: int = 1) -> None:
        """The scheduler closes the iteration, whose accounts add up."""
        header = self.bench.header(incarnation=incarnation)
        self.take(commands_pb2.CloseIterationRequest(header=header, iteration=iteration))

    async def scored(self, prompts: Iterable[int], **fields: Any) -> None:
        for prompt in prompts:
            await self.bench.bus.samples.publish(Stage.SCORED, scored_group(prompt, **fields))

    async def report(self) -> events_pb2.IterationReported:
        return (await self.bench.published("iteration_reported"))[-1].iteration_reported

    def journal(self) -> list[dict[str, Any]]:
        path = self.bench.folder.journal
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def until_acked(self, *prompts: int) -> None:
        await self.bench.changes.until(lambda: self.watch.prompts("ack") == list(prompts))


@asynccontextmanager
async def training(tmp_path: Path, *, num_permits: int = PLENTY, **sections: Any) -> AsyncIterator[Training]:
    ranks = Ranks(num_permits=num_permits)
    async with bench(tmp_path, Role.ACTOR, ActorLead, ranks.make, wrap=WatchedSamples, **sections) as opened:
        yield Training(opened, ranks)


def ids(*prompts: int, incarnation: int = 1, iteration: int = 0) -> list[SampleId]:
    return [SampleId(incarnation, iteration, prompt, draw) for prompt in prompts for draw in range(2)]
