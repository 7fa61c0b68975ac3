"""The main job, whole: it repeats bit for bit, listens on loopback only, and the loss of any lead changes nothing."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path
from typing import Any

import grpc
import nats
import nats.errors
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from services.scheduler.evolve.recovering import recovered
from services.scheduler.shell.codecs.state_codec import event_of
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.events import Event
from services.scheduler.state.observed import Generation, Inferring, Training
from simulator.calibration import fitted_values
from tests.e2e.jobs import Condition, RunningJob, calm_job, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws, without_incarnation
from tidegate.adapters.redis_keys import table_key
from tidegate.config.job_config import JobConfig
from tidegate.launcher.control import read_endpoint
from tidegate.launcher.event_file import read_events
from tidegate.recorded import recorded
from tidegate.types import JobId, Role

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the job when nothing happens. Each process of tests makes its own."""

    async def made() -> dict[str, Any]:
        async with running(small_job("plain"), tmp_path_factory.mktemp("undisturbed")) as job:
            return {"result": await job.result(), "lineage": without_incarnation(job.folder.journal)}

    return asyncio.run(made())


async def test_a_job_trains_each_sample_once_listens_on_loopback_and_answers_nobody_without_its_credential(
    tmp_path: Path,
) -> None:
    async with running(calm_job("plain"), tmp_path) as job:
        await job.until_trained(3)
        rank = job.worker("n0/0", "actor")
        rank.suspend()  # so that the job goes on as long as it is looked at
        sockets = _listening(job)
        await assert_answers_nobody_without_its_credential(job)
        rank.resume()
        result = await job.result()
        assert len(sockets) >= 9, "seven services, NATS and the store listen at least"
        assert all(_is_loopback(host) for host in sockets), sockets
        assert trained_draws(job.folder.journal) == DRAWS
        assert not any(job.gates().values())
    events = [event_of(row.event, stream_sequence=row.stream_sequence) for row in read_events(job.folder.events)]
    assert events[0].source == "launcher", "the job is submitted before a service can join"
    assert_record_shows_the_job(events)
    assert_can_be_calibrated_from(job, result)
    summary = result["summary"]
    want = {"iterations": 3, "samples_generated": 96, "samples_trained": 96, "duplicates": 0, "lost": 0}
    assert {key: summary[key] for key in want} == want


async def assert_answers_nobody_without_its_credential(job: RunningJob) -> None:
    """Asks as another local user would, who knows every address."""
    rows = read_events(job.folder.events)
    joined = [row.event for row in rows if row.event.HasField("instance_joined")]
    latest = {each.source: each.instance_joined.endpoint for each in joined}
    endpoints = [read_endpoint(job.folder)[0], *latest.values()]
    assert len(endpoints) == 7
    for endpoint in endpoints:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    servers = JobConfig.read(job.folder.config).servers
    with pytest.raises((nats.errors.Error, OSError)):
        await nats.connect(servers.nats_url, allow_reconnect=False, error_cb=_ignored)
    async with Redis.from_url(servers.redis_url, protocol=2) as redis:
        with pytest.raises(AuthenticationError):
            await redis.hgetall(table_key("gpus"))
    assert_no_secret_is_written_anywhere(job)


def assert_no_secret_is_written_anywhere(job: RunningJob) -> None:
    found = [path for kind in ("*.jsonl", "*.out", "*.yaml", "*.json") for path in job.folder.root.rglob(kind)]
    texts = [path.read_text(errors="replace") for path in found]
    texts += [" ".join(each.cmdline()) for each in job.processes()]
    memory = Path(JobConfig.read(job.folder.config).runtime.host_memory_root)
    secrets = [path.read_text() for path in memory.glob("credentials/*/store.password")]
    assert len(secrets) == 4
    assert not [secret for secret in (*secrets, "PRIVATE KEY") if any(secret in text for text in texts)]


async def _ignored(_: Exception) -> None:
    """The error is raised too."""


