"""Jobs whose policy moves GPUs between components: weights, samples and accounts are those of the job that stays put.

The kills strike at each state of a transition. A job survives by itself what it can. Where a server dies it stops with
a message, and the resumed run has the same weights.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.moves import moves_of
from tests.e2e.jobs import RunningJob, running
from tests.e2e.lineage import expected_draws, trained_draws, without_incarnation
from tests.e2e.moving import (
    DRAWS,
    GROUP_SIZE,
    ITERATIONS,
    POLICIES,
    PROMPTS,
    TWO_BY_TWO,
    Moment,
    Struck,
    its_fork_server,
    its_lead,
    its_worker,
    kill,
    moved,
    moving_job,
    reached,
    service,
    worker,
)
from tests.e2e.replacing import replacing_job
from tidegate.timeline import read_spans
from tidegate.types import GpuId, Role

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.long

ACTOR, ROLLOUT, INFERENCE = Role.ACTOR, Role.ROLLOUT, Role.INFERENCE


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of the job whose GPUs stay where they are placed, which are all on one node."""

    async def static() -> dict[str, Any]:
        raw = moving_job("static", cluster__nodes={"n0": 4})
        async with running(raw, tmp_path_factory.mktemp("static")) as job:
            result = await job.result()
            assert moved(job) == set()
            return result

    checksum: str = asyncio.run(static())["summary"]["weights_checksum"]
    return checksum


