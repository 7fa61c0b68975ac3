"""Whatever bytes come as an event, a group or a state: a value, or a WireError, and every next state is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.evolve.fold import evolve
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state, event_of
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.invariants import check
from tests.component_bench import JOB as WIRE_JOB
from tests.properties import real_messages as real
from tests.properties.fuzzing import damaged_bytes, fuzzed, messages, value_or_refusal
from tests.unit.scheduler.fake_parts import JOB
from tidegate.adapters.subjects import sample_subject, subject_of_event
from tidegate.codec import WireError, decode_event, decode_group, decode_response
from tidegate.ports.bus import Stage
from tidegate.v1 import events_pb2, samples_pb2

BODIES = tuple(events_pb2.Event.DESCRIPTOR.oneofs_by_name["body"].fields)
SOURCES = ("actor@n0", "rollout@n0", "inference@n0", "scheduler", "launcher", "control", "a/b", "@n0")
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
    after = evolve(state, replace(event, stream_sequence=state.applied_seq + 1))
    assert not check(state, after)
    if after.ignored != state.ignored and after.version == state.version:
        assert without_counts(after) == without_counts(state), "a refused event changes nothing else"
    assert encode_state(decode_state(encode_state(after))) == encode_state(after)


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