def assert_can_be_calibrated_from(job: RunningJob, result: dict[str, Any]) -> None:
    run = recorded(job.folder.root)
    metrics = [row["metrics"] for row in result["job"]["iterations"]]
    assert [each.num_tokens / 32 for each in run.iterations] == [row["response_tokens_mean"] for row in metrics]
    for each in run.iterations:
        assert [len(each.lengths), len(each.lengths[0]), len(each.minibatches)] == [8, 4, 2]
        assert sum(part.num_tokens for part in each.minibatches) == each.num_tokens + 32 * run.prompt_tokens
        assert 0 < each.generating_s < each.seconds
        assert 0 < sum(part.seconds for part in each.minibatches) < each.seconds
    found = {each.key: each.value for each in fitted_values(run)}
    assert 0 < found["costs.sync.fixed_s"] < max(each.seconds for each in run.iterations)


@pytest.mark.long
async def test_the_same_seed_gives_the_same_samples_and_the_same_weights(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        again = await job.result()
        assert without_incarnation(job.folder.journal) == undisturbed["lineage"]
    assert _repeatable(again) == _repeatable(undisturbed["result"])


@pytest.mark.long
async def test_responses_are_scored_ahead_of_their_groups_and_each_is_trained_once(tmp_path: Path) -> None:
    raw = small_job("ahead", actor__num_logical_shards=None, scheduler__decide_every_s=0.05, algorithm__iterations=2)
    async with running(raw, tmp_path) as job:
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == expected_draws(iterations=2, prompts=8, group_size=4)
        assert max(event.inferring.num_tokens_ahead for event in job.events) > 0
    assert (summary["lost"], summary["duplicates"]) == (0, 0)


@pytest.mark.long
async def test_slots_that_share_a_device_change_neither_samples_nor_weights(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    raw = small_job("plain", cluster__slots_per_gpu=4)
    async with running(raw, tmp_path) as job:
        shared = await job.result()
        assert without_incarnation(job.folder.journal) == undisturbed["lineage"]
    assert _repeatable(shared) == _repeatable(undisturbed["result"])


@pytest.mark.long
async def test_the_loss_of_every_lead_in_one_job_changes_neither_samples_nor_weights(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    async with running(small_job("plain"), tmp_path) as job:
        await _kill_lead(job, Role.ROLLOUT, generating(0))
        await _kill_lead(job, Role.INFERENCE, generating(1))
        await _kill_lead(job, Role.ACTOR, updated(1))
        await job.until(lambda event: event.incarnation == 2 and generating(1)(event))
        job.service("services.scheduler").kill()
        disturbed = await job.result()
        assert trained_draws(job.folder.journal) == DRAWS
        assert without_incarnation(job.folder.journal) == undisturbed["lineage"]
    assert disturbed["summary"]["weights_checksum"] == undisturbed["result"]["summary"]["weights_checksum"]
    assert (disturbed["summary"]["lost"], disturbed["summary"]["duplicates"]) == (0, 0)


def assert_record_shows_the_job(events: list[Event]) -> None:
    """Reads the events of its folder alone: the fate of each iteration, and how each component was at its end."""
    again = recovered(ClusterState(job=JobId("plain")), events)
    assert [(each.iteration, each.num_lost, each.num_duplicates) for each in again.summaries] == [
        (iteration, 0, 0) for iteration in range(3)
    ]
    last = {(type(event.body), event.iteration): event.body for event in events}
    for iteration in range(3):
        generation, inferring, training = (last[kind, iteration] for kind in (Generation, Inferring, Training))
        assert isinstance(generation, Generation)
        assert isinstance(inferring, Inferring)
        assert isinstance(training, Training)
        assert (generation.num_groups, generation.num_unfinished, min(generation.lengths) > 0) == (8, 0, True)
        assert sorted(inferring.ready) == list(range(8))
        assert (training.num_taken, training.is_at_boundary) == (8, True)


def _repeatable(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result["summary"].items() if key not in ("wall_s", "timeline")}


async def _kill_lead(job: RunningJob, role: Role, when: Condition) -> None:
    await job.until(when)
    elected = [event for event in job.events if event.HasField("lead_elected") and event.source.startswith(f"{role}@")]
    node = elected[-1].source.partition("@")[2]
    job.service(f"services.{role}", node).kill()


def _listening(job: RunningJob) -> list[str]:
    """The addresses that any process of the job listens on."""
    return [
        connection.laddr.ip
        for process in [psutil.Process(job.process.pid), *job.processes()]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def _is_loopback(host: str) -> bool:
    # gRPC binds an IPv4 address on an IPv6 socket.
    return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
