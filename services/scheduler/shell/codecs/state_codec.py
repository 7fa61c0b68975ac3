"""Decodes the wire's events into the scheduler's values, and converts a state to bytes and back.

Invariants:
- `decode_state(encode_state(state)) == state`, and equal states have equal bytes, whichever replica wrote them, and
  whatever it wrote before. [test_codec: every_state_of_a_job] [test_codec: bytes_do_not_depend_on_the_state_before]
- Bytes that are no state of this format are refused with a ValueError that names the place.
  [test_codec: bytes_that_hold_no_state]
- An event that its schema does not allow is refused with a WireError and never reaches `evolve`.
  [test_codec: its_schema_does_not_allow]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from services.scheduler.policy.registry import ENTRIES
from services.scheduler.shell.codecs.memory_codec import MemoryCodec
from services.scheduler.shell.codecs.observed_codec import generation_of, inferring_of, training_of
from services.scheduler.shell.codecs.plain import from_plain, to_plain
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.costs import costs_of, lengths_of, rates_of
from services.scheduler.state.values import Fate, JobSpec, Placed, Snapshot
from tidegate.codec import (
    WireError,
    decode_gpu,
    decode_gpus,
    decode_grants,
    decode_layout,
    decode_role,
    decode_token,
    require,
)
from tidegate.config.checks.actor_layouts import policy_layouts
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.events import body_of
from tidegate.json_text import parse_json
from tidegate.types import NO_TOKEN, InstanceId, NodeId, Role, Token
from tidegate.v1 import events_pb2, types_pb2

STATE_FORMAT = 16
"""Raise it with every change of the fields of a state. Otherwise a state of the old format is read wrongly, or is
refused for a field without a remedy."""

_MEMORIES = MemoryCodec({policy: entry.memory for policy, entry in ENTRIES.items()})


def job_spec(config: JobConfig) -> JobSpec:
    """The fields of a job's config that the scheduler needs."""
    algorithm, runtime = config.algorithm, config.runtime
    placed = {gpu for role in Role for gpu in config.placement(role)}
    return JobSpec(
        placement={role: Placed(gpus=config.placement(role), layout=config.layout(role)) for role in Role},
        num_iterations=algorithm.iterations,
        num_prompts=algorithm.prompts_per_iteration,
        group_size=algorithm.group_size,
        num_minibatches=algorithm.n_minibatches,
        seed=config.seed,
        uses_reference=algorithm.kl_coefficient > 0,
        max_actor_restarts=runtime.max_actor_restarts,
        command_deadline_ms=round(runtime.command_deadline_s * 1000),
        standby=tuple(gpu for gpu in config.gpus if gpu not in placed),
        max_extra_prompts=algorithm.max_extra_prompts,
        evaluate_every=config.evaluation.every if config.evaluation else None,
        minibatch_order=algorithm.minibatch_order,
        streams=config.actor.streams_minibatches,
        carries_gradients=config.actor.carries_gradients,
        scores_ahead=config.scores_ahead,
        num_logical_shards=config.actor.num_logical_shards,
        layouts=policy_layouts(config),
        costs=costs_of(config.assumptions.costs, gpus_per_host=max(config.cluster.nodes.values())),
        rates=rates_of(config.assumptions.costs, num_gpus=len(config.cluster.gpus())),
        lengths=lengths_of(config.assumptions.lengths, max_new_tokens=algorithm.max_new_tokens),
    )


def event_of(message: events_pb2.Event, *, stream_sequence: int | None = None) -> ev.Event:
    """The event of a checked message. WireError names the field that is wrong."""
    return ev.Event(
        job=message.job,
        source=message.source,
        boot=message.boot,
        sequence=message.sequence,
        body=_body(message),
        incarnation=message.incarnation,
        iteration=message.iteration,
        transition_id=message.transition_id,
        grants=decode_grants(message.grants),
        role=decode_role(message.role, field="Event.role") if message.role else None,
        stream_sequence=stream_sequence,
    )


def _body(message: events_pb2.Event) -> ev.Body:
    body = body_of(message)
    convert = _BODIES[type(body)]
    return convert(body)


def _failed(body: events_pb2.Failed) -> ev.Failed:
    what = {
        events_pb2.Failed.WHAT_WORKER: ev.FailedWhat.WORKER,
        events_pb2.Failed.WHAT_COMPONENT: ev.FailedWhat.COMPONENT,
        events_pb2.Failed.WHAT_SAMPLE: ev.FailedWhat.SAMPLE,
    }.get(body.what)
    if what is None:
        raise WireError(f"Failed.what is {body.what}; it must be a worker, a component or a sample")
    return ev.Failed(
        what=what,
        grants=decode_grants(body.grants),
        exit_status=body.exit_status,
        message=body.message,
        fatal=body.fatal,
    )


