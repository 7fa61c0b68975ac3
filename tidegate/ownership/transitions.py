"""The rules of ownership: the legal steps of GPUs that move. Pure: records in, changed records out.

A GPU's path within a transition. Each step is one write:
1. planned
2. draining: the owner has the command to leave. A GPU from the free pool skips steps 2 and 3.
3. released: the GPU has no owner, and the transition still holds it. A GPU that goes to the free pool ends here.
4. acquiring: the GPU belongs to the target under a new token.
5. committed

Invariants:
- A GPU has at most one owner, and none between two owners: release comes before acquire.
  [test_ownership: a_gpu_has_one_owner]
- A GPU's token only grows. [test_ownership: tokens_only_grow]
- Only the step to `acquiring` grants a new token. [test_records: only_the_step_to_acquiring_grants]
- No two open transitions hold one GPU, and a closed one holds none. [test_ownership: open_transitions_are_disjoint]
- Each step carries the token that the GPU had at the decision, and fails if that token is stale.
  [test_records: a_step_with_a_stale_token]
- A component commits only GPUs that it owns. [test_store_ownership: lost_and_reclaimed_since_its_grant]
- A repeated step changes nothing. [test_records: a_repeated_step_changes_nothing]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tidegate.ownership.records import (
    GpuBusy,
    GpuRecord,
    GpuState,
    IllegalStep,
    Move,
    MoveState,
    Outcome,
    Owner,
    PartState,
    StaleToken,
    Transition,
    UnknownGpu,
    UnknownTransition,
    VersionConflict,
)
from tidegate.types import GpuId, Layout, Role, Token

REFUSALS = (GpuBusy, IllegalStep, StaleToken, UnknownGpu, UnknownTransition, VersionConflict)
"""What a step raises that the records do not allow."""


@dataclass(frozen=True, slots=True)
class Change:
    """The transition after a step, and the GPU records that the step changed."""

    transition: Transition
    gpus: tuple[GpuRecord, ...] = ()


def plan(transition: Transition, gpus: Mapping[GpuId, GpuRecord], *, job_version: int) -> Change:
    """The transition takes hold of its GPUs. `gpus` has the records of its registered GPUs."""
    if transition.outcome is not Outcome.OPEN or any(move.state is not MoveState.PLANNED for move in transition.moves):
        raise IllegalStep(f"transition {transition.id} is {transition.outcome}: only a new one can be planned")
    if job_version != transition.planned_version:
        raise VersionConflict(
            f"transition {transition.id} was planned on version {transition.planned_version} of job {transition.job}, "
            f"which is at {job_version}: load the job's state and decide again"
        )
    held = []
    for move in transition.moves:
        record = gpus.get(move.gpu)
        if record is None:
            raise UnknownGpu(f"transition {transition.id} moves GPU {move.gpu}, which is not registered")
        if record.transition is not None:
            raise GpuBusy(f"GPU {move.gpu} is held by transition {record.transition}: wait until it is closed")
        _refuse_lost(record)
        _refuse_stale(record, token=move.planned_token, owner=move.source)
        held.append(record.held_by(transition.id))
    return Change(transition, tuple(held))


def same_plan(one: Transition, other: Transition) -> bool:
    """Whether both are the same plan, whatever their progress."""
    return _as_planned(one) == _as_planned(other)


def advance(stored: Transition, record: GpuRecord, *, from_state: MoveState, to_state: MoveState, term: int) -> Change:
    """One GPU's next step. A step to `acquiring` grants a new token of `term`."""
    return advance_all(stored, (record,), from_state=from_state, to_state=to_state, term=term)


def advance_all(
    stored: Transition, records: Iterable[GpuRecord], *, from_state: MoveState, to_state: MoveState, term: int
) -> Change:
    """The same step of several GPUs. Raises as `advance`, for the first to which it is refused."""
    moves, changed = {move.gpu: move for move in stored.moves}, []
    for record in records:
        move = moves.get(record.gpu) or stored.move(record.gpu)
        _refuse_no_step(stored, move, from_state=from_state, to_state=to_state)
        if move.state is not to_state:
            moves[move.gpu], record = _stepped(stored, move, record, to_state=to_state, term=term)
            changed.append(record)
    return Change(stored.with_moves(moves[record.gpu] for record in changed), tuple(changed))


