"""Whatever bytes come as an event, a group or a state: a value, or a WireError, and every next state is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.decide.turn import checked, turn
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state, event_of
from services.scheduler.shell.requests import encode_command
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from tests import effort
from tests.component_bench import JOB as WIRE_JOB
from tests.properties import real_messages as real
from tests.properties.fuzzing import damaged_bytes, fuzzed, messages, value_or_refusal
from tests.replay.recorded import POLICIES
from tests.unit.scheduler.fake_parts import JOB, spec
from tidegate.adapters.subjects import sample_subject, subject_of_event
from tidegate.codec import WireError, decode_event, decode_group, decode_response
from tidegate.ports.bus import Stage
from tidegate.types import Role
from tidegate.v1 import events_pb2, samples_pb2, types_pb2

BODIES = tuple(events_pb2.Event.DESCRIPTOR.oneofs_by_name["body"].fields)
SOURCES = ("actor@n0", "rollout@n0", "inference@n0", "scheduler", "launcher", "control", "a/b", "@n0")
NOW_MS = 2_000_000
ALL_POLICIES = tuple(POLICIES.values())
DECODERS: dict[str, Callable[[bytes], object]] = {
    "a generated group": lambda payload: decode_group(payload, scored=False),
    "a scored group": lambda payload: decode_group(payload, scored=True),
    "a response": decode_response,
}


@st.composite
def well_formed_events(draw: st.DrawFn) -> bytes:
    """An event with the id that its source derives, and any body."""
    event = draw(messages(events_pb2.Event))
    body = draw(st.sampled_from(BODIES))
    event.ClearField("body")
    kind = type(getattr(event, body.name))
    getattr(event, body.name).CopyFrom(draw(messages(kind, whole=draw(st.booleans()))))
    getattr(event, body.name).SetInParent()
    event.job = draw(st.sampled_from([JOB, JOB, "other"]))
    event.source = draw(st.sampled_from(SOURCES))
    event.boot = draw(st.sampled_from([1, 1, 2, 2**64 - 1]))
    event.sequence = draw(st.sampled_from([1, 1000, 2**64 - 1]))
    event.incarnation = draw(st.sampled_from([1, 1, 0, 2, 2**32 - 1]))
    event.id = f"{event.source}/{event.boot}/{event.sequence}"
    if draw(st.booleans()):
        event.ClearField("grants")
    if draw(st.booleans()):
        event.ClearField("role")
    return event.SerializeToString()


def real_events() -> tuple[bytes, ...]:
    return (*real.lived_job().events, *real.other_events())


any_event = well_formed_events() | st.deferred(lambda: damaged_bytes(real_events())) | st.binary(max_size=40)
any_group = st.deferred(lambda: damaged_bytes(real.groups())) | messages(samples_pb2.SampleGroup, whole=True).map(
    lambda group: group.SerializeToString()
)


def read_event(payload: bytes) -> ev.Event:
    message = decode_event(payload)
    assert decode_event(message.SerializeToString()) == message
    assert subject_of_event(message)
    return event_of(message, stream_sequence=10**6)


@fuzzed
@given(any_event, st.data())
def test_an_event_of_any_bytes_is_refused_or_leads_to_a_legal_state(payload: bytes, data: st.DataObject) -> None:
    event = value_or_refusal(read_event, payload, WireError)
    if event is None:
        return
    state = data.draw(st.sampled_from(real.states()))
    if event.job in (JOB, WIRE_JOB):
        event = replace(event, job=state.job)
    made = turn(state, NOW_MS, data.draw(st.sampled_from(ALL_POLICIES)), events=[after_all(state, event)])
    checked(*made.states)
    after = made.folded
    if after.ignored != state.ignored and after.version == state.version:
        assert without_counts(after) == without_counts(state), "a refused event changes nothing else"
    for each in made.states:
        assert encode_state(decode_state(encode_state(each))) == encode_state(each)
    for command in made.decided.commands:
        # The fake cluster's snapshots are no messages of the wire.
        if isinstance(command, cmd.LeadCommand) and state.job == WIRE_JOB:
            assert encode_command(command, config_json=after.config_json, term=1)


def after_all(state: ClusterState, event: ev.Event) -> ev.Event:
    """The event as the next one of the stream."""
    return replace(event, stream_sequence=state.applied_seq + 1)


def without_counts(state: ClusterState) -> ClusterState:
    """The state without what a refusal counts: its reason, the place in the stream and the source's sequence."""
    return replace(state, ignored={}, applied_seq=0, clocks={})


def test_every_real_event_decodes() -> None:
    for payload in real_events():
        assert read_event(payload)


