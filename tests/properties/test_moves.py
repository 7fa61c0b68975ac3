"""GPUs under whatever is proposed: any GPU to any component in any order, again and again, with events late, twice and
out of order, lost commands, changes that fail, and deaths.

`Drive` checks the invariants after every step: one owner a GPU, tokens only grow. The fake cluster asserts that
- no GPU is released while a worker holds it or a layout in force counts on it,
- nobody resumes a state that is not there,
- no engine works without the iteration's weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.decide.proposals import PolicyAnswer
from services.scheduler.decide.turn import turn
from services.scheduler.policy import Proposal
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.values import JobSpec, Placed
from tests.properties.job_histories import SLOTS, blow, happen, ordinary
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, gpu, spec
from tests.unit.scheduler.proposals import ProposalMaker
from tidegate.ownership.records import GpuState
from tidegate.types import Layout, Role

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ENGINE_SIZES = (1, 2)
MAX_PROPOSALS = 5
MAX_BLOWS = 4
MAX_STEPS = 3000
Placement = dict[Role, Placed | None]
Step = tuple[str, int | Placement]


def job(engine_size: int) -> JobSpec:
    """Nine GPUs on two nodes; the rollout's engines have one, or two."""
    known = spec(max_actor_restarts=99, standby=SLOTS[2:])
    if engine_size == 1:
        return known
    rollout = Placed((gpu("n0", 1), gpu("n1", 1)), Layout(tp=engine_size))
    return replace(known, placement={**known.placement, Role.ROLLOUT: rollout}, standby=(*known.standby, gpu("n1", 3)))


@st.composite
def placements(draw: st.DrawFn, engine_size: int) -> Placement:
    gpus = draw(st.permutations(job(engine_size).gpus))
    owners = draw(st.lists(st.sampled_from([*Role, *Role, None]), min_size=len(gpus), max_size=len(gpus)))
    mine = {role: [slot for slot, owner in zip(gpus, owners, strict=True) if owner is role] for role in Role}
    sizes = {Role.ACTOR: draw(st.sampled_from([1, 2])), Role.ROLLOUT: engine_size, Role.INFERENCE: 2}
    placed: Placement = {}
    for role, size in sizes.items():
        num_copies = len(mine[role]) // size
        chosen = tuple(mine[role][: num_copies * size])
        placed[role] = Placed(chosen, Layout(tp=size, dp=num_copies)) if chosen else None
    return placed


@st.composite
def undisturbed(draw: st.DrawFn, engine_size: int) -> list[Step]:
    """Proposals, with time for what they lead to, or without."""
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, MAX_PROPOSALS))):
        steps.append(("propose", draw(placements(engine_size))))
        steps += [step for step in draw(st.lists(ordinary, max_size=25)) if step[0] != "lose commands"]
    return steps


@st.composite
def histories(draw: st.DrawFn, engine_size: int) -> list[Step]:
    """And what goes wrong."""
    steps = draw(undisturbed(engine_size))
    failures = st.one_of(blow, st.tuples(st.sampled_from(["fail resize", "lose commands"]), st.just(0)))
    for _ in range(draw(st.integers(1, MAX_BLOWS))):
        where = draw(st.integers(0, len(steps)))
        steps.insert(where, draw(failures))
    return steps


@dataclass
class Recorded(ProposalMaker):
    """`proposals`: all that were made, in order."""

    proposals: list[Proposal] = field(default_factory=list)

    def __call__(self, state: ClusterState) -> Proposal:
        self.proposals.append(super().__call__(state))
        return self.proposals[-1]

    def now(self, state: ClusterState) -> Proposal:
        return super().__call__(state)


def moved(steps: list[Step], engine_size: int) -> tuple[Drive, Recorded]:
    """From the opening of a job's first iteration, in which no minibatch is begun."""
    drive, proposed = booted(FakeCluster(job(engine_size))), Recorded()
    drive.propose = proposed
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    for what, number in steps:
        if what == "propose":
            assert isinstance(number, dict)
            proposed.placement = number
            drive.decide()
        else:
            assert isinstance(number, int)
            happen(drive, what, number)
    return drive, proposed


