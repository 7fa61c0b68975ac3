"""Converts between the wire's messages and the values of `tidegate.types`, and checks messages before use.

Invariants:
- `decode_x(encode_x(value)) == value`. [test_codec: value_comes_back_from_the_wire]
- Any other message raises a `WireError` that names the message and the field.
  [test_codec: a_bad_message_is]
- A missing value is never guessed, except where the schema defines it: a layout's 0 means 1.
  [test_codec: axis_that_the_wire_leaves_out]
- `ids_digest` does not depend on the order of the ids. Equal sets have equal digests, and a lost or doubled id changes
  the digest. [test_codec: digest_of_ids_ignores_order]
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError, Message

from tidegate.candidates import has_spread
from tidegate.ownership.records import GateState
from tidegate.types import LARGEST_TERM, GpuId, Grant, JobId, Layout, Role, SampleId, Token, job_id
from tidegate.v1 import events_pb2, samples_pb2, types_pb2

M = TypeVar("M", bound=Message)

_DIGEST_SPACE = 2**64
_GPU = re.compile(r"[^/]+/(0|[1-9][0-9]{0,8})")
"""One text for each GPU: the index has no zeros before it, and no digits but those of ASCII."""
MAX_SAMPLES = 2**22
"""The samples of an iteration: hundreds of times the largest published one. The actor keeps an id of each, so a plan
with a damaged number would take its memory."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_AXES = ("tp", "pp", "dp", "cp", "ep", "vpp")
_WIRE_ROLE: dict[Role, types_pb2.Role.ValueType] = {
    Role.ACTOR: types_pb2.ROLE_ACTOR,
    Role.ROLLOUT: types_pb2.ROLE_ROLLOUT,
    Role.INFERENCE: types_pb2.ROLE_INFERENCE,
}
_ROLE = {wire: role for role, wire in _WIRE_ROLE.items()}


class WireError(ValueError):
    """A message that fails a check. The text says which message, which field and what is wrong."""


def require(message: Message, *fields: str) -> None:
    """WireError unless each field is present: a message field is set, a plain value is neither empty nor zero."""
    for field in fields:
        descriptor = message.DESCRIPTOR.fields_by_name[field]
        present = message.HasField(field) if descriptor.has_presence else bool(getattr(message, field))
        if not present:
            raise WireError(f"{message.DESCRIPTOR.name}.{field} is missing; the sender must set it")


def encode_role(role: Role) -> types_pb2.Role.ValueType:
    return _WIRE_ROLE[role]


def decode_role(wire: types_pb2.Role.ValueType, *, field: str) -> Role:
    """`field` names the place of the value ("Event.role") for the error: an enum value does not know its place."""
    role = _ROLE.get(wire)
    if role is None:
        known = ", ".join(types_pb2.Role.Name(value) for value in _ROLE)
        raise WireError(f"{field} is {wire}, which is no role; it must be one of {known}")
    return role


def encode_token(token: Token) -> types_pb2.Token:
    return types_pb2.Token(term=token.term, counter=token.counter)


def decode_token(wire: types_pb2.Token) -> Token:
    for field, number in (("term", wire.term), ("counter", wire.counter)):
        if number > LARGEST_TERM:
            raise WireError(f"Token.{field} is {number}; it must be at most {LARGEST_TERM}")
    return Token(term=wire.term, counter=wire.counter)


def encode_gate_state(state: GateState) -> events_pb2.GateState:
    token = None if state.highest_token is None else encode_token(state.highest_token)
    return events_pb2.GateState(gpu=state.gpu, highest_token=token, held=state.held)


def decode_gate_state(wire: events_pb2.GateState) -> GateState:
    token = decode_token(wire.highest_token) if wire.HasField("highest_token") else None
    return GateState(decode_gpu(wire.gpu, field="GateState.gpu"), token, wire.held)


def encode_grant(grant: Grant) -> types_pb2.Grant:
    return types_pb2.Grant(gpu=grant.gpu, token=encode_token(grant.token))


def decode_gpu(name: str, *, field: str) -> GpuId:
    """`field` names the place of the value, for the error."""
    if not _GPU.fullmatch(name):
        raise WireError(f"{field} is {name[:60]!r}; it must be <node>/<index>")
    return GpuId(name)


def decode_gpus(names: Iterable[str], *, field: str) -> tuple[GpuId, ...]:
    return tuple(decode_gpu(name, field=field) for name in names)


