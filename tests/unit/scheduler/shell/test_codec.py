"""States survive encoding, and events decode to their values; anything else is refused with its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.decide.proposals import proposal_of
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.shell.codecs.plain import to_plain
from services.scheduler.shell.codecs.state_codec import (
    STATE_FORMAT,
    StateEncoder,
    decode_state,
    encode_state,
    event_of,
    job_spec,
)
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Component, Down, Loaded, Suspended, Working
from services.scheduler.state.costs import ASSUMED_COSTS
from services.scheduler.state.switch_costs import ReshardCosts
from services.scheduler.state.values import Fate, Placed
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, gpu, spec
from tidegate.codec import WireError, encode_role
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.events import EventSource
from tidegate.types import GpuId, Grant, InstanceId, Layout, NodeId, Role, Token
from tidegate.v1 import events_pb2, types_pb2

CONFIG: dict[str, Any] = {
    "job": "tide",
    "seed": 3,
    "cluster": {
        "nodes": {"n0": 4},
        "component_placement": {"actor": "0-1", "rollout": "2", "inference": "3"},
    },
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_seq_len": 64,
    },
    "task": {"name": "count"},
    "algorithm": {
        "iterations": 5,
        "prompts_per_iteration": 8,
        "group_size": 4,
        "n_minibatches": 2,
        "max_new_tokens": 16,
        "kl_coefficient": 0.1,
        "filter_zero_std": True,
        "max_extra_prompts": 6,
    },
    "actor": {"layout": {"dp": 2}, "learning_rate": 1e-3},
    "runtime": {"command_deadline_s": 2.5, "max_actor_restarts": 1},
}

TOKEN = Token(1, 2)
AT_WORK = Working(
    grants=(Grant(gpu("n0", 0), TOKEN),),
    placed=Placed((gpu("n0", 0), gpu("n0", 1)), Layout(dp=2)),
    loaded=Loaded(1, 2, "files-2"),
    has_reference=True,
    dead_members=(Grant(gpu("n0", 1), TOKEN),),
    num_deaths=1,
)


def config() -> JobConfig:
    return parse_config(CONFIG)


@pytest.fixture(scope="module")
def seen() -> list[ClusterState]:
    """A state after every step of a job in which things die."""
    drive = booted(FakeCluster(spec()))
    states = [drive.state]
    for number in range(400):
        if number == 30:
            drive.cluster.kill_worker(gpu("n1", 2))
        if number == 45:
            drive.cluster.kill_instance(InstanceId("actor@n0"), tells=True)
        if not drive.step():
            break
        states.append(drive.state)
    return states


def test_every_state_of_a_job_reads_back_as_it_was_written(seen: list[ClusterState]) -> None:
    assert len(seen) > 60

    for state in seen:
        encoded = encode_state(state)
        assert decode_state(encoded) == state
        assert encode_state(decode_state(encoded)) == encoded


def test_the_bytes_do_not_depend_on_the_state_before(seen: list[ClusterState]) -> None:
    encoder = StateEncoder()
    for state in (*seen, *reversed(seen)):
        assert encoder.encode(state) == encode_state(state)


@pytest.mark.parametrize("case", [Down(), Suspended(), Suspended(AT_WORK.placed, 2), AT_WORK])
def test_each_case_of_a_component_reads_back_as_it_was_written(case: Down | Working | Suspended) -> None:
    state = ClusterState(job=JOB, components={role: Component(state=case) for role in Role})

    assert decode_state(encode_state(state)) == state


NOT_A_STATE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda document: document | {"format": STATE_FORMAT + 1}, f"format {STATE_FORMAT + 1}"),
    "of code that knew of no absences": (
        lambda document: changed(document, "absent", drop=True) | {"format": 1},
        f"format 1, this code reads {STATE_FORMAT}: use the code that wrote it",
    ),
    "of code that knew of no kinds of a part": (
        lambda document: document | {"format": 3},
        f"format 3, this code reads {STATE_FORMAT}: use the code that wrote it",
    ),
    "no state": (lambda document: {"format": STATE_FORMAT}, "format None"),
    "a list": (lambda document: [1], "format None"),
    "a field is missing": (lambda document: changed(document, "spec", drop=True), "spec missing or unknown"),
    "a field too many": (lambda document: changed(document, "colour", 1), "colour missing or unknown"),
    "a number as text": (lambda document: changed(document, "version", "3"), "state.version is str, it must be int"),
    "a truth value as a number": (lambda document: changed(document, "version", True), "state.version is bool"),
    "an unknown phase": (lambda document: changed(document, "phase", "asleep"), "asleep"),
    "a map as a list": (lambda document: changed(document, "gpus", []), "state.gpus is list, it must be dict"),
    "a component that works without a GPU": (
        lambda document: with_actor(document, to_plain(AT_WORK) | {"grants": []}),
        "works in layout .* without a GPU",
    ),
    "a component that is suspended with a GPU": (
        lambda document: with_actor(document, {"case": "suspended", "placed": None, "num_deaths": 0, "grants": []}),
        r"state\.components\.actor\.state does not hold the fields of Suspended: grants missing or unknown",
    ),
    "a component in a case that there is not": (
        lambda document: with_actor(document, {"case": "asleep"}),
        "is the case 'asleep', it must be one of down, working, suspended",
    ),
    "a component in no case": (lambda document: with_actor(document, {}), "is the case None, it must be one of"),
    "a version that is no number": (lambda document: changed(document, "snapshots", {"x": {}}), "the key 'x'"),
}


def changed(document: dict[str, Any], name: str, value: object = None, *, drop: bool = False) -> dict[str, Any]:
    fields = {key: each for key, each in document["state"].items() if not (drop and key == name)}
    return document | {"state": fields if drop else fields | {name: value}}


def with_actor(document: dict[str, Any], state: dict[str, object]) -> dict[str, Any]:
    components = document["state"]["components"]
    return changed(document, "components", components | {"actor": components["actor"] | {"state": state}})


@pytest.mark.parametrize("case", NOT_A_STATE)
def test_bytes_that_hold_no_state_are_refused_with_the_place(seen: list[ClusterState], case: str) -> None:
    spoil, want = NOT_A_STATE[case]
    document = json.loads(encode_state(seen[-1]))

    with pytest.raises(ValueError, match=want):
        decode_state(json.dumps(spoil(document)).encode())


def test_bytes_that_are_no_json_are_refused() -> None:
    with pytest.raises(ValueError, match="4 bytes that are no JSON"):
        decode_state(b"\x00\x01\x02\x03")


def source(name: str = "actor@n0", role: Role | None = Role.ACTOR) -> EventSource:
    return EventSource(name, role=role, boot=2, now_ns=lambda: 5)


GRANT = types_pb2.Grant(gpu="n0/1", token=types_pb2.Token(term=1, counter=4))
WANT_GRANT = Grant(gpu("n0", 1), Token(1, 4))
FATE = types_pb2.Fate(reason="zero_std", num_samples=3, ids_digest=2**64 - 1)
BODIES: dict[str, tuple[Any, ev.Body]] = {
    "progress": (
        events_pb2.Progress(num_done=1, num_total=2, phase="train", metrics={"loss": 0.5, "a": 1.0}),
        ev.Progress((("a", 1.0), ("loss", 0.5)), 1, 2, "train"),
    ),
    "backlog": (events_pb2.Backlog(queue="scored", num_messages=3), ev.Backlog("scored", 3)),
    "released": (events_pb2.GpusReleased(grants=[GRANT]), ev.GpusReleased((WANT_GRANT,))),
    "acquired": (events_pb2.GpusAcquired(grants=[GRANT]), ev.GpusAcquired((WANT_GRANT,))),
    "layout committed": (
        events_pb2.LayoutCommitted(layout=types_pb2.Layout(dp=2), grants=[GRANT], next_iteration=4, next_prompt=9),
        ev.LayoutCommitted(Layout(dp=2), (WANT_GRANT,), 4, 9),
    ),
    "failed": (
        events_pb2.Failed(what=events_pb2.Failed.WHAT_WORKER, grants=[GRANT], exit_status=-9, message="killed"),
        ev.Failed(ev.FailedWhat.WORKER, (WANT_GRANT,), -9, "killed", fatal=False),
    ),
    "joined": (
        events_pb2.InstanceJoined(instance="actor@n0", endpoint="localhost:1", boot=2),
        ev.InstanceJoined(InstanceId("actor@n0"), "localhost:1", 2),
    ),
    "lost": (
        events_pb2.InstanceLost(instance="actor@n0", boot=2),
        ev.InstanceLost(InstanceId("actor@n0"), 2),
    ),
    "lead elected": (
        events_pb2.LeadElected(instance="actor@n0", endpoint="localhost:1", epoch=7),
        ev.LeadElected(InstanceId("actor@n0"), "localhost:1", 7),
    ),
    "loaded": (events_pb2.WeightsLoaded(version=3, checksum="c"), ev.WeightsLoaded(3, "c")),
    "reported": (
        events_pb2.IterationReported(filtered=[FATE], num_duplicates_dropped=2, metrics={"loss": 0.5}),
        ev.IterationReported(Fate(), Fate(), (Fate("zero_std", 3, 2**64 - 1),), (), 2, (("loss", 0.5),)),
    ),
    "evaluation reported": (
        events_pb2.EvaluationReported(version=4, num_prompts=8, samples_per_prompt=2, metrics={"b": 0.5, "a": 1.0}),
        ev.EvaluationReported(4, 8, 2, (("a", 1.0), ("b", 0.5))),
    ),
    "checkpoint saved": (
        events_pb2.CheckpointSaved(next_iteration=2, version=2, name="c2", num_samples_trained=9),
        ev.CheckpointSaved(2, 2, "c2", 9),
    ),
    "dead-lettered": (
        events_pb2.DeadLettered(subject="s", reason="r", dead_letter=4),
        ev.DeadLettered("s", "r", 4),
    ),
    "cancelled": (events_pb2.JobCancelRequested(reason="r"), ev.JobCancelRequested("r")),
    "resumed": (events_pb2.JobResumeRequested(), ev.JobResumeRequested()),
    "a resize is asked": (
        events_pb2.ResizeRequested(layout=types_pb2.Layout(tp=2), gpus=["n0/1", "n0/0"]),
        ev.ResizeRequested(Placed((GpuId("n0/1"), GpuId("n0/0")), Layout(tp=2))),
    ),
    "a resize failed": (events_pb2.ResizeFailed(message="no memory"), ev.ResizeFailed("no memory")),
    "a split is asked": (
        events_pb2.SplitRequested(
            places=[
                types_pb2.RolePlace(role=encode_role(role), layout=types_pb2.Layout(tp=1), gpus=[f"n0/{index}"])
                for index, role in enumerate(Role)
            ]
        ),
        ev.SplitRequested({role: Placed((gpu("n0", index),), Layout()) for index, role in enumerate(Role)}),
    ),
    "GPUs are drained": (events_pb2.DrainRequested(gpus=["n0/1"]), ev.DrainRequested((gpu("n0", 1),), False)),
    "GPUs are given back": (
        events_pb2.DrainRequested(gpus=["n0/1"], undo=True),
        ev.DrainRequested((gpu("n0", 1),), True),
    ),
    "gate reported": (
        events_pb2.GateReported(
            node="n0", gpus=[events_pb2.GateState(gpu="n0/1", highest_token=GRANT.token, held=True)]
        ),
        ev.GateReported(NodeId("n0"), (ev.GateState(gpu("n0", 1), Token(1, 4), held=True),)),
    ),
    "answered": (
        events_pb2.CommandAnswered(command_id="c/a0", accepted=True, message=""),
        ev.CommandAnswered("c/a0", True, ""),
    ),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_message_decodes_to_the_value_of_its_event(case: str) -> None:
    message, want = BODIES[case]

    event = event_of(source().event(message, job=JOB, incarnation=3, iteration=1), stream_sequence=8)

    assert event.body == want
    assert (event.source, event.boot, event.sequence, event.role) == ("actor@n0", 2, 1, Role.ACTOR)
    assert (event.incarnation, event.iteration, event.stream_sequence) == (3, 1, 8)


def test_published_snapshots_are_carried_through_unread_with_the_reference() -> None:
    snapshot = types_pb2.Snapshot(job="tide", incarnation=1, version=4, checksum="c", grants=[GRANT])
    reference = types_pb2.Snapshot(job="tide", incarnation=1, version=0, checksum="r")
    published = events_pb2.WeightsPublished(snapshot=snapshot, reference=reference)

    body = event_of(source().event(published, job=JOB, incarnation=1)).body

    assert isinstance(body, ev.WeightsPublished)
    assert (body.snapshot.version, body.snapshot.checksum) == (4, "c")
    assert types_pb2.Snapshot.FromString(body.snapshot.message) == snapshot
    assert body.reference is not None
    assert types_pb2.Snapshot.FromString(body.reference.message) == reference


def test_a_submission_carries_what_the_scheduler_needs_of_the_config() -> None:
    submitted = events_pb2.JobSubmitted(config_json=config().to_json(), resume=True)

    body = event_of(source("launcher", None).event(submitted, job=JOB, incarnation=0)).body

    assert isinstance(body, ev.JobSubmitted)
    assert body.resume
    got = body.spec
    assert (got.num_iterations, got.num_prompts, got.group_size, got.num_minibatches, got.seed) == (5, 8, 4, 2, 3)
    assert (got.uses_reference, got.max_actor_restarts, got.command_deadline_ms) == (True, 1, 2500)
    assert got.placement[Role.ACTOR].gpus == (gpu("n0", 0), gpu("n0", 1))
    assert got.placement[Role.ACTOR].layout == Layout(dp=2)
    assert got.evaluate_every is None
    plan = got.plan(iteration=2, version=2, first_prompt=17)
    assert (plan.iteration, plan.first_prompt, plan.max_extra_prompts) == (2, 17, 6)


REFUSED: dict[str, tuple[Any, str]] = {
    "a config that is none": (events_pb2.JobSubmitted(config_json="{}"), "JobSubmitted.config_json"),
    "a failure of nothing": (events_pb2.Failed(message="?"), "Failed.what"),
    "an instance without a node": (
        events_pb2.InstanceJoined(instance="actor", endpoint="e", boot=1),
        "must be <role>@<node>",
    ),
    "an election without an epoch": (events_pb2.LeadElected(instance="actor@n0", endpoint="e"), "epoch"),
    "weights without a checksum": (
        events_pb2.WeightsPublished(snapshot=types_pb2.Snapshot(incarnation=1)),
        "checksum",
    ),
    "weights without a snapshot": (events_pb2.WeightsPublished(), "snapshot"),
    "a grant without a token": (events_pb2.GpusReleased(grants=[types_pb2.Grant(gpu="n0/1")]), "token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_message_that_its_schema_does_not_allow_is_refused_with_the_field(case: str) -> None:
    message, want = REFUSED[case]

    with pytest.raises(WireError, match=want):
        event_of(source().event(message, job=JOB, incarnation=1))


def test_the_times_and_lengths_that_a_config_assumes_are_in_the_jobs_spec() -> None:
    assumed = job_spec(config())
    assert assumed.costs == ASSUMED_COSTS
    assert assumed.lengths.max_tokens == CONFIG["algorithm"]["max_new_tokens"]
    assert math.exp(assumed.lengths.log_mean) == pytest.approx(16 * 7050 / 27_648)
    most = sum(CONFIG["cluster"]["nodes"].values())
    assert [size for size, _ in assumed.rates.trainer] == [1, most]
    rates = [rate for _, rate in assumed.rates.trainer]
    assert rates == pytest.approx([182_000 * (1 / 64) ** 0.4, 182_000 * (most / 64) ** 0.4])

    costs = {"decode_floor_s": 0.5, "update_s": 2.0, "trainer_tokens_per_s": 100.0, "trainer_gpus": 1}
    assumptions = {"costs": costs, "lengths": {"median_tokens": 5.0, "sigma_hint": 0.7}}
    assumed = job_spec(parse_config({**CONFIG, "assumptions": assumptions}))
    assert (assumed.costs.decode.floor_s, assumed.costs.update_s, assumed.rates.trainer[0]) == (0.5, 2.0, (1, 100.0))
    assert (assumed.lengths.log_mean, assumed.lengths.sigma_hint) == (math.log(5.0), 0.7)
    assert assumed.costs.reshard is None

    costs = {"weight_bytes": 200, "optimizer_bytes": 1200, "communicators_s": 0.1, "reshard_bytes_per_s": 50.0}
    priced = job_spec(parse_config({**CONFIG, "assumptions": {"costs": costs}}))
    assert priced.costs.reshard == ReshardCosts(
        0.5, 0.1, 50.0, 200, 1200, gpus_per_host=max(CONFIG["cluster"]["nodes"].values())
    )


@pytest.mark.parametrize("rate", [1e-3, 1e15])
@pytest.mark.parametrize("num_gpus", [1, 65_536])
def test_whatever_rate_a_config_may_set_has_a_rate_on_every_number_of_gpus(rate: float, num_gpus: int) -> None:
    assumed = {"trainer_tokens_per_s": rate, "inference_tokens_per_s": rate, "trainer_gpus": num_gpus}
    costs = assumed | {"trainer_exponent": 1.0}
    spec = job_spec(parse_config({**CONFIG, "assumptions": {"costs": costs}}))
    assert [size for size, _ in spec.rates.trainer] == [1, 4]


def test_the_static_policy_proposes_the_configured_placement_whatever_happened(seen: list[ClusterState]) -> None:
    submitted = [state for state in seen if state.spec is not None]
    for state in submitted:
        proposed = proposal_of(state, StaticPolicy(), 5)
        assert state.spec is not None
        assert dict(proposed.proposal.placement) == dict(state.spec.placement)
        assert (proposed.remembered, proposed.ask_at_ms) == (state.remembered, None)
    assert len(submitted) > 10
    assert job_spec(config()).placement[Role.INFERENCE].gpus == (gpu("n0", 3),)
    assert job_spec(config()).num_logical_shards is None
    reproducible = {**CONFIG, "actor": {**CONFIG.get("actor", {}), "num_logical_shards": 8}}
    assert job_spec(parse_config(reproducible)).num_logical_shards == 8


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_a_gpu_on_which_a_component_stands_by_is_the_jobs_though_none_is_placed_on_it(role: str) -> None:
    larger = {**CONFIG, "cluster": {**CONFIG["cluster"], "nodes": {"n0": 5}}}
    spec = job_spec(parse_config({**larger, role: {**CONFIG.get(role, {}), "standby": "4"}}))
    assert spec.standby == (gpu("n0", 4),)
    assert gpu("n0", 4) in spec.gpus
    assert gpu("n0", 4) not in job_spec(parse_config(larger)).gpus
