"""For any calls to a store in any order: a GPU has one owner, tokens only grow, and open transitions are disjoint.

The machine asks the store for random steps, restarts the store and adopts it. The store may refuse most steps. The
machine also keeps the view of the nodes: the holder of each GPU. A holder starts to use a GPU when the store grants it
and stops before the store gets the report of the release.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tests.effort import examples
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.memory_store import MemoryServer, memory_store
from tidegate.gate import GateState
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import (
    GpuBusy,
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
    VersionConflict,
    decode_gpu,
    decode_transition,
    encode_gpu,
    encode_transition,
)
from tidegate.ownership.transitions import earned_outcome
from tidegate.types import LARGEST_TERM, GpuId, JobId, Layout, NodeId, Role, Token, TransitionId, node_of

JOBS = (JobId("one"), JobId("two"))
GPUS = tuple(GpuId(f"node-{node}/{index}") for node in "ab" for index in range(2))
OWNERS = tuple(Owner(job, role) for job in JOBS for role in (Role.ACTOR, Role.ROLLOUT))
STEPS = (
    (MoveState.PLANNED, MoveState.DRAINING),
    (MoveState.DRAINING, MoveState.RELEASED),
    (MoveState.RELEASED, MoveState.ACQUIRING),
    (MoveState.PLANNED, MoveState.ACQUIRING),
)
Refusal = (GpuBusy, IllegalStep, StaleToken, VersionConflict)
T = TypeVar("T")


class OwnershipMachine(RuleBasedStateMachine):
    planned: Bundle[Transition] = Bundle("planned")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.server = MemoryServer()
        self.store = memory_store(self.server)
        self.terms = MemoryTermRegister()
        self.num_plans = 0
        self.holders: dict[GpuId, Owner | None] = dict.fromkeys(GPUS)
        self.passed: dict[GpuId, Token | None] = dict.fromkeys(GPUS)
        self.seen: dict[GpuId, Token] = {}

    def teardown(self) -> None:
        self.runner.close()

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def try_call(self, call: Coroutine[Any, Any, T]) -> T | None:
        try:
            return self.do(call)
        except Refusal:
            return None

    def stored(self, transition: Transition) -> Transition:
        return next(each for each in self.do(self.store.transitions(transition.job)) if each.id == transition.id)

    async def reports(self, unreachable: frozenset[NodeId]) -> GateReports:
        states = [GateState(gpu, self.passed[gpu], held=self.holders[gpu] is not None) for gpu in GPUS]
        nodes = {node_of(gpu) for gpu in GPUS} - unreachable
        return {node: [state for state in states if node_of(state.gpu) == node] for node in nodes}

    @initialize()
    def open_store(self) -> None:
        self.do(adopt(self.store, self.terms, lambda: self.reports(frozenset())))
        self.do(self.store.register(GPUS))

    @rule(
        target=planned,
        job=st.sampled_from(JOBS),
        new_owners=st.dictionaries(st.sampled_from(GPUS), st.sampled_from((None, *OWNERS)), min_size=1, max_size=3),
    )
    def plan(self, job: JobId, new_owners: dict[GpuId, Owner | None]) -> Transition | MultipleResults[Transition]:
        records = self.do(self.store.gpus())
        moves = tuple(
            Move(gpu, records[gpu].owner, target, records[gpu].token)
            for gpu, target in new_owners.items()
            if records[gpu].owner != target
        )
        self.num_plans += 1
        parts = tuple(Part(role, PartKind.START, None, Layout()) for role in (Role.ACTOR, Role.ROLLOUT))
        transition = Transition(TransitionId(f"{self.num_plans}"), job, 1, moves, parts, 0, 0, "")
        planned = self.try_call(self.store.plan(transition))
        return multiple() if planned is None else planned

    @rule(transition=planned, index=st.integers(0, 2), step=st.sampled_from(STEPS))
    def advance(self, transition: Transition, index: int, step: tuple[MoveState, MoveState]) -> None:
        if transition.moves:
            self.step(transition, transition.moves[index % len(transition.moves)].gpu, step)

    @rule(gpu=st.sampled_from(GPUS), receiver=st.sampled_from((None, *OWNERS)), num_steps=st.integers(1, 5))
    def hand_over(self, gpu: GpuId, receiver: Owner | None, num_steps: int) -> None:
        """The first `num_steps` steps of a single move, without any other call between them."""
        job = receiver.job if receiver else JOBS[0]
        transition = self.plan(job, {gpu: receiver})
        if not isinstance(transition, Transition) or not transition.moves:
            return
        for step in STEPS[:num_steps]:
            self.step(transition, gpu, step)
        if num_steps > len(STEPS):
            for part in transition.parts:
                self.commit(transition, part.role)
            self.close(transition)

    def step(self, transition: Transition, gpu: GpuId, step: tuple[MoveState, MoveState]) -> None:
        from_state, to_state = step
        record = self.do(self.store.gpus())[gpu]
        if to_state is MoveState.RELEASED and record.transition == transition.id:
            self.holders[gpu] = None
        is_repeat = self.stored(transition).move(gpu).state is to_state
        after = self.try_call(self.store.advance(transition, gpu, from_state=from_state, to_state=to_state))
        if after and to_state is MoveState.ACQUIRING and not is_repeat:
            granted = after.move(gpu).granted_token
            assert granted is not None
            assert granted > record.token
            assert self.holders[gpu] is None, f"{gpu} was granted while {self.holders[gpu]} holds it"
            self.holders[gpu], self.passed[gpu] = after.move(gpu).target, granted

    @rule(transition=planned, role=st.sampled_from((Role.ACTOR, Role.ROLLOUT)))
    def commit(self, transition: Transition, role: Role) -> None:
        acquiring = {move.gpu for move in self.stored(transition).moves if move.state is MoveState.ACQUIRING}
        after = self.try_call(self.store.commit(transition, role, Layout()))
        records = self.do(self.store.gpus())
        for move in after.moves if after else ():
            if move.gpu in acquiring and move.state is MoveState.COMMITTED:
                assert records[move.gpu].owner == move.target, f"{move.gpu} is committed to {move.target}"

    @rule(transition=consumes(planned))
    def close(self, transition: Transition) -> None:
        stored = self.stored(transition)
        self.try_call(self.store.close(stored, earned_outcome(stored)))

    @rule(gpu=st.sampled_from(GPUS))
    def lose(self, gpu: GpuId) -> None:
        self.do(self.store.mark_lost(gpu, self.do(self.store.gpus())[gpu].token))

    @rule(gpu=st.sampled_from(GPUS))
    def die_and_reclaim(self, gpu: GpuId) -> None:
        record = self.do(self.store.gpus())[gpu]
        if record.state is GpuState.LOST:
            self.holders[gpu] = None
            self.do(self.store.reclaim(gpu, record.token))

    @rule(unreachable=st.frozensets(st.sampled_from((NodeId("node-a"), NodeId("node-b"))), max_size=1))
    def restart(self, unreachable: frozenset[NodeId]) -> None:
        self.server.restart()
        self.do(adopt(self.store, self.terms, lambda: self.reports(unreachable)))

    @invariant()
    def the_holder_of_a_gpu_owns_it_or_the_gpu_is_lost(self) -> None:
        for record in self.do(self.store.contents()).gpus:
            if self.holders[record.gpu] is not None and record.state is not GpuState.LOST:
                assert record.owner == self.holders[record.gpu]

    @invariant()
    def tokens_only_grow(self) -> None:
        for record in self.do(self.store.contents()).gpus:
            assert record.token >= self.seen.get(record.gpu, record.token)
            self.seen[record.gpu] = record.token

    @invariant()
    def open_transitions_hold_disjoint_gpus_and_closed_ones_none(self) -> None:
        contents = self.do(self.store.contents())
        opened = {transition.id: transition for transition in contents.transitions}
        holding = [(move.gpu, each.id) for each in opened.values() for move in each.moves]
        assert len({gpu for gpu, _ in holding}) == len(holding)
        assert {(each.gpu, each.transition) for each in contents.gpus if each.transition} == set(holding)


def test_a_gpu_has_one_owner_and_tokens_only_grow_and_open_transitions_are_disjoint() -> None:
    run_state_machine_as_test(OwnershipMachine, settings=settings(max_examples=examples(60), stateful_step_count=30))


names = st.text(st.characters(codec="utf-8"), max_size=8)
tokens = st.builds(Token, st.integers(0, LARGEST_TERM), st.integers(0, LARGEST_TERM))
owners = st.sampled_from(OWNERS)
layouts = st.builds(Layout, tp=st.integers(1, 8), pp=st.integers(1, 8), dp=st.integers(1, 8))
records = st.one_of(
    st.builds(GpuRecord, names, st.just(GpuState.FREE), st.none(), tokens, st.none() | names),
    st.builds(GpuRecord, names, st.sampled_from([GpuState.OWNED, GpuState.LOST]), owners, tokens, st.none() | names),
)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    kind, state = draw(st.sampled_from(PartKind)), draw(st.sampled_from(PartState))
    old = draw(layouts) if kind.works_before else None
    new = draw(layouts) if kind.works_after else None
    return Part(Role.ACTOR, kind, old, old if kind is PartKind.REPLACE else new, state)


@given(records)
def test_every_gpu_record_survives_its_json(want: GpuRecord) -> None:
    assert decode_gpu(encode_gpu(want)) == want


@given(
    gpus=st.lists(names, max_size=3, unique=True),
    state=st.sampled_from(list(MoveState)),
    part=parts(),
    token=tokens,
    granted=st.none() | tokens,
    reason=names,
    outcome=st.sampled_from(list(Outcome)),
)
def test_every_transition_survives_its_json(
    gpus: list[str],
    state: MoveState,
    part: Part,
    token: Token,
    granted: Token | None,
    reason: str,
    outcome: Outcome,
) -> None:
    moves = tuple(Move(GpuId(gpu), None, Owner(JOBS[0], Role.ACTOR), token, state, granted) for gpu in gpus)
    want = Transition(TransitionId("t"), JOBS[0], 1, moves, (part,), 0, 0, reason, outcome)
    assert decode_transition(encode_transition(want)) == want