@fuzzed
@given(any_group, st.sampled_from(sorted(DECODERS)))
def test_a_group_of_any_bytes_is_refused_or_whole(payload: bytes, what: str) -> None:
    group = value_or_refusal(DECODERS[what], payload, WireError)
    if isinstance(group, samples_pb2.SampleGroup):
        assert DECODERS[what](group.SerializeToString()) == group
        assert sample_subject(Stage.SCORED, group)


@fuzzed
@given(st.deferred(lambda: damaged_bytes(real.written_states())))
def test_a_state_of_any_bytes_is_refused_or_reads_back_as_it_is(encoded: bytes) -> None:
    assert_state_or_refusal(encoded)


def assert_state_or_refusal(encoded: bytes) -> None:
    state = value_or_refusal(decode_state, encoded, ValueError)
    if state is not None:
        assert encode_state(decode_state(encode_state(state))) == encode_state(state)


RATES = st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 50.0, 1e300, 1.7e308])
COUNTS = st.sampled_from([0, 1, 40, 2**31, 2**32 - 1])
LONG_COUNTS = COUNTS | st.sampled_from([2**63, 2**64 - 1])
TIMES = st.sampled_from([-(2**63), -1, 0, NOW_MS, NOW_MS + 1, 2**63 - 1])
LAYOUTS = tuple(types_pb2.Layout(tp=tp, dp=dp) for tp in (1, 2) for dp in (1, 2, 3, 2**32 - 1))


@st.composite
def pictures_of_a_rollout(draw: st.DrawFn) -> events_pb2.Generation:
    """A legal picture with any numbers: so many sequences as the fake cluster's iterations have."""
    gpus = draw(st.lists(st.sampled_from(spec().gpus), unique=True, max_size=4))
    places = draw(st.lists(st.integers(-4, len(gpus) - 1), min_size=8, max_size=8))
    engines = [
        events_pb2.Engine(
            gpus=[gpu],
            num_running=places.count(index),
            num_kv_tokens=draw(LONG_COUNTS),
            kv_capacity_tokens=draw(LONG_COUNTS) or 1,
            max_running=draw(COUNTS) or 1,
            rate_tokens_per_s=draw(RATES),
        )
        for index, gpu in enumerate(gpus)
    ]
    queued = [index for index, place in enumerate(places) if place == -1]
    return events_pb2.Generation(
        engines=engines,
        group_size=2,
        lengths=draw(st.lists(COUNTS, min_size=8, max_size=8)),
        places=places,
        queue=draw(st.permutations(queued)),
        hints=draw(st.just([]) | st.lists(RATES, min_size=4, max_size=4)),
    )


pictures_of_an_inference = st.builds(
    events_pb2.Inferring,
    ready=st.lists(st.integers(0, 3) | COUNTS, unique=True, max_size=4),
    is_busy=st.booleans(),
    rate_tokens_per_s_per_gpu=st.none() | RATES.filter(bool),
    num_tokens_ahead=LONG_COUNTS,
)
pictures_of_an_actor = st.builds(
    events_pb2.Training,
    num_minibatches_done=st.integers(0, 3) | COUNTS,
    num_taken=st.integers(0, 4) | COUNTS,
    is_at_boundary=st.booleans(),
    closes_at_ms=st.none() | TIMES,
    measured=st.lists(
        st.builds(events_pb2.TrainerRate, layout=st.sampled_from(LAYOUTS), rate_tokens_per_s=RATES.filter(bool)),
        max_size=3,
    ),
    update_s=st.none() | RATES,
)
PICTURES_OF: dict[Role, st.SearchStrategy[Any]] = {
    Role.ROLLOUT: pictures_of_a_rollout(),
    Role.INFERENCE: pictures_of_an_inference,
    Role.ACTOR: pictures_of_an_actor,
}


def running_states() -> list[ClusterState]:
    return [state for state in real.states() if state.iteration is not None and state.job == JOB]


@settings(fuzzed, max_examples=600 if effort.IS_FULL else 30)
@given(st.data(), st.lists(st.sampled_from(Role), min_size=1, max_size=3))
def test_pictures_of_any_legal_numbers_lead_to_a_decision(data: st.DataObject, roles: list[Role]) -> None:
    state = data.draw(st.sampled_from(running_states()))
    policy = data.draw(st.sampled_from(ALL_POLICIES))
    for role in roles:
        picture = data.draw(PICTURES_OF[role])
        lead, iteration = state.components[role].lead, state.iteration
        if lead is None or iteration is None:
            continue
        payload = real.said(picture, source=lead.instance, role=role, sequence=2**40 + state.applied_seq)
        event = event_of(events_pb2.Event.FromString(payload), stream_sequence=state.applied_seq + 1)
        event = replace(
            event, boot=lead.boot, incarnation=state.incarnation, iteration=iteration.plan.iteration, grants=()
        )
        made = turn(state, NOW_MS, policy, events=[event])
        state = checked(*made.states)
        assert made.folded.seen.marks.get(role) is not None
