"""The record of a GPU's ownership and the record of a transition that moves GPUs. Pure values and their JSON, no I/O.

`tidegate.ownership.transitions` has the legal steps of a transition.

Invariants, which each value checks when it is made:
- A `free` GPU has no owner. [test_records: a_free_gpu_has_no_owner]
- An `owned` GPU has an owner; the last owner of a `lost` one may be unknown. [test_records: an_owned_gpu_has_an_owner]
- A transition names each GPU once. [test_records: names_each_gpu_once]
- A transition names each role once. [test_records: names_each_role_once]
- A transition moves no GPU to its own owner. [test_records: moves_no_gpu_to_its_own_owner]
- The layouts of a part are those that its kind needs. [test_records: not_of_its_kind]
- A component of the transition's job that gains or loses a GPU has a part. [test_records: gains_or_loses_a_gpu]

Invariants of the JSON:
- Decoding an encoded record gives an equal record. [test_ownership: every_gpu_record_survives]
- Decoding an encoded transition gives an equal transition. [test_ownership: every_transition_survives]
- Any other text is refused with a ValueError. [test_records: a_text_that_is_no_transition]
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from tidegate.json_text import parse_json, typed, typed_or_none, whole_number
from tidegate.types import LARGEST_TERM, GpuId, JobId, Layout, Role, Token, TransitionId

_NUMBER = re.compile(r"[0-9]{1,18}")


class StoreUnavailable(ConnectionError):
    """The store did not answer. It is unknown whether the last write took effect. Every store call may be repeated."""


class StoreNotAdopted(RuntimeError):
    """The store is not open under the (run id, term) of this client: it restarted, failed over or was never adopted."""


class StoreDamaged(ValueError):
    """A value in the store is none that Tidegate writes. The message names it and gives the remedy."""


class StaleToken(RuntimeError):
    """The token of a write is no longer the GPU's token: the GPU has had another owner since."""


class VersionConflict(RuntimeError):
    """The record changed after it was read. Read it again and decide again."""


class GpuBusy(RuntimeError):
    """The GPU is lost, or an open transition holds it."""


class IllegalStep(RuntimeError):
    """The record does not allow this step. A repetition alone does not change that."""


class UnknownGpu(LookupError):
    """The cluster has no such GPU registered."""


class UnknownTransition(LookupError):
    """The store has no such transition."""


class GpuState(StrEnum):
    """`lost`: it is unknown whether the last owner still uses the GPU. The GPU is free only when its gate says so."""

    FREE = "free"
    OWNED = "owned"
    LOST = "lost"


class MoveState(StrEnum):
    """The progress of one GPU's move.

    A released GPU has no owner. An acquiring GPU belongs to the target under a new token.
    """

    PLANNED = "planned"
    DRAINING = "draining"
    RELEASED = "released"
    ACQUIRING = "acquiring"
    COMMITTED = "committed"
    ABORTED = "aborted"


class PartKind(StrEnum):
    """What a transition does to a component. The table shows whether the component works before it and after it.

    | kind | before | after | |
    |---|---|---|---|
    | `start` | no | yes | nothing of it is kept from before |
    | `resume` | no | yes | a suspended component comes back; an actor has kept its state |
    | `resize` | yes | yes | it changes its GPUs, its layout or both |
    | `replace` | yes | yes | replicas that died are made again, in the same layout |
    | `suspend` | yes | no | it lets go of all GPUs and goes on later |
    | `stop` | yes | no | it lets go of all GPUs because the job ends |
    """

    START = "start"
    RESUME = "resume"
    RESIZE = "resize"
    REPLACE = "replace"
    SUSPEND = "suspend"
    STOP = "stop"

    @property
    def works_before(self) -> bool:
        return self not in (PartKind.START, PartKind.RESUME)

    @property
    def works_after(self) -> bool:
        return self not in (PartKind.SUSPEND, PartKind.STOP)

    @property
    def is_change(self) -> bool:
        """The component works now and goes on afterwards: elsewhere, with more GPUs, with fewer, or later."""
        return self.works_before and self is not PartKind.STOP


