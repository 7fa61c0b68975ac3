"""The wire's codec: values come back as they were, and a broken message is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import codec
from tidegate.codec import WireError
from tidegate.types import LARGEST_TERM, GpuId, Grant, Layout, Role, SampleId, Token
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2, types_pb2

COUNTS = st.integers(0, 2**32 - 1)
TOKENS = st.builds(Token, term=st.integers(0, LARGEST_TERM), counter=st.integers(0, LARGEST_TERM))
GRANTS = st.builds(
    Grant, gpu=st.sampled_from([GpuId(f"n{node}/{gpu}") for node in "01" for gpu in range(8)]), token=TOKENS
)
AXES = st.integers(1, 64)
SAMPLES = st.builds(SampleId, incarnation=COUNTS, iteration=COUNTS, prompt=COUNTS, draw=COUNTS)


@given(TOKENS, GRANTS, st.builds(Layout, tp=AXES, pp=AXES, dp=AXES, cp=AXES, ep=AXES), SAMPLES)
def test_a_value_comes_back_from_the_wire_as_it_was(
    token: Token, grant: Grant, layout: Layout, sample: SampleId
) -> None:
    assert codec.decode_token(codec.encode_token(token)) == token
    assert codec.decode_grant(codec.encode_grant(grant)) == grant
    assert codec.decode_layout(codec.encode_layout(layout)) == layout
    assert codec.decode_sample_id(codec.encode_sample_id(sample)) == sample


@pytest.mark.parametrize("role", Role)
def test_every_role_comes_back_from_the_wire_as_it_was(role: Role) -> None:
    assert codec.decode_role(codec.encode_role(role), field="Event.role") is role


def test_an_axis_that_the_wire_leaves_out_is_one() -> None:
    assert codec.decode_layout(types_pb2.Layout(tp=2)) == Layout(tp=2)


def test_grants_keep_their_order_because_it_is_the_rank_order() -> None:
    grants = (Grant(GpuId("n1/0"), Token(1, 2)), Grant(GpuId("n0/3"), Token(1, 9)))
    assert codec.decode_grants(codec.encode_grants(grants)) == grants


def a_grant(gpu: str = "n0/1") -> types_pb2.Grant:
    return types_pb2.Grant(gpu=gpu, token=types_pb2.Token(term=1, counter=1))


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "an unspecified role": (
        lambda: codec.decode_role(types_pb2.ROLE_UNSPECIFIED, field="Event.role"),
        r"Event\.role is 0, which is no role; it must be one of ROLE_ACTOR, ROLE_ROLLOUT, ROLE_INFERENCE",
    ),
    "a token whose term leaves no room above it": (
        lambda: codec.decode_token(types_pb2.Token(term=2**64 - 1, counter=1)),
        r"Token\.term is 18446744073709551615; it must be at most 999999999999",
    ),
    "a token whose counter is as large": (
        lambda: codec.decode_token(types_pb2.Token(term=1, counter=10**12)),
        r"Token\.counter is 1000000000000; it must be at most 999999999999",
    ),
    "a grant without its token": (
        lambda: codec.decode_grant(types_pb2.Grant(gpu="n0/1")),
        r"Grant\.token is missing; the sender must set it",
    ),
    "a grant without a GPU": (
        lambda: codec.decode_grant(types_pb2.Grant(token=types_pb2.Token(term=1))),
        r"Grant\.gpu is missing",
    ),
    "a GPU without its node": (
        lambda: codec.decode_grant(a_grant("3")),
        r"Grant\.gpu is '3'; it must be <node>/<index>",
    ),
    "a GPU without its index": (lambda: codec.decode_grant(a_grant("n0/x")), r"must be <node>/<index>"),
    "a GPU twice": (lambda: codec.decode_grants([a_grant(), a_grant()]), r"Grant\.gpu 'n0/1' is listed twice"),
    "a command header without its job": (
        lambda: codec.require(commands_pb2.CommandHeader(id="c"), "id", "job"),
        r"CommandHeader\.job is missing",
    ),
    "a command without its header": (
        lambda: codec.require(commands_pb2.ScaleUpRequest(), "header"),
        r"ScaleUpRequest\.header is missing",
    ),
    "a job name that names no stream": (
        lambda: codec.decode_job("a.>", field="Event.job"),
        r"Event\.job: job name 'a\.>' must be",
    ),
    "bytes that are no event": (lambda: codec.decode_event(b"\xff\xff"), r"Event: 2 bytes that do not decode as Event"),
    "an empty event": (lambda: codec.decode_event(b""), r"Event\.id is missing"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_bad_message_is_refused_with_the_names_of_message_and_field(what: str) -> None:
    decode, want = REFUSALS[what]
    with pytest.raises(WireError, match=want):
        decode()


def test_messages_with_their_required_fields_are_accepted() -> None:
    codec.require(commands_pb2.ScaleUpRequest(header=commands_pb2.CommandHeader()), "header")
    codec.require(commands_pb2.CommandHeader(id="c", job="j"), "id", "job")


def an_event() -> events_pb2.Event:
    return events_pb2.Event(
        id="actor@n0/1/2", job="job", source="actor@n0", boot=1, sequence=2, progress=events_pb2.Progress()
    )


def a_group() -> samples_pb2.SampleGroup:
    def sample(draw: int) -> samples_pb2.Sample:
        return samples_pb2.Sample(
            id=types_pb2.SampleId(incarnation=1, iteration=2, prompt=3, draw=draw),
            response_tokens=[5, 6],
            engine_log_probs=[-1.0, -2.0],
            versions=[samples_pb2.VersionRun(version=4, num_tokens=2)],
            finish=samples_pb2.FINISH_REASON_STOP,
        )

    return samples_pb2.SampleGroup(
        job="job", incarnation=1, iteration=2, prompt=3, version=4, prompt_tokens=[1], samples=[sample(0), sample(1)]
    )


def test_a_whole_event_and_a_whole_group_come_back_as_they_were() -> None:
    assert codec.decode_event(an_event().SerializeToString()) == an_event()
    assert codec.decode_group(a_group().SerializeToString(), scored=False) == a_group()


BROKEN_EVENTS: dict[str, tuple[Callable[[events_pb2.Event], object], str]] = {
    "without its job": (lambda event: event.ClearField("job"), r"Event\.job is missing"),
    "with a job that is no name": (lambda event: setattr(event, "job", "A"), r"Event\.job: job name 'A'"),
    "with an id that its source does not derive": (
        lambda event: setattr(event, "sequence", 3),
        r"Event\.id is 'actor@n0/1/2'; its source, boot and sequence make it 'actor@n0/1/3'",
    ),
    "that tells nothing": (lambda event: event.ClearField("progress"), r"Event\.body is missing"),
}


@pytest.mark.parametrize("what", BROKEN_EVENTS)
def test_an_event_is_refused(what: str) -> None:
    change, want = BROKEN_EVENTS[what]
    event = an_event()
    change(event)
    with pytest.raises(WireError, match=want):
        codec.decode_event(event.SerializeToString())


BROKEN_GROUPS: dict[str, tuple[Callable[[samples_pb2.SampleGroup], object], str]] = {
    "without its job": (lambda group: group.ClearField("job"), r"SampleGroup\.job is missing"),
    "without samples": (lambda group: group.ClearField("samples"), r"SampleGroup\.samples is missing"),
    "without its prompt's tokens": (lambda group: group.ClearField("prompt_tokens"), r"prompt_tokens is missing"),
    "with a sample of another prompt": (
        lambda group: setattr(group.samples[1].id, "prompt", 9),
        r"Sample\.id 1\.2\.9\.1 does not belong to its group 1\.2\.3",
    ),
    "with a draw twice": (lambda group: setattr(group.samples[1].id, "draw", 0), r"Sample\.id 1\.2\.3\.0 is twice"),
    "with a sample that did not finish": (
        lambda group: group.samples[0].ClearField("finish"),
        r"Sample\.finish is missing",
    ),
    "with a token short of its log-probability": (
        lambda group: group.samples[0].engine_log_probs.pop(),
        r"Sample\.engine_log_probs of 1\.2\.3\.0 covers 1 tokens; the response has 2",
    ),
    "with a token short of its version": (
        lambda group: setattr(group.samples[1].versions[0], "num_tokens", 1),
        r"Sample\.versions of 1\.2\.3\.1 covers 1 tokens",
    ),
    "with a token of another version": (
        lambda group: setattr(group.samples[1].versions[0], "version", 3),
        r"Sample\.versions of 1\.2\.3\.1 name version 3, its group is of version 4; training is strictly on-policy",
    ),
    "with an old log-probability too many": (
        lambda group: group.samples[0].old_log_probs.extend([0.0] * 3),
        r"Sample\.old_log_probs of 1\.2\.3\.0 covers 3 tokens",
    ),
}


@pytest.mark.parametrize("what", BROKEN_GROUPS)
def test_a_group_is_refused(what: str) -> None:
    change, want = BROKEN_GROUPS[what]
    group = a_group()
    change(group)
    with pytest.raises(WireError, match=want):
        codec.decode_group(group.SerializeToString(), scored=False)


@given(st.sets(SAMPLES, min_size=1, max_size=20))
def test_the_digest_of_ids_ignores_order_and_shows_a_lost_or_doubled_one(ids: set[SampleId]) -> None:
    ordered = sorted(ids)
    digest = codec.ids_digest(ordered)
    assert digest == codec.ids_digest(reversed(ordered))
    assert digest != codec.ids_digest(ordered[1:])
    assert digest != codec.ids_digest([*ordered, ordered[0]])
    assert 0 <= digest < 2**64


def test_the_digest_is_the_one_that_recorded_histories_hold() -> None:
    assert codec.ids_digest([]) == 0
    assert codec.ids_digest([SampleId(1, 2, 3, 4)]) == 0xEBB1898819F64105


@given(st.lists(SAMPLES, max_size=20, unique=True), st.integers(0, 20))
def test_the_fates_of_all_parts_add_up_to_the_whole(ids: list[SampleId], cut: int) -> None:
    parts = [codec.fate_of(ids[:cut]), codec.fate_of(ids[cut:], reason="zero_std")]
    whole = codec.fate_of(ids)
    assert sum(part.num_samples for part in parts) == whole.num_samples == len(ids)
    assert sum(part.ids_digest for part in parts) % 2**64 == whole.ids_digest
    assert [part.reason for part in parts] == ["", "zero_std"]


def test_figures_that_are_not_finite_are_left_out() -> None:
    figures = {"loss": math.nan, "grad_norm": math.inf, "kl": 0.0, "lowest": -math.inf}
    assert codec.finite_only(figures) == {"kl": 0.0}