def commit(stored: Transition, gpus: Mapping[GpuId, GpuRecord], role: Role, layout: Layout | None) -> Change:
    """A component's layout switch, with every GPU that it acquires. `gpus` has the records of the transition's GPUs.

    A component that keeps no layout has released before the GPUs that become free.
    """
    part = stored.part(role)
    if layout != part.new_layout:
        raise IllegalStep(
            f"the {role} cannot commit layout {layout or 'none'}: transition {stored.id} planned "
            f"{part.new_layout or 'none'}"
        )
    if part.state is PartState.COMMITTED:
        return Change(stored)
    if not stored.is_open:
        raise VersionConflict(f"transition {stored.id} ended {stored.outcome}: the {role} keeps its old layout")
    owner, coming = Owner(stored.job, role), []
    for move in stored.moves:
        if move.source == owner and move.state is MoveState.PLANNED:
            raise IllegalStep(f"the {role} cannot commit: GPU {move.gpu}, which leaves it, is not yet draining")
        if move.source == owner and move.target is None and layout is None and move.state is not MoveState.RELEASED:
            raise IllegalStep(f"the {role} cannot commit: GPU {move.gpu}, which becomes free, is not yet released")
        if move.target == owner:
            if move.state is not MoveState.ACQUIRING:
                raise IllegalStep(f"the {role} cannot commit: GPU {move.gpu} is {move.state}, not yet acquiring")
            _refuse_lost(gpus[move.gpu])
            _refuse_not_held(gpus[move.gpu], stored, move)
            # Avoid a component on a GPU that nobody owns: it may have been lost and reclaimed since its grant.
            _refuse_stale(gpus[move.gpu], token=move.token, owner=owner)
            coming.append(replace(move, state=MoveState.COMMITTED))
    return Change(stored.with_part(replace(part, state=PartState.COMMITTED)).with_moves(coming))


def earned_outcome(transition: Transition) -> Outcome:
    """The outcome if the transition ended now. It is `committed` only if every part and every GPU is done."""
    switched = [part.state is PartState.COMMITTED for part in transition.parts]
    if all(switched) and all(_is_done(move) for move in transition.moves):
        return Outcome.COMMITTED
    return Outcome.PARTIAL if any(switched) else Outcome.ABORTED


def close(stored: Transition, gpus: Mapping[GpuId, GpuRecord], outcome: Outcome) -> Change:
    """End the transition and release its hold on GPUs. `gpus` has the records of the transition's GPUs."""
    if not stored.is_open:
        if stored.outcome is outcome:
            return Change(stored)
        raise VersionConflict(f"transition {stored.id} ended {stored.outcome} before it could end {outcome}")
    if outcome is not earned_outcome(stored):
        waiting = [f"{move.gpu} {move.state}" for move in stored.moves if not _is_done(move)]
        waiting += [f"{part.role} {part.state}" for part in stored.parts if part.state is not PartState.COMMITTED]
        raise IllegalStep(
            f"transition {stored.id} cannot end {outcome}: now it would end {earned_outcome(stored)}; "
            f"not committed: {', '.join(waiting) or 'nothing'}"
        )
    held = [move for move in stored.moves if move.gpu in gpus and gpus[move.gpu].transition == stored.id]
    return Change(_ended(stored, outcome), tuple(_let_go(gpus[move.gpu], move) for move in held))


def mark_lost(record: GpuRecord, token: Token) -> GpuRecord:
    """The last owner stays on the record: it is unknown whether that owner still uses the GPU."""
    _refuse_stale(record, token=token, owner=record.owner)
    return replace(record, state=GpuState.LOST)


def reclaim(record: GpuRecord, token: Token) -> GpuRecord:
    """Make a lost GPU free. The caller knows from its gate that nobody holds it."""
    _refuse_stale(record, token=token, owner=record.owner)
    if record.state is GpuState.OWNED:
        raise IllegalStep(f"GPU {record.gpu} is owned by {record.owner}: only a lost GPU can be reclaimed")
    return replace(record, state=GpuState.FREE, owner=None)


