"""The records of ownership are valid when made and survive their JSON. Steps and ends of a transition follow rules."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from tidegate.ownership import transitions as rules
from tidegate.ownership.records import (
    GpuRecord,
    GpuState,
    IllegalStep,
    Move,
    MoveState,
    Outcome,
    Owner,
    Part,
    PartKind,
    PartState,
    StaleToken,
    Transition,
    UnknownGpu,
    decode_gpu,
    decode_transition,
    encode_gpu,
    encode_transition,
)
from tidegate.types import LARGEST_TERM, GpuId, JobId, Layout, Role, Token, TransitionId

JOB = JobId("job")
ACTOR, ROLLOUT = Owner(JOB, Role.ACTOR), Owner(JOB, Role.ROLLOUT)
A, B = GpuId("node-a/0"), GpuId("node-a/1")
T1, T2 = Token(1, 1), Token(1, 2)
HANDOVER = Transition(
    id=TransitionId("handover"),
    job=JOB,
    incarnation=2,
    moves=(Move(A, ACTOR, ROLLOUT, T1), Move(B, ACTOR, None, T1)),
    parts=(
        Part(Role.ACTOR, PartKind.SUSPEND, Layout(dp=2), None),
        Part(Role.ROLLOUT, PartKind.START, None, Layout()),
    ),
    planned_version=7,
    deadline_unix_ms=1_700_000_000_000,
    reason="the tail: 3 of 64 sequences left",
)


class TestValues:
    def test_a_gpu_record_survives_its_json(self) -> None:
        for want in (
            GpuRecord(A, GpuState.FREE, None, Token(0, 0)),
            GpuRecord(A, GpuState.OWNED, ACTOR, Token(LARGEST_TERM, 7), TransitionId("t")),
            GpuRecord(A, GpuState.LOST, None, T1),
        ):
            assert decode_gpu(encode_gpu(want)) == want

    def test_a_transition_survives_its_json(self) -> None:
        acquiring = replace(HANDOVER.move(A), state=MoveState.ACQUIRING, granted_token=T2)
        want = replace(HANDOVER.with_move(acquiring), outcome=Outcome.PARTIAL)
        assert decode_transition(encode_transition(want)) == want

    @pytest.mark.parametrize(
        "damaged",
        [
            pytest.param({"state": "melted"}, id="a state that there is not"),
            pytest.param({"token": {"term": 1}}, id="half a token"),
            pytest.param({"state": "owned", "owner": None}, id="an owned gpu without an owner"),
            pytest.param({"owner": {"job": "job", "role": "janitor"}}, id="a role that there is not"),
        ],
    )
    def test_a_damaged_gpu_record_is_refused(self, damaged: dict[str, object]) -> None:
        fields = json.loads(encode_gpu(GpuRecord(A, GpuState.FREE, None, T1)))
        with pytest.raises(ValueError, match="not a GPU record"):
            decode_gpu(json.dumps(fields | damaged).encode())

    @pytest.mark.parametrize(
        ("drop", "damaged"),
        [
            pytest.param("kind", {}, id="no kind, as code before kinds wrote it"),
            pytest.param("", {"kind": "melt"}, id="a kind that there is not"),
            pytest.param("", {"kind": "start"}, id="a kind that its layouts are not of"),
            pytest.param("state", {}, id="no state"),
        ],
    )
    def test_a_damaged_transition_record_is_refused(self, drop: str, damaged: dict[str, object]) -> None:
        fields = json.loads(encode_transition(HANDOVER))
        (actor, rollout) = fields["parts"]
        part = {key: value for key, value in actor.items() if key != drop} | damaged
        with pytest.raises(ValueError, match="not a transition record"):
            decode_transition(json.dumps(fields | {"parts": [part, rollout]}).encode())

    @pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"{}", b"null"])
    def test_a_text_that_is_no_transition_is_refused(self, text: bytes) -> None:
        with pytest.raises(ValueError, match="not a transition record"):
            decode_transition(text)

    def test_a_free_gpu_has_no_owner(self) -> None:
        with pytest.raises(ValueError, match="is free and owned by job/actor"):
            GpuRecord(A, GpuState.FREE, ACTOR, T1)

    def test_an_owned_gpu_has_an_owner_and_a_lost_one_need_not(self) -> None:
        with pytest.raises(ValueError, match="is owned by nobody"):
            GpuRecord(A, GpuState.OWNED, None, T1)
        assert GpuRecord(A, GpuState.LOST, None, T1).owner is None

    def test_a_transition_names_each_gpu_once(self) -> None:
        with pytest.raises(ValueError, match=f"names a GPU twice: {A}"):
            replace(HANDOVER, moves=(Move(A, ACTOR, ROLLOUT, T1), Move(A, ACTOR, None, T1)))

    def test_a_transition_names_each_role_once(self) -> None:
        with pytest.raises(ValueError, match="names a role twice: actor"):
            replace(HANDOVER, parts=(*HANDOVER.parts, Part(Role.ACTOR, PartKind.START, None, Layout())))

    @pytest.mark.parametrize(
        ("kind", "old", "new"),
        [
            (PartKind.START, Layout(), Layout(dp=2)),
            (PartKind.START, None, None),
            (PartKind.RESUME, Layout(), Layout()),
            (PartKind.RESIZE, None, Layout()),
            (PartKind.RESIZE, Layout(), None),
            (PartKind.REPLACE, Layout(), Layout(dp=2)),
            (PartKind.SUSPEND, None, None),
            (PartKind.SUSPEND, Layout(), Layout()),
            (PartKind.STOP, Layout(), Layout()),
        ],
    )
    def test_a_part_with_layouts_that_are_not_of_its_kind_is_refused(
        self, kind: PartKind, old: Layout | None, new: Layout | None
    ) -> None:
        with pytest.raises(ValueError, match=f"a {kind} of the actor cannot go from layout"):
            Part(Role.ACTOR, kind, old, new)

    def test_a_transition_moves_no_gpu_to_its_own_owner(self) -> None:
        with pytest.raises(ValueError, match="from job/actor to itself"):
            replace(HANDOVER, moves=(Move(A, ACTOR, ACTOR, T1),))

    def test_a_component_that_gains_or_loses_a_gpu_has_a_part(self) -> None:
        with pytest.raises(ValueError, match="job/rollout but has no part"):
            replace(HANDOVER, parts=HANDOVER.parts[:1])

    def test_an_unknown_gpu_or_role_of_a_transition_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(UnknownGpu, match=f"it moves {A}, {B}"):
            HANDOVER.move(GpuId("node-z/0"))
        with pytest.raises(ValueError, match="its parts: actor, rollout"):
            HANDOVER.part(Role.INFERENCE)


def moved(a: MoveState, b: MoveState, *, actor: PartState, rollout: PartState) -> Transition:
    granted = T2 if a in (MoveState.ACQUIRING, MoveState.COMMITTED) else None
    moves = (replace(HANDOVER.move(A), state=a, granted_token=granted), replace(HANDOVER.move(B), state=b))
    parts = (replace(HANDOVER.part(Role.ACTOR), state=actor), replace(HANDOVER.part(Role.ROLLOUT), state=rollout))
    return replace(HANDOVER, moves=moves, parts=parts)


def records(a: GpuRecord, b: GpuRecord) -> dict[GpuId, GpuRecord]:
    return {each.gpu: replace(each, transition=HANDOVER.id) for each in (a, b)}


PATH = (MoveState.PLANNED, MoveState.DRAINING, MoveState.RELEASED, MoveState.ACQUIRING)
OF_ACTOR_A, OF_ACTOR_B = GpuRecord(A, GpuState.OWNED, ACTOR, T1), GpuRecord(B, GpuState.OWNED, ACTOR, T1)
FREE_A, FREE_B = GpuRecord(A, GpuState.FREE, None, T1), GpuRecord(B, GpuState.FREE, None, T1)
OF_ROLLOUT_A = GpuRecord(A, GpuState.OWNED, ROLLOUT, T2)
PLANNED, COMMITTED = PartState.PLANNED, PartState.COMMITTED


def calls_of_a_step(num_gpus: int) -> int:
    """Calls of Python functions in which so many GPUs begin to drain."""
    gpus = tuple(GpuRecord(GpuId(f"n/{at}"), GpuState.OWNED, ACTOR, T1, HANDOVER.id) for at in range(num_gpus))
    transition = replace(HANDOVER, moves=tuple(Move(each.gpu, ACTOR, None, T1) for each in gpus))
    num = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal num
        num += event == "call"

    sys.setprofile(count)
    try:
        rules.advance_all(transition, gpus, from_state=MoveState.PLANNED, to_state=MoveState.DRAINING, term=1)
    finally:
        sys.setprofile(None)
    return num


ENDINGS = {
    "nothing happened: both stay": (
        moved(MoveState.PLANNED, MoveState.PLANNED, actor=PLANNED, rollout=PLANNED),
        (OF_ACTOR_A, OF_ACTOR_B),
        Outcome.ABORTED,
        (OF_ACTOR_A, OF_ACTOR_B),
    ),
    "one released, one draining: free and stays": (
        moved(MoveState.RELEASED, MoveState.DRAINING, actor=PLANNED, rollout=PLANNED),
        (FREE_A, OF_ACTOR_B),
        Outcome.ABORTED,
        (FREE_A, OF_ACTOR_B),
    ),
    "acquired but not committed: lost until its gate reports": (
        moved(MoveState.ACQUIRING, MoveState.RELEASED, actor=COMMITTED, rollout=PLANNED),
        (OF_ROLLOUT_A, FREE_B),
        Outcome.PARTIAL,
        (replace(OF_ROLLOUT_A, state=GpuState.LOST), FREE_B),
    ),
    "both committed and one gpu not released: partial": (
        moved(MoveState.COMMITTED, MoveState.DRAINING, actor=COMMITTED, rollout=COMMITTED),
        (OF_ROLLOUT_A, OF_ACTOR_B),
        Outcome.PARTIAL,
        (OF_ROLLOUT_A, OF_ACTOR_B),
    ),
    "all as planned": (
        moved(MoveState.COMMITTED, MoveState.RELEASED, actor=COMMITTED, rollout=COMMITTED),
        (OF_ROLLOUT_A, FREE_B),
        Outcome.COMMITTED,
        (OF_ROLLOUT_A, FREE_B),
    ),
}


class TestEndings:
    @pytest.mark.parametrize(("transition", "gpus", "outcome", "want"), ENDINGS.values(), ids=ENDINGS)
    def test_a_transition_ends_with_its_earned_outcome_and_holds_no_gpu(
        self,
        transition: Transition,
        gpus: tuple[GpuRecord, GpuRecord],
        outcome: Outcome,
        want: tuple[GpuRecord, GpuRecord],
    ) -> None:
        change = rules.close(transition, records(*gpus), outcome)
        assert change.gpus == want
        assert change.transition.outcome is outcome
        assert {move.state for move in change.transition.moves} <= {MoveState.COMMITTED, MoveState.ABORTED}
        assert PartState.PLANNED not in {part.state for part in change.transition.parts}
        for other in set(Outcome) - {Outcome.OPEN, outcome}:
            with pytest.raises(IllegalStep, match=f"it would end {outcome}"):
                rules.close(transition, records(*gpus), other)

    def test_the_end_of_a_transition_leaves_a_gpu_of_another_transition_alone(self) -> None:
        gpus = records(OF_ACTOR_A, OF_ACTOR_B) | {A: replace(OF_ACTOR_A, transition=TransitionId("other"))}
        assert rules.close(HANDOVER, gpus, Outcome.ABORTED).gpus == (OF_ACTOR_B,)

    def test_a_component_that_stops_commits_once_what_becomes_free_is_released_but_not_before(self) -> None:
        gpus = records(OF_ACTOR_A, OF_ACTOR_B)
        half = moved(MoveState.DRAINING, MoveState.PLANNED, actor=PLANNED, rollout=PLANNED)
        with pytest.raises(IllegalStep, match=f"{B}, which leaves it, is not yet draining"):
            rules.commit(half, gpus, Role.ACTOR, None)
        draining = moved(MoveState.DRAINING, MoveState.DRAINING, actor=PLANNED, rollout=PLANNED)
        with pytest.raises(IllegalStep, match=f"{B}, which becomes free, is not yet released"):
            rules.commit(draining, gpus, Role.ACTOR, None)
        released = moved(MoveState.DRAINING, MoveState.RELEASED, actor=PLANNED, rollout=PLANNED)
        committed = rules.commit(released, gpus, Role.ACTOR, None).transition
        assert committed.part(Role.ACTOR).layout_in_force is None
        assert committed.part(Role.ROLLOUT).layout_in_force is None

    def test_a_step_with_a_stale_token_is_refused(self) -> None:
        newer = replace(OF_ACTOR_A, token=T2, transition=HANDOVER.id)
        with pytest.raises(StaleToken, match=r"under token 1\.2; the write was decided on .* under 1\.1"):
            rules.advance(HANDOVER, newer, from_state=MoveState.PLANNED, to_state=MoveState.DRAINING, term=1)

    def test_only_the_step_to_acquiring_grants_a_token(self) -> None:
        transition, record = HANDOVER, replace(OF_ACTOR_A, transition=HANDOVER.id)
        tokens = []
        for from_state, to_state in pairwise(PATH):
            change = rules.advance(transition, record, from_state=from_state, to_state=to_state, term=1)
            transition, (record,) = change.transition, change.gpus
            tokens.append((record.token, transition.move(A).granted_token))
        assert tokens == [(T1, None), (T1, None), (T2, T2)]

    def test_a_repeated_step_changes_nothing(self) -> None:
        transition, record = HANDOVER, replace(OF_ACTOR_A, transition=HANDOVER.id)
        for from_state, to_state in pairwise(PATH):
            change = rules.advance(transition, record, from_state=from_state, to_state=to_state, term=1)
            transition, (record,) = change.transition, change.gpus
            again = rules.advance(transition, record, from_state=from_state, to_state=to_state, term=2)
            assert again == rules.Change(transition)

    def test_a_step_of_several_gpus_at_once_is_that_of_each_in_turn(self) -> None:
        both, gpus = HANDOVER, tuple(records(OF_ACTOR_A, OF_ACTOR_B).values())
        for from_state, to_state in pairwise(PATH[:3]):
            at_once = rules.advance_all(both, gpus, from_state=from_state, to_state=to_state, term=1)
            first = rules.advance(both, gpus[0], from_state=from_state, to_state=to_state, term=1)
            second = rules.advance(first.transition, gpus[1], from_state=from_state, to_state=to_state, term=1)
            assert at_once == rules.Change(second.transition, (*first.gpus, *second.gpus))
            both, gpus = at_once.transition, at_once.gpus
        stranger = GpuRecord(GpuId("node-c/0"), GpuState.OWNED, ACTOR, T1, HANDOVER.id)
        with pytest.raises(UnknownGpu, match="does not move GPU node-c/0"):
            rules.advance_all(both, (stranger,), from_state=MoveState.DRAINING, to_state=MoveState.RELEASED, term=1)

    def test_a_step_of_many_gpus_takes_no_longer_a_gpu_than_one_of_few(self) -> None:
        few, many = calls_of_a_step(64), calls_of_a_step(512)
        assert many < 1.2 * 512 / 64 * few

    def test_a_store_whose_term_is_older_than_a_token_grants_nothing(self) -> None:
        released = moved(MoveState.RELEASED, MoveState.RELEASED, actor=PLANNED, rollout=PLANNED)
        token = Token(5, 1)
        planned_on = replace(released, moves=(replace(released.move(A), planned_token=token),))
        with pytest.raises(StaleToken, match="newer than the store's term 4"):
            rules.advance(
                planned_on,
                replace(FREE_A, token=token, transition=HANDOVER.id),
                from_state=MoveState.RELEASED,
                to_state=MoveState.ACQUIRING,
                term=4,
            )