class PartState(StrEnum):
    """The progress of one component's layout switch."""

    PLANNED = "planned"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Outcome(StrEnum):
    """The end of a transition. `partial`: not everything was committed, but a component switched its layout."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    PARTIAL = "partial"


@dataclass(frozen=True, order=True, slots=True)
class Owner:
    """One component of one job."""

    job: JobId
    role: Role

    def __str__(self) -> str:
        return f"{self.job}/{self.role}"


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """One GPU in the ownership map. `token` is the largest token that was ever granted for it; a free GPU keeps it."""

    gpu: GpuId
    state: GpuState
    owner: Owner | None
    token: Token
    transition: TransitionId | None = None

    def __post_init__(self) -> None:
        if self.state is GpuState.FREE and self.owner is not None:
            raise ValueError(f"GPU {self.gpu} is free and owned by {self.owner}: a free GPU has no owner")
        if self.state is GpuState.OWNED and self.owner is None:
            raise ValueError(f"GPU {self.gpu} is owned by nobody: name its owner or make it free")

    def held_by(self, transition: TransitionId) -> GpuRecord:
        """The record with this transition. A plan makes hundreds of them, and `replace` takes twice as long."""
        return GpuRecord(self.gpu, self.state, self.owner, self.token, transition)


@dataclass(frozen=True, slots=True)
class GateState:
    """One GPU in the report of its node's gate. `highest_token` is None if no owner ever passed the gate."""

    gpu: GpuId
    highest_token: Token | None
    held: bool


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one GPU from source to target. None is the free pool. `granted_token` is set from `acquiring` on."""

    gpu: GpuId
    source: Owner | None
    target: Owner | None
    planned_token: Token
    state: MoveState = MoveState.PLANNED
    granted_token: Token | None = None

    @property
    def token(self) -> Token:
        """The token that the GPU has in the present state of this move."""
        return self.granted_token or self.planned_token

    def at(self, state: MoveState) -> Move:
        """The move in this state, made as `GpuRecord.held_by`."""
        return Move(self.gpu, self.source, self.target, self.planned_token, state, self.granted_token)


@dataclass(frozen=True, slots=True)
class Part:
    """One component's part of a transition. A layout of None: the component holds no GPU."""

    role: Role
    kind: PartKind
    old_layout: Layout | None
    new_layout: Layout | None
    state: PartState = PartState.PLANNED

    def __post_init__(self) -> None:
        has = (self.old_layout is not None, self.new_layout is not None)
        needs = (self.kind.works_before, self.kind.works_after)
        if has != needs or (self.kind is PartKind.REPLACE and self.old_layout != self.new_layout):
            raise ValueError(
                f"a {self.kind} of the {self.role} cannot go from layout {self.old_layout or 'none'} to "
                f"{self.new_layout or 'none'}: give it the kind that these layouts make"
            )

    @property
    def layout_in_force(self) -> Layout | None:
        return self.new_layout if self.state is PartState.COMMITTED else self.old_layout


@dataclass(frozen=True, slots=True)
class Transition:
    """The record of a saga that moves GPUs.

    `moves` are in the planner's order, which is rank order. `planned_version` is the version of the job.
    """

    id: TransitionId
    job: JobId
    incarnation: int
    moves: tuple[Move, ...]
    parts: tuple[Part, ...]
    planned_version: int
    deadline_unix_ms: int
    reason: str
    outcome: Outcome = Outcome.OPEN

    def __post_init__(self) -> None:
        gpus: list[str] = [move.gpu for move in self.moves]
        roles: list[str] = [part.role for part in self.parts]
        for name, names in (("GPU", gpus), ("role", roles)):
            if len(set(names)) < len(names):
                repeated = sorted(each for each, count in Counter(names).items() if count > 1)
                raise ValueError(f"transition {self.id} names a {name} twice: {', '.join(repeated)}; name each once")
        for move in self.moves:
            if move.source == move.target:
                raise ValueError(f"transition {self.id} moves {move.gpu} from {move.source} to itself: leave it out")
            for owner in (move.source, move.target):
                if owner is not None and owner.job == self.job and owner.role not in roles:
                    raise ValueError(f"transition {self.id} moves {move.gpu} of {owner} but has no part for that role")

    @property
    def is_open(self) -> bool:
        return self.outcome is Outcome.OPEN

    def move(self, gpu: GpuId) -> Move:
        """UnknownGpu: this transition does not move the GPU."""
        for move in self.moves:
            if move.gpu == gpu:
                return move
        held = ", ".join(each.gpu for each in self.moves)
        raise UnknownGpu(f"transition {self.id} does not move GPU {gpu}; it moves {held or 'none'}")

    def part(self, role: Role) -> Part:
        """ValueError: this transition has no part for the role."""
        for part in self.parts:
            if part.role is role:
                return part
        named = ", ".join(each.role for each in self.parts)
        raise ValueError(f"transition {self.id} has no part for the {role}; its parts: {named or 'none'}")

    def with_move(self, move: Move) -> Transition:
        return self.with_moves((move,))

    def with_moves(self, moves: Iterable[Move]) -> Transition:
        """All at once: each change of a transition costs as much as it has moves."""
        changed = {move.gpu: move for move in moves}
        return replace(self, moves=tuple(changed.get(each.gpu, each) for each in self.moves)) if changed else self

    def with_part(self, part: Part) -> Transition:
        return replace(self, parts=tuple(part if each.role is part.role else each for each in self.parts))


