"""A service that hangs and goes on: replaced as lead, taken back when it answers, and no sample counts twice."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.e2e.jobs import Condition, RunningJob, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.types import Role
from tidegate.v1.events_pb2 import Event

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)


def _lost(instance: str) -> Condition:
    return lambda event: event.WhichOneof("body") == "instance_lost" and event.instance_lost.instance == instance


def _lead(job: RunningJob, role: Role) -> str:
    """The instance that leads now."""
    return [event.source for event in job.events if _elects(event, role)][-1]


def _elects(event: Event, role: Role) -> bool:
    return event.WhichOneof("body") == "lead_elected" and event.source.startswith(f"{role}@")


def _closes(event: Event) -> bool:
    """Whether the job gives its GPUs back."""
    return event.WhichOneof("body") == "command_answered" and "/down/" in event.command_answered.command_id


async def _assert_as_if_nothing_happened(job: RunningJob, want_checksum: str) -> None:
    summary = (await job.result())["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    assert summary["weights_checksum"] == want_checksum
    assert not any(job.gates().values())


HANGS: dict[str, tuple[Role, Condition]] = {
    "the rollout's lead, generating": (Role.ROLLOUT, generating(1)),
    "the rollout's lead, in the last iteration": (Role.ROLLOUT, generating(2)),
    "the inference's lead, generating": (Role.INFERENCE, generating(1)),
    "the actor's lead, generating": (Role.ACTOR, generating(1)),
    "the actor's lead, between two updates": (Role.ACTOR, updated(1)),
}


@pytest.mark.parametrize("case", HANGS)
async def test_a_job_goes_on_after_a_lead_hangs_past_its_lease(case: str, want_checksum: str, tmp_path: Path) -> None:
    role, when = HANGS[case]
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(when)
        lead = _lead(job, role)
        process = job.service(f"services.{role}", lead.partition("@")[2])
        process.send_signal(signal.SIGSTOP)
        # The new lead may be done before the lease is: the last iteration is short.
        await job.until(lambda event: _lost(lead)(event) or _closes(event))
        process.send_signal(signal.SIGCONT)
        await _assert_as_if_nothing_happened(job, want_checksum)


async def test_a_job_goes_on_after_its_scheduler_hangs(want_checksum: str, tmp_path: Path) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(generating(1))
        process = job.service("services.scheduler")
        process.send_signal(signal.SIGSTOP)
        # The hang itself: no process publishes while the scheduler hangs, and no lease may expire because of it.
        await asyncio.sleep(2 * job.config.runtime.lease_ttl_s)
        process.send_signal(signal.SIGCONT)
        await _assert_as_if_nothing_happened(job, want_checksum)
        assert not [event for event in job.events if event.WhichOneof("body") == "instance_lost"]
