"""An unreadable message pauses the job, which reports it. Once it is dropped the job goes on and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import nats
import pytest

from tests.e2e.jobs import Condition, generating, running, small_job
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.adapters import subjects
from tidegate.launcher.control import control_of
from tidegate.ports.bus import Stage
from tidegate.v1 import control_pb2
from tidegate.v1.samples_pb2 import SampleGroup

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)


def _event_of_kind(body: str) -> Condition:
    return lambda event: event.WhichOneof("body") == body


@pytest.mark.long
async def test_a_poison_message_pauses_the_job_until_it_is_dropped(tmp_path: Path) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(generating(0))
        servers = json.loads(job.folder.config.read_text())["servers"]
        client = await nats.connect(servers["nats_url"])
        group = SampleGroup(job="plain", incarnation=1, iteration=1, prompt=999)
        subject = subjects.sample_subject(Stage.GENERATED, group)
        await client.jetstream().publish(subject, b"no sample group")
        await client.close()
        event = await job.until(_event_of_kind("dead_lettered"))
        assert "plain" in event.dead_lettered.subject
        async with control_of(job.folder) as control:
            named = control_pb2.GetJobRequest(job="plain")
            status = await control.GetJob(named)
            while status.phase != "paused":
                assert status.phase in ("running", "starting"), status.message
                status = await control.GetJob(named)
            assert f"dead letter {event.dead_lettered.dead_letter}" in status.message
            (letter,) = (await control.ListDeadLetters(control_pb2.ListDeadLettersRequest(job="plain"))).dead_letters
            await control.DropDeadLetter(control_pb2.DropDeadLetterRequest(job="plain", id=letter.id))
        result = await job.result()
        assert trained_draws(job.folder.journal) == DRAWS
    assert (result["summary"]["lost"], result["summary"]["duplicates"]) == (0, 0)