def transition_number(name: TransitionId) -> int:
    """The k of `<job>/<incarnation>/t<k>`; 0 for an id of another form."""
    number = _NUMBER.fullmatch(name.rpartition("/t")[2])
    return int(number[0]) if number else 0


def encode_gpu(record: GpuRecord) -> bytes:
    return _encode(record)


def encode_transition(transition: Transition) -> bytes:
    return _encode(transition)


@lru_cache(maxsize=4096)
def decode_gpu(encoded: bytes) -> GpuRecord:
    """The inverse of `encode_gpu`. ValueError: the text is no GPU record."""
    try:
        fields = parse_json(encoded)
        transition = typed_or_none(str, fields["transition"], "transition")
        return GpuRecord(
            gpu=_gpu(fields),
            state=GpuState(fields["state"]),
            owner=_owner(fields["owner"]),
            token=_token(fields["token"]),
            transition=None if transition is None else TransitionId(transition),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a GPU record: {encoded[:200]!r} ({error})") from error


def decode_transition(encoded: bytes) -> Transition:
    """The inverse of `encode_transition`. ValueError: the text is no transition."""
    try:
        fields = parse_json(encoded)
        return Transition(
            id=TransitionId(typed(str, fields["id"], "id")),
            job=JobId(typed(str, fields["job"], "job")),
            incarnation=whole_number(fields["incarnation"], "incarnation"),
            moves=tuple(_move(each) for each in typed(list, fields["moves"], "moves")),
            parts=tuple(_part(each) for each in typed(list, fields["parts"], "parts")),
            planned_version=whole_number(fields["planned_version"], "planned_version"),
            deadline_unix_ms=typed(int, fields["deadline_unix_ms"], "deadline_unix_ms"),
            reason=typed(str, fields["reason"], "reason"),
            outcome=Outcome(fields["outcome"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a transition record: {encoded[:200]!r} ({error})") from error


def _encode(record: GpuRecord | Transition) -> bytes:
    return json.dumps(asdict(record), sort_keys=True, separators=(",", ":")).encode()


def _gpu(fields: Mapping[str, Any]) -> GpuId:
    return GpuId(typed(str, fields["gpu"], "gpu"))


def _owner(fields: Mapping[str, Any] | None) -> Owner | None:
    return None if fields is None else Owner(JobId(typed(str, fields["job"], "job")), Role(fields["role"]))


def _token(fields: Mapping[str, Any]) -> Token:
    return Token(*(whole_number(fields[name], name, most=LARGEST_TERM) for name in ("term", "counter")))


def _layout(fields: Mapping[str, Any] | None) -> Layout | None:
    return None if fields is None else Layout(**{axis: typed(int, size, axis) for axis, size in fields.items()})


def _move(fields: Mapping[str, Any]) -> Move:
    granted = fields["granted_token"]
    return Move(
        gpu=_gpu(fields),
        source=_owner(fields["source"]),
        target=_owner(fields["target"]),
        planned_token=_token(fields["planned_token"]),
        state=MoveState(fields["state"]),
        granted_token=None if granted is None else _token(granted),
    )


def _part(fields: Mapping[str, Any]) -> Part:
    return Part(
        role=Role(fields["role"]),
        kind=PartKind(fields["kind"]),
        old_layout=_layout(fields["old_layout"]),
        new_layout=_layout(fields["new_layout"]),
        state=PartState(fields["state"]),
    )
