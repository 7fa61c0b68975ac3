"""The kill matrix: whatever dies, whenever it dies, each sample is trained once and the weights come out the same.

A job must survive by itself what it can survive. Where it stops (its servers, its launcher), it says how to resume and
leaves nothing behind, and the resumed run has the same weights as a run that nothing happened to.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.jobs import (
    Condition,
    RunningJob,
    Victim,
    generating,
    running,
    service_of,
    small_job,
    updated,
    worker_of,
)
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.v1.events_pb2 import Event

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)


def _happened(body: str, *, of: str = "", nth: int = 1) -> Condition:
    """The nth event of a kind, of a role where one is named."""
    seen: list[str] = []

    def condition(event: Event) -> bool:
        if event.WhichOneof("body") == body and event.source.startswith(of) and event.id not in seen:
            seen.append(event.id)
        return len(seen) >= nth

    return condition


def _warming(event: Event) -> bool:
    return event.WhichOneof("body") == "progress" and event.progress.phase == "warm_up"


SURVIVED: dict[str, tuple[Victim, Condition]] = {
    "the actor's service on node 0, generating": (service_of("services.actor", "n0"), generating(1)),
    "the actor's service on node 1, generating": (service_of("services.actor", "n1"), generating(1)),
    "the actor's service, between two updates": (service_of("services.actor", "n0"), updated(1)),
    "the actor's service, at its start": (service_of("services.actor", "n0"), _happened("instance_joined", of="actor")),
    "the actor's service, warming up": (service_of("services.actor", "n1"), _warming),
    "the actor's service, after a checkpoint": (service_of("services.actor", "n0"), _happened("checkpoint_saved")),
    "the actor's service, after a publish": (service_of("services.actor", "n1"), _happened("weights_published", nth=2)),
    "the rollout's service on node 0": (service_of("services.rollout", "n0"), generating(1)),
    "the rollout's service on node 1": (service_of("services.rollout", "n1"), generating(1)),
    "the rollout's service, at its start": (
        service_of("services.rollout", "n0"),
        _happened("lead_elected", of="rollout"),
    ),
    "the rollout's service, loading weights": (service_of("services.rollout", "n1"), _happened("weights_published")),
    "the inference's service without workers": (service_of("services.inference", "n0"), generating(1)),
    "the inference's service with its worker": (service_of("services.inference", "n1"), generating(1)),
    "the inference's service, loading weights": (
        service_of("services.inference", "n1"),
        _happened("weights_published"),
    ),
    "the scheduler, generating": (service_of("services.scheduler"), generating(1)),
    "the scheduler, at the job's start": (service_of("services.scheduler"), _happened("job_submitted")),
    "the scheduler, as an iteration closes": (service_of("services.scheduler"), _happened("checkpoint_saved", nth=2)),
    "an actor's first rank": (worker_of("n0/0"), generating(1)),
    "an actor's last rank, updating": (worker_of("n1/1"), updated(1)),
    "an engine on node 0": (worker_of("n0/2"), generating(1)),
    "an engine on node 1": (worker_of("n1/2"), generating(1)),
    "the inference's rank": (worker_of("n1/3"), generating(1)),
    "the fork server of node 0": (service_of("tidegate.runtime.forkserver", "n0"), generating(1)),
    "the fork server of node 1": (service_of("tidegate.runtime.forkserver", "n1"), updated(1)),
}

WANT_INCARNATION = {
    "the actor's service on node 0, generating": 2,
    "the actor's service on node 1, generating": 2,
    "an actor's first rank": 1,
    "an engine on node 0": 1,
    "the inference's rank": 1,
}
"""The expected values of the cases in which they do not depend on the moment."""


def _assert_as_if_nothing_happened(job: RunningJob, result: dict[str, Any], want_checksum: str) -> None:
    summary = result["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    assert summary["weights_checksum"] == want_checksum


@pytest.mark.parametrize("case", SURVIVED)
async def test_a_job_goes_on_by_itself_after_a_kill(case: str, want_checksum: str, tmp_path: Path) -> None:
    victim, when = SURVIVED[case]
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(when)
        victim(job).kill()
        _assert_as_if_nothing_happened(job, await job.result(), want_checksum)
        incarnation = max(event.incarnation for event in job.events)
        assert incarnation == WANT_INCARNATION.get(case, incarnation)


@pytest.mark.parametrize(
    "case",
    [
        "the inference's service with its worker",
        "the inference's rank",
        "the rollout's service on node 0",
        "the rollout's service on node 1",
        "an engine on node 1",
        "an actor's last rank, updating",
    ],
)
async def test_a_job_that_scores_ahead_trains_each_sample_once_after_a_kill(case: str, tmp_path: Path) -> None:
    """Its weights differ by rounding from one run to the next."""
    victim, when = SURVIVED[case]
    async with running(small_job("ahead", actor__num_logical_shards=None), tmp_path) as job:
        await job.until(when)
        victim(job).kill()
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == DRAWS
        assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())


async def test_the_death_of_a_copy_of_the_inference_costs_that_copy_alone(want_checksum: str, tmp_path: Path) -> None:
    placement = {"actor": "0,1,4,5", "rollout": "2,6", "inference": "3,7"}
    raw = small_job("plain", cluster__component_placement=placement, inference__layout={"dp": 2})
    async with running(raw, tmp_path) as job:
        await job.until(generating(1))
        worker_of("n1/3")(job).kill()
        _assert_as_if_nothing_happened(job, await job.result(), want_checksum)
        of_inference = [event for event in job.events if event.source.startswith("inference")]
        acquired = [event.gpus_acquired for event in of_inference if event.WhichOneof("body") == "gpus_acquired"]
        assert [[grant.gpu for grant in each.grants] for each in acquired] == [["n0/3", "n1/3"], ["n1/3"]]


@pytest.mark.parametrize("server", ["nats-server", "valkey-server"])
async def test_a_job_whose_server_dies_stops_with_a_message_and_resumes(
    server: str, want_checksum: str, tmp_path: Path
) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(generating(1))
        below = job.processes()
        job.service(server).kill()
        assert await job.process.wait() == 1
        assert job.process.stderr is not None
        said = (await job.process.stderr.read()).decode()
        assert "--resume" in said
        assert not _alive(below)
    await _resumed(tmp_path, want_checksum)


STOPS: dict[str, tuple[signal.Signals, Condition]] = {
    "Ctrl-C in the middle of an iteration": (signal.SIGINT, generating(1)),
    "Ctrl-C while warming up": (signal.SIGINT, _warming),
    "SIGTERM between two updates": (signal.SIGTERM, updated(1)),
    "kill -9 of the launcher": (signal.SIGKILL, generating(1)),
    "kill -9 of the launcher as an iteration ends": (signal.SIGKILL, _happened("checkpoint_saved")),
}


@pytest.mark.parametrize("case", STOPS)
async def test_a_stopped_run_leaves_nothing_behind_and_resumes(case: str, want_checksum: str, tmp_path: Path) -> None:
    number, when = STOPS[case]
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(when)
        below = job.processes()
        job.process.send_signal(number)
        status = await job.process.wait()
        assert status == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
        assert not _alive(below)
    await _resumed(tmp_path, want_checksum)


async def test_a_killed_job_resumes_twice(want_checksum: str, tmp_path: Path) -> None:
    for iteration in (0, 1):
        async with running(small_job("plain"), tmp_path, *(["--resume"] if iteration else [])) as job:
            await job.until(generating(iteration))
            job.process.send_signal(signal.SIGINT)
            await job.process.wait()
    await _resumed(tmp_path, want_checksum)


async def test_a_resume_without_the_servers_data_starts_from_the_checkpoint(want_checksum: str, tmp_path: Path) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        await job.until(generating(2))
        job.process.send_signal(signal.SIGKILL)
        await job.process.wait()
        servers = job.folder.servers
    await asyncio.to_thread(shutil.rmtree, servers)
    await _resumed(tmp_path, want_checksum)


async def _resumed(folder: Path, want_checksum: str) -> None:
    async with running(small_job("plain"), folder, "--resume") as job:
        result = await job.result()
        summary = result["summary"]
        assert trained_draws(job.folder.journal) == DRAWS
        assert (summary["lost"], summary["duplicates"]) == (0, 0)
        assert summary["weights_checksum"] == want_checksum


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=5)[1]