def _instance(name: str, *, field: str) -> InstanceId:
    role, at, node = name.partition("@")
    if role not in tuple(Role) or not at or not node:
        raise WireError(f"{field} is {name!r}; it must be <role>@<node>")
    return InstanceId(name)


def _lead_elected(body: events_pb2.LeadElected) -> ev.LeadElected:
    require(body, "endpoint", "epoch")
    return ev.LeadElected(_instance(body.instance, field="LeadElected.instance"), body.endpoint, body.epoch)


def _joined(body: events_pb2.InstanceJoined) -> ev.InstanceJoined:
    require(body, "endpoint", "boot")
    instance = _instance(body.instance, field="InstanceJoined.instance")
    return ev.InstanceJoined(instance, body.endpoint, body.boot, decode_grants(body.gates))


def _published(body: events_pb2.WeightsPublished) -> ev.WeightsPublished:
    require(body, "snapshot")
    require(body.snapshot, "checksum", "incarnation")
    reference = snapshot_of(body.reference) if body.HasField("reference") else None
    return ev.WeightsPublished(snapshot_of(body.snapshot), reference)


def snapshot_of(message: types_pb2.Snapshot) -> Snapshot:
    return Snapshot(
        incarnation=message.incarnation,
        version=message.version,
        checksum=message.checksum,
        weights_checksum=message.weights_checksum,
        message=message.SerializeToString(deterministic=True),
    )


def _fate(message: types_pb2.Fate) -> Fate:
    return Fate(reason=message.reason, num_samples=message.num_samples, ids_digest=message.ids_digest)


def _reported(body: events_pb2.IterationReported) -> ev.IterationReported:
    return ev.IterationReported(
        generated=_fate(body.generated),
        trained=_fate(body.trained),
        filtered=tuple(_fate(each) for each in body.filtered),
        discarded=tuple(_fate(each) for each in body.discarded),
        num_duplicates_dropped=body.num_duplicates_dropped,
        metrics=tuple(sorted(body.metrics.items())),
    )


def _submitted(body: events_pb2.JobSubmitted) -> ev.JobSubmitted:
    try:
        spec = job_spec(JobConfig.from_json(body.config_json))
    except ConfigError as error:
        raise WireError(f"JobSubmitted.config_json: {error}") from error
    return ev.JobSubmitted(spec=spec, config_json=body.config_json, resume=body.resume)


def _resize_requested(body: events_pb2.ResizeRequested) -> ev.ResizeRequested:
    require(body, "layout", "gpus")
    gpus = decode_gpus(body.gpus, field="ResizeRequested.gpus")
    return ev.ResizeRequested(Placed(gpus, decode_layout(body.layout)))


def _split_requested(body: events_pb2.SplitRequested) -> ev.SplitRequested:
    places = {}
    for place in body.places:
        role, placed = decode_place(place, field="SplitRequested.places")
        places[role] = placed
    if missing := [role for role in Role if role not in places]:
        raise WireError(f"SplitRequested.places has no {', '.join(missing)}; it must have every component")
    return ev.SplitRequested({role: places[role] for role in Role})


def decode_place(place: types_pb2.RolePlace, *, field: str) -> tuple[Role, Placed]:
    require(place, "layout", "gpus")
    role = decode_role(place.role, field=f"{field}.role")
    return role, Placed(decode_gpus(place.gpus, field=f"{field}.gpus"), decode_layout(place.layout))


def _drain_requested(body: events_pb2.DrainRequested) -> ev.DrainRequested:
    require(body, "gpus")
    return ev.DrainRequested(decode_gpus(body.gpus, field="DrainRequested.gpus"), is_undone=body.undo)


def _gate_reported(body: events_pb2.GateReported) -> ev.GateReported:
    gates = []
    for gate in body.gpus:
        require(gate, "gpu")
        gpu = decode_gpu(gate.gpu, field="GateState.gpu")
        gates.append(ev.GateState(gpu, _highest_token(gate), gate.held))
    return ev.GateReported(node=NodeId(body.node), gpus=tuple(gates))


def _highest_token(gate: events_pb2.GateState) -> Token:
    """A gate that no owner ever passed, as after a death at its first attempt, reports no token."""
    return decode_token(gate.highest_token) if gate.HasField("highest_token") else NO_TOKEN