def is_done(drive: Drive, proposed: Recorded) -> bool:
    """Everybody lives, an iteration is open, and every component is where it is proposed."""
    if not all(instance.is_alive and instance.has_lease for instance in drive.cluster.instances.values()):
        return False
    state = drive.state
    if state.iteration is None or state.phase is not Phase.RUNNING or state.transitions or drive.cluster.outbox:
        return False
    for role, placed in proposed.now(state).placement.items():
        component = state.components[role]
        gpus = tuple(grant.gpu for grant in component.grants)
        there = (gpus == placed.gpus if role is Role.ACTOR else set(gpus) == set(placed.gpus)) if placed else not gpus
        if not there or (role is Role.ACTOR and component.layout != (placed.layout if placed else None)):
            return False
    return True


def settle(drive: Drive, proposed: Recorded) -> None:
    for _ in range(MAX_STEPS):
        if is_done(drive, proposed):
            return
        assert drive.step(), drive.last_reason
    raise AssertionError(f"it never comes to what is proposed: {drive.last_reason}")


def check_owners(drive: Drive, proposed: Recorded) -> None:
    """Each GPU belongs to whom it is proposed for, and nobody has another."""
    placement = proposed.now(drive.state).placement
    owners = {slot: role for role, placed in placement.items() if placed for slot in placed.gpus}
    for slot, record in drive.cluster.store.gpus.items():
        if record.state is not GpuState.LOST:
            assert (record.owner.role if record.owner else None) == owners.get(slot), slot
    for slot in owners:
        assert drive.cluster.gates[slot].is_held


def finish(drive: Drive, proposed: Recorded) -> None:
    proposed.placement, proposed.trains = {}, True
    drive.decide()
    state = drive.run()
    assert (state.phase, state.message) == (Phase.FINISHED, "all 2 iterations are done")
    lineage = [summary for summary in state.summaries if not summary.is_superseded]
    assert [summary.iteration for summary in lineage] == [0, 1]
    assert not any(summary.num_lost or summary.num_duplicates for summary in state.summaries)
    assert not any(gate.is_held for gate in drive.cluster.gates.values())
    assert not any(record.owner for record in drive.cluster.store.gpus.values())


def check_undisturbed(steps: list[Step], engine_size: int) -> None:
    drive, proposed = moved(steps, engine_size)
    began_ms = drive.now_ms

    settle(drive, proposed)

    assert drive.now_ms == began_ms, "only what was asked for is waited for"
    check_owners(drive, proposed)
    assert not any(drive.state.components[role].num_failed_starts for role in Role)
    finish(drive, proposed)
    assert (drive.state.incarnation, drive.state.num_restarts) == (1, 0)


def check_disturbed(steps: list[Step], engine_size: int) -> None:
    drive, proposed = moved(steps, engine_size)
    settle(drive, proposed)
    check_owners(drive, proposed)
    finish(drive, proposed)


def check_replayed(steps: list[Step], engine_size: int) -> None:
    drive, proposed = moved(steps, engine_size)
    state, proposals = ClusterState(job=JOB), iter(proposed.proposals)
    events: list[ev.Event] = []
    for event, now_ms, want in drive.seen:
        if event is not None:
            events.append(event)
        if want is not None:
            made = turn(
                state,
                now_ms,
                drive.policy,
                events=events,
                propose=lambda on, _policy, _now_ms: PolicyAnswer(next(proposals), on.remembered),
            )
            assert repr(made.decision) == repr(want)
            state, events = decode_state(encode_state(made.after)), []
    assert encode_state(state) == encode_state(drive.state)


SIZES = pytest.mark.parametrize("engine_size", ENGINE_SIZES)


@SIZES
@FEW
@given(st.data())
def test_every_gpu_comes_to_whom_it_is_proposed_for_without_a_wait_and_costs_nothing(
    engine_size: int, data: st.DataObject
) -> None:
    check_undisturbed(data.draw(undisturbed(engine_size)), engine_size)


@SIZES
@FEW
@given(st.data())
def test_whatever_goes_wrong_every_gpu_comes_to_whom_it_is_proposed_for(engine_size: int, data: st.DataObject) -> None:
    check_disturbed(data.draw(histories(engine_size)), engine_size)


@settings(FEW, max_examples=6)
@given(st.data())
def test_the_same_history_and_proposals_give_the_same_commands_byte_for_byte(data: st.DataObject) -> None:
    check_replayed(data.draw(histories(1)), 1)


@pytest.mark.long
@SIZES
@MANY
@given(st.data())
def test_over_many_histories_every_gpu_comes_to_whom_it_is_proposed_for(engine_size: int, data: st.DataObject) -> None:
    check_undisturbed(data.draw(undisturbed(engine_size)), engine_size)
    check_disturbed(data.draw(histories(engine_size)), engine_size)