def decode_grant(wire: types_pb2.Grant) -> Grant:
    require(wire, "gpu", "token")
    return Grant(gpu=decode_gpu(wire.gpu, field="Grant.gpu"), token=decode_token(wire.token))


def encode_grants(grants: Iterable[Grant]) -> list[types_pb2.Grant]:
    return [encode_grant(grant) for grant in grants]


def decode_grants(wire: Iterable[types_pb2.Grant]) -> tuple[Grant, ...]:
    """Keeps the order of the wire, which is the rank order of `members`. WireError when a GPU is listed twice."""
    grants = tuple(decode_grant(grant) for grant in wire)
    seen: set[GpuId] = set()
    for grant in grants:
        if grant.gpu in seen:
            raise WireError(f"Grant.gpu {grant.gpu!r} is listed twice; a list of grants names each GPU once")
        seen.add(grant.gpu)
    return grants


def encode_layout(layout: Layout) -> types_pb2.Layout:
    return types_pb2.Layout(**{axis: getattr(layout, axis) for axis in _AXES})


def decode_layout(wire: types_pb2.Layout) -> Layout:
    try:
        return Layout(**{axis: getattr(wire, axis) or 1 for axis in _AXES})
    except ValueError as invalid:
        raise WireError(f"Layout: {invalid}") from invalid


def encode_sample_id(sample: SampleId) -> types_pb2.SampleId:
    return types_pb2.SampleId(
        incarnation=sample.incarnation, iteration=sample.iteration, prompt=sample.prompt, draw=sample.draw
    )


def decode_sample_id(wire: types_pb2.SampleId) -> SampleId:
    return SampleId(incarnation=wire.incarnation, iteration=wire.iteration, prompt=wire.prompt, draw=wire.draw)


def ids_digest(ids: Iterable[SampleId]) -> int:
    """The sum modulo 2^64 of the 64-bit BLAKE2b hashes of the ids' text."""
    return sum(_hash64(str(sample)) for sample in ids) % _DIGEST_SPACE


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def fate_of(ids: Iterable[SampleId], *, reason: str = "") -> types_pb2.Fate:
    """The account of samples that met one fate. An id that `ids` lists twice counts twice."""
    samples = list(ids)
    return types_pb2.Fate(reason=reason, num_samples=len(samples), ids_digest=ids_digest(samples))


def finite_only(figures: Mapping[str, float]) -> dict[str, float]:
    """Leaves out figures that are NaN or infinite, because JSON cannot express them. A missing figure is not known."""
    return {name: figure for name, figure in figures.items() if math.isfinite(figure)}


def decode_job(name: str, *, field: str) -> JobId:
    try:
        return job_id(name)
    except ValueError as invalid:
        raise WireError(f"{field}: {invalid}") from invalid


def check_file_name(name: str, *, field: str) -> None:
    """WireError for a name that could be a path."""
    if not _FILE_NAME.fullmatch(name):
        raise WireError(f"{field} is {name!r}; it must be a plain file name of letters, digits, '.', '_' and '-'")


def check_parts(message: Message) -> None:
    """WireError unless each grant and each layout within the message can be decoded."""
    for field, value in message.ListFields():
        kind, held = field.message_type, value if field.is_repeated else (value,)
        if kind is None or kind.GetOptions().map_entry:
            continue
        if kind.name == "Grant":
            decode_grants(held)
        elif kind.name == "Layout":
            decode_layout(value)
        else:
            for each in held:
                check_parts(each)


def check_plan(plan: types_pb2.IterationPlan) -> None:
    """WireError unless an iteration can have so many samples."""
    require(plan, "num_prompts", "group_size", "num_minibatches")
    num_samples = (plan.num_prompts + plan.max_extra_prompts) * plan.group_size
    if num_samples > MAX_SAMPLES:
        raise WireError(f"IterationPlan has {num_samples:,} samples; an iteration has at most {MAX_SAMPLES:,}")


def check_event(event: events_pb2.Event) -> None:
    """WireError unless the event names its job, has the id that its source derives, and has a body."""
    require(event, "id", "job", "source", "boot", "sequence")
    decode_job(event.job, field="Event.job")
    if "/" in event.source:
        raise WireError(f"Event.source is {event.source!r}; it must be without '/', which separates the parts of an id")
    derived = f"{event.source}/{event.boot}/{event.sequence}"
    if event.id != derived:
        raise WireError(f"Event.id is {event.id!r}; its source, boot and sequence make it {derived!r}")
    if event.WhichOneof("body") is None:
        raise WireError("Event.body is missing; the sender must set what happened")