_BODIES: dict[type, Callable[[Any], ev.Body]] = {
    events_pb2.Progress: lambda body: ev.Progress(
        tuple(sorted(body.metrics.items())), body.num_done, body.num_total, body.phase
    ),
    events_pb2.Backlog: lambda body: ev.Backlog(body.queue, body.num_messages),
    events_pb2.GpusReleased: lambda body: ev.GpusReleased(decode_grants(body.grants)),
    events_pb2.GpusAcquired: lambda body: ev.GpusAcquired(decode_grants(body.grants)),
    events_pb2.LayoutCommitted: lambda body: ev.LayoutCommitted(
        decode_layout(body.layout), decode_grants(body.grants), body.next_iteration, body.next_prompt
    ),
    events_pb2.Failed: _failed,
    events_pb2.InstanceJoined: _joined,
    events_pb2.InstanceLost: lambda body: ev.InstanceLost(
        _instance(body.instance, field="InstanceLost.instance"), body.boot
    ),
    events_pb2.LeadElected: _lead_elected,
    events_pb2.WeightsPublished: _published,
    events_pb2.WeightsLoaded: lambda body: ev.WeightsLoaded(body.version, body.checksum),
    events_pb2.IterationReported: _reported,
    events_pb2.EvaluationReported: lambda body: ev.EvaluationReported(
        body.version, body.num_prompts, body.samples_per_prompt, tuple(sorted(body.metrics.items()))
    ),
    events_pb2.CheckpointSaved: lambda body: ev.CheckpointSaved(
        body.next_iteration, body.version, body.name, body.num_samples_trained
    ),
    events_pb2.DeadLettered: lambda body: ev.DeadLettered(body.subject, body.reason, body.dead_letter),
    events_pb2.JobSubmitted: _submitted,
    events_pb2.JobCancelRequested: lambda body: ev.JobCancelRequested(body.reason),
    events_pb2.JobResumeRequested: lambda body: ev.JobResumeRequested(),
    events_pb2.GateReported: _gate_reported,
    events_pb2.ResizeRequested: _resize_requested,
    events_pb2.SplitRequested: _split_requested,
    events_pb2.DrainRequested: _drain_requested,
    events_pb2.ResizeFailed: lambda body: ev.ResizeFailed(body.message),
    events_pb2.Generation: generation_of,
    events_pb2.Inferring: inferring_of,
    events_pb2.Training: training_of,
    events_pb2.CommandAnswered: lambda body: ev.CommandAnswered(body.command_id, body.accepted, body.message),
}


class StateEncoder:
    """Encodes one state after another. A field that is the very object of the state before is not encoded again: most
    turns change few fields, and the longest ones, such as the summaries of all iterations, rarely."""

    def __init__(self) -> None:
        self._encoded: dict[str, tuple[object, str]] = {}
        """By field: the value, and its text."""

    def encode(self, state: ClusterState) -> bytes:
        """Canonical JSON: sorted keys, no spaces."""
        own = state.remembered.own
        bare = state if own is None else replace(state, remembered=replace(state.remembered, own=None))
        names = sorted(each.name for each in fields(bare))
        texts = ",".join(f'"{name}":{self._text(name, getattr(bare, name))}' for name in names)
        memory = _dumped(_MEMORIES.encode(own))
        return f'{{"format":{STATE_FORMAT},"memory":{memory},"state":{{{texts}}}}}'.encode()

    def _text(self, name: str, value: object) -> str:
        before = self._encoded.get(name)
        if before is not None and before[0] is value:
            return before[1]
        text = _dumped(to_plain(value))
        self._encoded[name] = value, text
        return text


def _dumped(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=True)


def encode_state(state: ClusterState) -> bytes:
    """As `StateEncoder.encode`."""
    return StateEncoder().encode(state)


def decode_state(encoded: bytes) -> ClusterState:
    """Inverse of `encode_state`; ValueError on anything else."""
    try:
        document = parse_json(encoded)
    except ValueError as error:
        raise ValueError(f"not a scheduler state: {len(encoded)} bytes that are no JSON ({error})") from error
    found = document.get("format") if isinstance(document, dict) and "state" in document else None
    if found != STATE_FORMAT:
        raise ValueError(
            f"scheduler state of format {found!r}, this code reads {STATE_FORMAT}: use the code that wrote it"
        )
    state: ClusterState = from_plain(ClusterState, document["state"], "state")
    own = _MEMORIES.decode(document.get("memory"), "memory")
    return state if own is None else replace(state, remembered=replace(state.remembered, own=own))