def _refuse_no_step(stored: Transition, move: Move, *, from_state: MoveState, to_state: MoveState) -> None:
    """Raises unless the move can go this step, or has gone it."""
    if to_state is not _next_state(move, from_state):
        raise IllegalStep(
            f"GPU {move.gpu} cannot go from {from_state} to {to_state}: from {move.source or 'free'} to "
            f"{move.target or 'free'} the step after {from_state} is {_next_state(move, from_state) or 'none'}"
        )
    if move.state is not to_state and (not stored.is_open or move.state is not from_state):
        raise VersionConflict(
            f"GPU {move.gpu} of transition {stored.id} is {move.state}, not {from_state}, and the transition is "
            f"{stored.outcome}: read the transition again"
        )


def _stepped(
    stored: Transition, move: Move, record: GpuRecord, *, to_state: MoveState, term: int
) -> tuple[Move, GpuRecord]:
    _refuse_lost(record)
    _refuse_not_held(record, stored, move)
    match to_state:
        case MoveState.DRAINING:
            _refuse_stale(record, token=move.token, owner=move.source)
        case MoveState.RELEASED:
            record = replace(record, state=GpuState.FREE, owner=None)
        case MoveState.ACQUIRING:
            _refuse_stale(record, token=move.token, owner=None)
            token = _next_token(record, term)
            record = replace(record, state=GpuState.OWNED, owner=move.target, token=token)
            move = replace(move, granted_token=token)
    return move.at(to_state), record


def _next_state(move: Move, state: MoveState) -> MoveState | None:
    """The state that `advance` may set after `state`. None: only `commit` can follow, or nothing."""
    match state:
        case MoveState.PLANNED:
            return MoveState.DRAINING if move.source else MoveState.ACQUIRING
        case MoveState.DRAINING:
            return MoveState.RELEASED
        case MoveState.RELEASED:
            return MoveState.ACQUIRING if move.target else None
        case _:
            return None


def _next_token(record: GpuRecord, term: int) -> Token:
    if record.token.term > term:
        raise StaleToken(
            f"GPU {record.gpu} has token {record.token}, newer than the store's term {term}: the store must be adopted"
        )
    return Token(term, record.token.counter + 1 if record.token.term == term else 1)


def _is_done(move: Move) -> bool:
    return move.state is MoveState.COMMITTED or (move.state is MoveState.RELEASED and move.target is None)


def _let_go(record: GpuRecord, move: Move) -> GpuRecord:
    if move.state is MoveState.ACQUIRING and record.state is GpuState.OWNED:
        # Avoid two owners: the target may have passed the gate already, so only the gate can call the GPU free.
        return replace(record, state=GpuState.LOST, transition=None)
    return replace(record, transition=None)


def _ended(stored: Transition, outcome: Outcome) -> Transition:
    moves = tuple(
        replace(move, state=MoveState.COMMITTED if _is_done(move) else MoveState.ABORTED) for move in stored.moves
    )
    parts = tuple(
        part if part.state is PartState.COMMITTED else replace(part, state=PartState.ABORTED) for part in stored.parts
    )
    return replace(stored, moves=moves, parts=parts, outcome=outcome)


def _as_planned(transition: Transition) -> Transition:
    moves = tuple(replace(move, state=MoveState.PLANNED, granted_token=None) for move in transition.moves)
    parts = tuple(replace(part, state=PartState.PLANNED) for part in transition.parts)
    return replace(transition, moves=moves, parts=parts, outcome=Outcome.OPEN, deadline_unix_ms=0, reason="")


def _refuse_lost(record: GpuRecord) -> None:
    if record.state is GpuState.LOST:
        raise GpuBusy(
            f"GPU {record.gpu} is lost (last owner {record.owner or 'none'}, token {record.token}): "
            "reclaim it once its gate reports it free"
        )


def _refuse_not_held(record: GpuRecord, stored: Transition, move: Move) -> None:
    if record.transition != stored.id:
        raise StaleToken(
            f"GPU {record.gpu} is held by transition {record.transition or 'none'}, not by {stored.id}: close it"
        )
    _refuse_stale(record, token=move.token, owner=record.owner)


def _refuse_stale(record: GpuRecord, *, token: Token, owner: Owner | None) -> None:
    # Tuples compare what is the same object at once, as mostly here, with hundreds of GPUs in a transition.
    if (record.token, record.owner) != (token, owner):
        raise StaleToken(
            f"GPU {record.gpu} belongs to {record.owner or 'nobody'} under token {record.token}; the write was decided "
            f"on {owner or 'nobody'} under {token}: read the map and decide again"
        )