def assert_as_static(job: RunningJob, result: dict[str, Any], want: str) -> None:
    summary = result["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    assert summary["weights_checksum"] == want


@pytest.mark.parametrize(
    "policy", ["tide", *(pytest.param(each, marks=LONG) for each in ("collocated", "rlinf", "dynarl"))]
)
async def test_a_job_ends_with_the_weights_of_the_static_one_while_its_gpus_move(
    policy: str, want: str, tmp_path: Path
) -> None:
    async with running(moving_job(policy), tmp_path) as job:
        assert_as_static(job, await job.result(), want)
        assert len(moved(job)) >= 1
        assert moves_of(job.folder).summary()["moves"] >= 2 * 2, "away and home, in most iterations"
        assert {event.incarnation for event in job.events if event.incarnation} == {1}
        assert {"building", "transferring", "switching", "loading_weights"} <= states_of(job)


def states_of(job: RunningJob) -> set[str]:
    """What the slots did, by the timeline of the job's last start."""
    spans = read_spans(job.folder.root / "latest" / "timeline")
    return {span.state for slot in spans.values() for span in slot}


SCHEDULER, NATS, REDIS = service("services.scheduler"), service("nats-server"), service("valkey-server")
AT: dict[str, tuple[str, Moment]] = {
    "an actor's start": ("dynarl", Moment(ACTOR, "start", "acquiring")),
    "a rollout's start": ("dynarl", Moment(ROLLOUT, "start", "acquiring")),
    "an actor that drains to be suspended": ("collocated", Moment(ACTOR, "suspend", "draining")),
    "a suspended actor": ("collocated", Moment(ACTOR, "suspend", "committed")),
    "an actor that resumes": ("collocated", Moment(ACTOR, "resume", "acquiring")),
    "an actor that shrinks": ("collocated", Moment(ACTOR, "resize", "draining")),
    "an actor that grows": ("growing", Moment(ACTOR, "resize", "acquiring")),
    "a rollout that drains": ("collocated", Moment(ROLLOUT, "suspend", "draining")),
    "a rollout that has left": ("collocated", Moment(ROLLOUT, "suspend", "committed")),
    "a rollout that comes back": ("collocated", Moment(ROLLOUT, "resume", "acquiring")),
    "an engine that comes": ("slow", Moment(ROLLOUT, "resize", "acquiring")),
    "an engine that leaves": ("slow", Moment(ROLLOUT, "resize", "draining")),
    "an inference that drains": ("collocated", Moment(INFERENCE, "suspend", "draining")),
    "an inference that has left": ("collocated", Moment(INFERENCE, "suspend", "committed")),
    "an inference that comes back": ("collocated", Moment(INFERENCE, "resume", "acquiring")),
    "a job that ends": ("tide", Moment(ACTOR, "stop", "planned")),
}
ITS: dict[str, Struck] = {"its worker": its_worker, "its lead": its_lead, "the scheduler": SCHEDULER}
OTHERS: dict[tuple[str, str], Struck] = {
    ("its fork server", "an actor that resumes"): its_fork_server,
    ("its fork server", "a rollout that comes back"): its_fork_server,
    ("its fork server", "an inference that comes back"): its_fork_server,
    ("an engine", "an actor that drains to be suspended"): worker(ROLLOUT, "n0/1"),
    ("the inference's copy", "a rollout that drains"): worker(INFERENCE, "n1/1"),
    ("a rank of the actor", "a rollout that comes back"): worker(ACTOR, "n0/0"),
}
# The worker of a job that ends has a test of its own: it is gone before one has looked for it.
SURVIVED = {(victim, at): struck for at in AT for victim, struck in ITS.items()} | OTHERS
del SURVIVED["its worker", "a job that ends"]


@pytest.mark.long
@pytest.mark.parametrize(("victim", "at"), [pytest.param(*case, id=f"{case[0]} of {case[1]}") for case in SURVIVED])
async def test_a_job_goes_on_after_a_kill_in_a_move(victim: str, at: str, want: str, tmp_path: Path) -> None:
    policy, moment = AT[at]
    async with running(moving_job(policy), tmp_path) as job:
        await kill(job, moment, SURVIVED[victim, at])
        assert_as_static(job, await job.result(), want)


@pytest.mark.long
async def test_a_job_ends_although_a_worker_of_its_actor_dies_when_it_is_stopped(want: str, tmp_path: Path) -> None:
    async with running(moving_job("tide"), tmp_path) as job:
        await job.until(lambda event: event.HasField("checkpoint_saved") and event.iteration == ITERATIONS - 2)
        workers = {gpu: job.worker(gpu, role=ACTOR) for gpu in job.config.cluster.gpus()}
        await job.until(lambda event: event.weights_published.snapshot.version == ITERATIONS)
        for each in workers.values():
            each.suspend()
        move = await reached(job, Moment(ACTOR, "stop", "planned"))
        workers.pop(GpuId(move.gpus[0])).kill()
        for each in workers.values():
            each.resume()
        assert_as_static(job, await job.result(), want)


STOPPED = ["a suspended actor", "an actor that grows", "a rollout that drains", "an engine that comes"]


@pytest.mark.long
@pytest.mark.parametrize("at", STOPPED)
@pytest.mark.parametrize("server", ["nats-server", "valkey-server"])
async def test_a_job_whose_server_dies_in_a_move_stops_with_a_message_and_resumes(
    server: str, at: str, want: str, tmp_path: Path
) -> None:
    policy, moment = AT[at]
    async with running(moving_job(policy), tmp_path) as job:
        await kill(job, moment, service(server))
        assert await job.process.wait() == 1
        assert job.process.stderr is not None
        assert "--resume" in (await job.process.stderr.read()).decode()
    async with running(moving_job(policy), tmp_path, "--resume") as job:
        assert_as_static(job, await job.result(), want)


@pytest.mark.long
async def test_evaluations_of_a_job_whose_gpus_move_have_the_figures_of_the_static_one(
    want: str, tmp_path: Path
) -> None:
    section = {"every": 1, "num_prompts": 6, "samples_per_prompt": 2, "temperature": 1.0, "max_new_tokens": 40}
    found = []
    for policy in ("static", "dynarl"):
        (folder := tmp_path / policy).mkdir()
        async with running(moving_job(policy, evaluation=section), folder) as job:
            result = await job.result()
            assert_as_static(job, result, want)
            assert bool(moved(job)) == (policy == "dynarl")
        found.append([(row.get("version", 0), row["metrics"]) for row in result["job"]["evaluations"]])
    assert [version for version, _ in found[0]] == [0, 1, 2, 3]
    assert found[1] == found[0]


@pytest.mark.long
async def test_dynamic_sampling_takes_the_same_prompts_while_gpus_move(tmp_path: Path) -> None:
    found = []
    for policy in ("static", "dynarl"):
        (folder := tmp_path / policy).mkdir()
        async with running(replacing_job(folder, **TWO_BY_TWO, **POLICIES[policy]), folder) as job:
            summary = (await job.result())["summary"]
            assert bool(moved(job)) == (policy == "dynarl")
            assert set(trained_draws(job.folder.journal).values()) == {1}
            figures = {key: value for key, value in summary.items() if key not in ("wall_s", "timeline")}
            found.append((figures, without_incarnation(job.folder.journal)))
    assert found[0][0]["samples_filtered"] > 0, "some groups were replaced"
    assert found[1] == found[0]


@pytest.mark.long
async def test_a_job_that_is_stopped_in_a_move_resumes_under_its_policy(want: str, tmp_path: Path) -> None:
    async with running(moving_job("tide"), tmp_path) as job:
        await reached(job, Moment(ACTOR, "resize", "acquiring", iteration=1))
        job.process.send_signal(signal.SIGINT)
        assert await job.process.wait() == 128 + signal.SIGINT
    async with running(moving_job("tide"), tmp_path, "--resume") as job:
        assert_as_static(job, await job.result(), want)
        assert moves_of(job.folder).summary(2)["moves"] >= 2


@pytest.mark.long
async def test_a_job_goes_on_after_a_node_loses_all_its_services_in_a_move(want: str, tmp_path: Path) -> None:
    async with running(moving_job("tide"), tmp_path) as job:
        await reached(job, Moment(ROLLOUT, "suspend", "draining", iteration=1))
        for each in [job.service(f"services.{role}", "n1") for role in Role]:
            each.kill()
        assert_as_static(job, await job.result(), want)


async def test_prompts_without_hints_are_probed_and_every_sample_is_trained_once(tmp_path: Path) -> None:
    """The first iteration has no earlier one to tell it lengths."""
    raw = moving_job("tide", algorithm__minibatch_order="arrival", algorithm__iterations=1)
    async with running(raw, tmp_path) as job:
        summary = (await job.result())["summary"]
        draws = expected_draws(iterations=1, prompts=PROMPTS, group_size=GROUP_SIZE)
        assert trained_draws(job.folder.journal) == draws
        assert (summary["lost"], summary["duplicates"]) == (0, 0)
        logs = "".join(path.read_text() for path in job.folder.attempt().logs.glob("scheduler*.jsonl"))
        assert logs.count(f"orders {PROMPTS} groups at the rollout") >= 2, "at the opening, and as responses end"
