"""The picture of an iteration's generation: what the engines report, and what the lead knows itself."""

from __future__ import annotations

from pathlib import Path

from services.rollout.generation_picture import GenerationPicture
from services.rollout.groups import GroupsInProgress
from services.rollout.progress import EngineProgress, IterationProgress
from tests.component_bench import NODES, snapshot
from tests.unit.rollout.fake_engines import Engines, give, rollout
from tidegate.candidates import Candidates
from tidegate.v1 import samples_pb2


async def test_a_silent_engine_is_shown_as_last_seen(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        groups: GroupsInProgress[samples_pb2.Sample] = GroupsInProgress(1, 0, (0,), 1)
        (sample,) = groups.take(1)
        engine = EngineProgress(held={sample}, lengths={sample: 7}, kv_capacity_tokens=100)
        picture = GenerationPicture(
            lead.crew,
            lambda: [(of.grants()[0], engine)],
            groups,
            Candidates(0, 1, 0),
            IterationProgress(0, 1, max_running=8),
        )
        of.instances[NODES[0]].is_silent = True
        assert list((await picture.paint()).lengths) == [7]