def decode_event(payload: bytes) -> events_pb2.Event:
    event = events_pb2.Event()
    _parse(event, payload)
    check_event(event)
    return event


def check_group(group: samples_pb2.SampleGroup, *, scored: bool) -> None:
    """WireError unless the group is whole and consistent.

    With `scored`, every sample must carry old log-probabilities. A group whose rewards have no spread is dropped later,
    so it may carry none at all.
    """
    require(group, "job", "prompt_tokens", "samples")
    decode_job(group.job, field="SampleGroup.job")
    has_some = any(sample.old_log_probs for sample in group.samples)
    must_have = scored and (has_some or has_spread(sample.reward for sample in group.samples))
    draws: set[int] = set()
    for sample in group.samples:
        _check_sample(sample, group)
        if sample.id.draw in draws:
            raise WireError(f"Sample.id {decode_sample_id(sample.id)} is twice in its group; list each draw once")
        draws.add(sample.id.draw)
        if must_have:
            require(sample, "old_log_probs")


def decode_group(payload: bytes, *, scored: bool) -> samples_pb2.SampleGroup:
    group = samples_pb2.SampleGroup()
    _parse(group, payload)
    check_group(group, scored=scored)
    return group


def check_response(group: samples_pb2.SampleGroup) -> None:
    """WireError unless the group has one response, with its id and tokens. It may have nothing else."""
    require(group, "job", "prompt_tokens", "samples")
    decode_job(group.job, field="SampleGroup.job")
    if len(group.samples) != 1:
        raise WireError(f"SampleGroup has {len(group.samples)} samples; a response that is told comes alone")
    require(group.samples[0], "id", "response_tokens")
    _check_place(group.samples[0], group)


def decode_response(payload: bytes) -> samples_pb2.SampleGroup:
    group = samples_pb2.SampleGroup()
    _parse(group, payload)
    check_response(group)
    return group


def _check_place(sample: samples_pb2.Sample, group: samples_pb2.SampleGroup) -> None:
    here = (group.incarnation, group.iteration, group.prompt)
    if (sample.id.incarnation, sample.id.iteration, sample.id.prompt) != here:
        where = ".".join(map(str, here))
        raise WireError(f"Sample.id {decode_sample_id(sample.id)} does not belong to its group {where}")


def _check_sample(sample: samples_pb2.Sample, group: samples_pb2.SampleGroup) -> None:
    require(sample, "id", "response_tokens", "finish")
    _check_place(sample, group)
    num_tokens = len(sample.response_tokens)
    counts = {
        "engine_log_probs": len(sample.engine_log_probs),
        "versions": sum(run.num_tokens for run in sample.versions),
        "old_log_probs": len(sample.old_log_probs) or num_tokens,
        "reference_log_probs": len(sample.reference_log_probs) or num_tokens,
    }
    for field, count in counts.items():
        if count != num_tokens:
            raise WireError(
                f"Sample.{field} of {decode_sample_id(sample.id)} covers {count} tokens; "
                f"the response has {num_tokens}, and each needs one"
            )
    if strange := sorted({run.version for run in sample.versions} - {group.version}):
        raise WireError(
            f"Sample.versions of {decode_sample_id(sample.id)} name version {strange[0]}, its group is of version "
            f"{group.version}; training is strictly on-policy: every token is drawn from the version of its iteration"
        )


def message_of_json(fields: object, message: M) -> M:
    """Fills the message with fields of its JSON form. WireError for any other value."""
    name = message.DESCRIPTOR.name
    if not isinstance(fields, dict):
        raise WireError(f"{name} is {repr(fields)[:60]} in JSON; it must be an object")
    try:
        return ParseDict(fields, message)
    except ParseError as error:
        raise WireError(str(error)) from error
    # ParseDict raises these for some values of another type.
    except (AttributeError, TypeError) as error:
        raise WireError(f"{name}: {str(error).strip() or type(error).__name__}") from error


def _parse(message: Message, payload: bytes) -> None:
    try:
        message.ParseFromString(payload)
    except DecodeError as undecodable:
        name = message.DESCRIPTOR.name
        raise WireError(f"{name}: {len(payload)} bytes that do not decode as {name} ({undecodable})") from undecodable
