"""Whatever components reported and whoever owns which GPU: there is a situation, and it shows no GPU twice.

Pictures are as old, and as wrong about each other, as messages may be; records are in any state that a store may hold.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.decide.policy_view import situation_of
from services.scheduler.evolve.fold import evolve
from services.scheduler.policy.situation import Situation
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Component, Down, Instance, Lead, Working
from services.scheduler.state.course import Iteration
from services.scheduler.state.layouts import engine_size
from services.scheduler.state.observed import (
    CUT,
    ENDED,
    QUEUED,
    Engine,
    Generation,
    Inferring,
    Picture,
    Pictures,
    TrainerRate,
    Training,
)
from services.scheduler.state.values import JobSpec, Placed
from tests.effort import examples
from tests.unit.scheduler.fake_parts import JOB, gpu
from tests.unit.scheduler.situations import job
from tidegate.ownership.records import GpuRecord, GpuState, Move, Owner, Part, PartKind, Transition
from tidegate.types import GpuId, Grant, InstanceId, Layout, Role, Token, TransitionId

SPEC = job(actor=4, rollout=6, inference=2, actor_tp=2, rollout_tp=2, prompts=4, group_size=2, minibatches=2)
SLOTS = tuple(gpu("n0", index) for index in range(14))
TOKENS = (Token(1, 1), Token(1, 2))
OWNERS = (*(Owner(JOB, role) for role in Role), Owner(JOB, Role.ROLLOUT))
LAYOUTS = (Layout(tp=2), Layout(tp=2, dp=2), Layout(dp=3), Layout(tp=2, dp=3))


@st.composite
def records(draw: st.DrawFn, slot: GpuId) -> GpuRecord:
    state, token = draw(st.sampled_from(GpuState)), draw(st.sampled_from(TOKENS))
    match state:
        case GpuState.FREE:
            owner = None
        case GpuState.OWNED:
            owner = draw(st.sampled_from(OWNERS))
        case GpuState.LOST:
            owner = draw(st.sampled_from((None, *OWNERS)))
    return GpuRecord(slot, state, owner, token)


@st.composite
def transitions(draw: st.DrawFn, number: int, slots: tuple[GpuId, ...]) -> Transition:
    role = draw(st.sampled_from(Role))
    owner = Owner(JOB, role)
    moved = draw(st.lists(st.sampled_from(slots), unique=True, max_size=4)) if slots else []
    moves = tuple(
        Move(each, owner, None, TOKENS[0]) if draw(st.booleans()) else Move(each, None, owner, TOKENS[0])
        for each in moved
    )
    kind = draw(st.sampled_from(PartKind))
    old = draw(st.sampled_from(LAYOUTS)) if kind.works_before else None
    new = draw(st.sampled_from(LAYOUTS)) if kind.works_after else None
    part = Part(role, kind, old, old if kind is PartKind.REPLACE else new)
    return Transition(TransitionId(f"tide/1/t{number}"), JOB, 1, moves, (part,), 1, 1000, "")


@st.composite
def generations(draw: st.DrawFn, *, num_groups: st.SearchStrategy[int]) -> Generation:
    size = SPEC.group_size
    count = draw(num_groups) * size
    shuffled = draw(st.permutations(SLOTS))
    sizes = draw(st.lists(st.sampled_from((1, 2, 2, 2)), max_size=5))
    engines = [tuple(shuffled[sum(sizes[:at]) : sum(sizes[: at + 1])]) for at in range(len(sizes))]
    places = tuple(draw(st.lists(st.integers(CUT, len(engines) - 1), min_size=count, max_size=count)))
    held = [places.count(index) for index in range(len(engines))]
    waiting = [draw(st.integers(0, num)) for num in held]
    return Generation(
        engines=tuple(
            Engine(gpus, num - waits, waits, 10 * num, 1000, 4, draw(st.sampled_from((0.0, 50.0))))
            for gpus, num, waits in zip(engines, held, waiting, strict=True)
        ),
        group_size=size,
        lengths=tuple(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))),
        places=places,
        queue=tuple(draw(st.permutations([index for index, place in enumerate(places) if place == QUEUED]))),
        hints=tuple(draw(st.sampled_from(((), (3.0,) * (count // size))))),
    )


groups = st.lists(st.integers(0, SPEC.num_prompts + 2), unique=True).map(tuple)
inferrings = st.builds(Inferring, groups, st.booleans())
rates = st.lists(st.sampled_from([TrainerRate(Layout(dp=2), 90.0), TrainerRate(Layout(dp=4), 150.0)])).map(tuple)
trainings = st.builds(
    Training, st.integers(0, 4), st.integers(0, 9), st.booleans(), st.none() | st.integers(0, 10**6), rates
)


@st.composite
def components(draw: st.DrawFn) -> Component:
    slots = draw(st.lists(st.sampled_from(SLOTS), unique=True, max_size=6))
    grants = tuple(Grant(slot, draw(st.sampled_from(TOKENS))) for slot in slots)
    layout = draw(st.sampled_from((None, *LAYOUTS)))
    return Component(state=Working(grants, Placed(tuple(slots), layout)) if grants and layout else Down())


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    half = len(SLOTS) // 2
    opened = [draw(transitions(1, SLOTS[:half])), draw(transitions(2, SLOTS[half:]))][: draw(st.integers(0, 2))]
    return ClusterState(
        job=JOB,
        incarnation=1,
        phase=Phase.RUNNING,
        spec=SPEC,
        gpus={slot: draw(records(slot)) for slot in SLOTS},
        transitions={each.id: each for each in opened},
        components={role: draw(components()) for role in Role},
        iteration=Iteration(plan=SPEC.plan(iteration=0, version=0, first_prompt=0)),
        seen=Pictures(draw(generations(num_groups=st.just(SPEC.num_prompts))), draw(inferrings), draw(trainings)),
    )


def shown(situation: Situation) -> Counter[GpuId]:
    trainer = situation.trainer.placed
    return Counter(
        [
            *(each for engine in situation.engines for each in engine.gpus),
            *(trainer.gpus if trainer else ()),
            *situation.inference.gpus,
            *situation.free,
            *situation.moving,
        ]
    )


@settings(max_examples=examples(150), deadline=None)
@given(states())
def test_every_state_of_an_open_iteration_has_a_situation_that_shows_no_gpu_twice(state: ClusterState) -> None:
    situation = situation_of(state, now_ms=5)

    assert situation is not None
    assert set(shown(situation).values()) <= {1}
    reported = state.seen.generation
    assert reported is not None
    assert len(situation.generation.lengths) == len(reported.lengths)
    assert all(len(engine.gpus) == engine_size(SPEC) for engine in situation.engines)
    lost = {slot for slot, record in state.gpus.items() if record.state is GpuState.LOST}
    in_transitions = {move.gpu for each in state.transitions.values() for move in each.moves}
    assert not lost & (shown(situation).keys() - in_transitions), "nobody knows who works on a lost GPU"


@settings(max_examples=examples(150), deadline=None)
@given(states())
def test_a_sequence_ends_only_by_its_engines_word_or_by_its_groups_being_handed_on(state: ClusterState) -> None:
    situation = situation_of(state, now_ms=5)

    assert situation is not None
    reported = state.seen.generation
    assert reported is not None
    assert state.seen.inferring is not None
    for index, (before, after) in enumerate(zip(reported.places, situation.generation.places, strict=True)):
        is_handed_on = index // reported.group_size in state.seen.inferring.ready
        assert (after <= ENDED) == (before <= ENDED or is_handed_on), index


PAINTERS: dict[Role, st.SearchStrategy[Picture]] = {
    Role.ROLLOUT: generations(num_groups=st.integers(3, 5)),
    Role.INFERENCE: inferrings,
    Role.ACTOR: trainings,
}


@st.composite
def tellings(draw: st.DrawFn) -> list[ev.Event]:
    """Pictures with a number each, of the present iteration and others, by leads and others: late, twice, in any
    order."""
    reported = []
    for sequence in range(1, draw(st.integers(1, 12))):
        role = draw(st.sampled_from(Role))
        reported.append(
            ev.Event(
                job=JOB,
                source=f"{role}@n{draw(st.sampled_from((0, 0, 0, 1)))}",
                boot=draw(st.sampled_from((1, 2, 2, 2))),
                sequence=sequence,
                body=draw(PAINTERS[draw(st.sampled_from((role, role, role, Role.ACTOR)))]),
                incarnation=draw(st.sampled_from((1, 1, 1, 0, 2))),
                iteration=draw(st.sampled_from((0, 0, 0, 1))),
            )
        )
    return draw(st.permutations([*reported, *draw(st.lists(st.sampled_from(reported)))])) if reported else []


def led(spec: JobSpec) -> ClusterState:
    """An open iteration; each role's lead is the second start of its instance on n0."""
    names = {role: InstanceId(f"{role}@n0") for role in Role}
    return ClusterState(
        job=JOB,
        incarnation=1,
        phase=Phase.RUNNING,
        spec=spec,
        components={role: Component(lead=Lead(name, "x", epoch=1, boot=2)) for role, name in names.items()},
        instances={name: Instance("x", boot=2, living=True) for name in names.values()},
        iteration=Iteration(plan=spec.plan(iteration=0, version=0, first_prompt=0)),
    )


@settings(max_examples=examples(150), deadline=None)
@given(tellings())
def test_the_latest_picture_of_each_lead_is_kept_in_whatever_order_they_come(reported: list[ev.Event]) -> None:
    state = led(SPEC)
    for event in reported:
        state = evolve(state, event)
        situation_of(state, now_ms=0)

    right = [event for event in reported if _counts(event)]
    for role, kind in ((Role.ROLLOUT, Generation), (Role.INFERENCE, Inferring), (Role.ACTOR, Training)):
        of_role = [each for each in right if each.source == f"{role}@n0" and isinstance(each.body, kind)]
        want = max(of_role, key=lambda each: each.sequence).body if of_role else None
        seen = {
            Role.ROLLOUT: state.seen.generation,
            Role.INFERENCE: state.seen.inferring,
            Role.ACTOR: state.seen.training,
        }
        assert seen[role] == want


def _counts(event: ev.Event) -> bool:
    is_of_plan = not isinstance(event.body, Generation) or event.body.num_groups == SPEC.num_prompts
    return (event.boot, event.incarnation, event.iteration) == (2, 1, 0) and is_of_plan
