"""A situation shows the components' pictures, changed to agree with the ownership of GPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from services.scheduler.decide.policy_view import situation_of
from services.scheduler.policy.situation import Situation
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Component, Working
from services.scheduler.state.costs import LengthLaw
from services.scheduler.state.course import Iteration
from services.scheduler.state.events import IterationReported
from services.scheduler.state.learned import Learned
from services.scheduler.state.observed import (
    AWAY,
    ENDED,
    QUEUED,
    Engine,
    Generation,
    Inferring,
    Pictures,
    TrainerRate,
    Training,
)
from services.scheduler.state.values import Fate, JobSpec, Placed
from tests.unit.scheduler.fake_parts import JOB
from tests.unit.scheduler.situations import gpus, job
from tidegate.ownership.records import GpuRecord, GpuState, Move, Owner, Part, PartKind, Transition
from tidegate.types import GpuId, Grant, Layout, Role, Token, TransitionId, gpu_index

TOKEN = Token(1, 5)
SPEC = job(actor=4, rollout=6, inference=2, actor_tp=2, rollout_tp=2, prompts=4, group_size=2, minibatches=2)
"""GPUs 0-3 train, 4-9 are three engines, 10 and 11 infer."""
ENGINES = tuple(gpus(start, start + 2) for start in (4, 6, 8))
PICTURE = Generation(
    engines=(
        Engine(ENGINES[0], 1, 1, 100, 1000, 8, 60.0),
        Engine(ENGINES[1], 1, 0, 50, 1000, 8, 30.0),
        Engine(ENGINES[2], 0, 0, 0, 1000, 8, 0.0),
    ),
    group_size=2,
    lengths=(9, 9, 7, 6, 0, 8, 0, 0),
    places=(ENDED, ENDED, 0, 1, 0, AWAY, QUEUED, QUEUED),
    queue=(7, 6),
)


def owned(spec: JobSpec, role: Role) -> dict[GpuId, GpuRecord]:
    owner = Owner(JOB, role)
    return {gpu: GpuRecord(gpu, GpuState.OWNED, owner, TOKEN) for gpu in spec.placement[role].gpus}


def component(spec: JobSpec, role: Role) -> Component:
    placed = spec.placement[role]
    return Component(state=Working(tuple(Grant(gpu, TOKEN) for gpu in placed.gpus), placed))


def state_of(spec: JobSpec, seen: Pictures) -> ClusterState:
    return ClusterState(
        job=JOB,
        incarnation=3,
        phase=Phase.RUNNING,
        spec=spec,
        gpus={gpu: record for role in Role for gpu, record in owned(spec, role).items()},
        components={role: component(spec, role) for role in Role},
        iteration=Iteration(plan=spec.plan(iteration=5, version=5, first_prompt=40)),
        seen=seen,
    )


SEEN = Pictures(PICTURE, Inferring((0,), is_busy=True), Training(0, 1, is_at_boundary=False))
STATE = state_of(SPEC, SEEN)


def see(state: ClusterState) -> Situation:
    situation = situation_of(state, now_ms=77)
    assert situation is not None
    return situation


def with_records(state: ClusterState, records: Mapping[GpuId, GpuRecord]) -> ClusterState:
    return replace(state, gpus={**state.gpus, **records})


def moving(
    state: ClusterState, role: Role, leaving: tuple[GpuId, ...], coming: tuple[GpuId, ...], *, new: Layout | None
) -> ClusterState:
    owner = Owner(JOB, role)
    moves = (*(Move(gpu, owner, None, TOKEN) for gpu in leaving), *(Move(gpu, None, owner, TOKEN) for gpu in coming))
    part = Part(role, PartKind.RESIZE if new else PartKind.SUSPEND, state.components[role].layout, new)
    transition = Transition(TransitionId("tide/3/t1"), JOB, 3, moves, (part,), 1, 1000, "")
    return replace(state, transitions={transition.id: transition})


def test_a_situation_shows_the_pictures_as_they_are_where_the_records_agree() -> None:
    situation = see(STATE)

    assert situation.generation is PICTURE, "what was computed of it once is there for the next decision"
    assert situation.inference.gpus == gpus(10, 12)
    assert situation.inference.inferring == SEEN.inferring
    assert situation.trainer.placed == Placed(gpus(0, 4), Layout(tp=2, dp=2))
    assert (situation.free, situation.moving) == ((), ())
    assert (situation.now_ms, situation.incarnation, situation.iteration) == (77, 3, 5)
    assert (situation.trainer.training.num_taken, situation.trainer.training.is_at_boundary) == (1, False)


@pytest.mark.parametrize(
    "state",
    [
        replace(STATE, spec=None),
        replace(STATE, iteration=None),
        replace(STATE, seen=replace(SEEN, generation=None)),
        replace(STATE, seen=replace(SEEN, inferring=None)),
        replace(STATE, seen=replace(SEEN, training=None)),
    ],
    ids=["no spec", "no iteration", "no rollout", "no inference", "no actor"],
)
def test_without_pictures_of_all_three_components_there_is_no_situation(state: ClusterState) -> None:
    assert situation_of(state, now_ms=0) is None


def test_an_engine_that_is_leaving_is_left_out_and_its_sequences_are_away() -> None:
    situation = see(moving(STATE, Role.ROLLOUT, ENGINES[0], (), new=Layout(tp=2, dp=2)))

    assert [engine.gpus for engine in situation.engines] == [ENGINES[1], ENGINES[2]]
    assert situation.generation.places == (ENDED, ENDED, AWAY, 0, AWAY, AWAY, QUEUED, QUEUED)
    assert situation.generation.queue == (7, 6)
    assert situation.moving == ENGINES[0]


def test_an_engine_of_which_one_gpu_is_lost_is_left_out_and_the_lost_gpu_is_nowhere() -> None:
    lost = {ENGINES[1][0]: GpuRecord(ENGINES[1][0], GpuState.LOST, Owner(JOB, Role.ROLLOUT), TOKEN)}
    situation = see(with_records(STATE, lost))

    assert [engine.gpus for engine in situation.engines] == [ENGINES[0], ENGINES[2]]
    assert situation.generation.places[3] == AWAY
    assert (situation.free, situation.moving) == ((), ())


def test_an_engine_under_an_older_token_is_not_the_rollouts() -> None:
    regranted = {gpu: GpuRecord(gpu, GpuState.OWNED, Owner(JOB, Role.ROLLOUT), Token(1, 6)) for gpu in ENGINES[2]}
    assert len(see(with_records(STATE, regranted)).engines) == 2


def test_an_engine_that_is_not_reported_yet_is_there_with_nothing_in_it() -> None:
    picture = replace(PICTURE, engines=PICTURE.engines[:2])
    situation = see(replace(STATE, seen=replace(SEEN, generation=picture)))

    assert situation.engines == (*PICTURE.engines[:2], Engine(ENGINES[2], 0, 0, 0, 1000, 8, 0.0))
    assert situation.generation.places == PICTURE.places


def test_a_group_that_was_handed_on_has_ended_whatever_the_rollout_reported_before() -> None:
    situation = see(replace(STATE, seen=replace(SEEN, inferring=Inferring((0, 2, 3)))))

    assert situation.generation.places == (ENDED, ENDED, 0, 1, ENDED, ENDED, ENDED, ENDED)
    assert situation.generation.queue == ()
    assert (situation.engines[0].num_running, situation.engines[0].num_waiting) == (0, 1)
    assert situation.inference.inferring.ready == (0, 2, 3)


def test_a_group_that_the_rollout_has_not_reported_is_not_handed_on_yet() -> None:
    training = replace(STATE.seen.training or Training(), num_taken=2)
    situation = see(replace(STATE, seen=replace(SEEN, inferring=Inferring((4, 0)), training=training)))

    assert situation.inference.inferring.ready == (0,)
    assert situation.trainer.training.num_taken == 1


def test_a_trainer_that_is_ahead_of_inferences_picture_took_only_reported_groups() -> None:
    training = Training(num_minibatches_done=9, num_taken=4)
    situation = see(replace(STATE, seen=replace(SEEN, training=training)))

    assert situation.trainer.training.num_taken == 1
    assert situation.trainer.training.num_minibatches_done == SPEC.num_minibatches


def test_an_actor_that_has_reported_has_trained_all_that_it_will_whatever_its_picture_says() -> None:
    assert STATE.iteration is not None
    report = IterationReported(Fate(), Fate(), (), (), 0, ())
    training = Training(num_minibatches_done=1, num_taken=1, is_at_boundary=False)
    reported = replace(STATE, iteration=replace(STATE.iteration, reports={Role.ACTOR: report}))
    seen = see(replace(reported, seen=replace(SEEN, training=training))).trainer.training

    assert (seen.num_minibatches_done, seen.num_taken, seen.is_at_boundary) == (SPEC.num_minibatches, 1, True)


RESIZED: dict[str, tuple[ClusterState, Placed | None, tuple[GpuId, ...]]] = {
    "a trainer that shrinks is in the layout to come": (
        moving(STATE, Role.ACTOR, gpus(2, 4), (), new=Layout(tp=2)),
        Placed(gpus(0, 2), Layout(tp=2)),
        gpus(2, 4),
    ),
    "a trainer that grows is in the layout it has": (
        moving(STATE, Role.ACTOR, (), gpus(12, 14), new=Layout(tp=2, dp=3)),
        Placed(gpus(0, 4), Layout(tp=2, dp=2)),
        gpus(12, 14),
    ),
    "a trainer that goes elsewhere has no GPUs on the way": (
        moving(STATE, Role.ACTOR, gpus(0, 2), gpus(12, 14), new=Layout(tp=2, dp=2)),
        None,
        (*gpus(0, 4), *gpus(12, 14)),
    ),
    "a trainer that ends has none": (moving(STATE, Role.ACTOR, gpus(0, 4), (), new=None), None, gpus(0, 4)),
}


@pytest.mark.parametrize("case", RESIZED)
def test_a_trainer_that_moves_is_seen_without_the_gpus_under_way(case: str) -> None:
    state, want_placed, want_moving = RESIZED[case]

    situation = see(state)

    assert situation.trainer.placed == want_placed
    assert situation.trainer.training.is_at_boundary is (want_placed is None)
    assert sorted(situation.moving, key=gpu_index) == list(want_moving)


def test_a_trainer_that_lacks_a_rank_works_on_nothing() -> None:
    actor = STATE.components[Role.ACTOR].with_grants(STATE.components[Role.ACTOR].grants[:3])
    situation = see(replace(STATE, components={**STATE.components, Role.ACTOR: actor}))

    assert situation.trainer.placed is None
    assert situation.moving == gpus(0, 3)


def test_a_gpu_that_nobody_owns_is_free_in_the_situation() -> None:
    free = {gpu: GpuRecord(gpu, GpuState.FREE, None, TOKEN) for gpu in gpus(10, 14)}
    situation = see(with_records(STATE, free))

    assert situation.free == gpus(10, 14)
    assert situation.inference.gpus == ()


def test_measured_costs_go_before_assumed_costs_in_a_situation() -> None:
    assumed = see(STATE)
    assert assumed.trainer.training.measured == ()
    assert assumed.inference_tokens_per_s_per_gpu == SPEC.rates.inference_tokens_per_s_per_gpu
    assert (assumed.costs, assumed.lengths) == (SPEC.costs, SPEC.lengths)

    rate, law = TrainerRate(Layout(tp=2, dp=2), 123.0), LengthLaw(3.0, 0.1, 0.1, 0.1)
    measured = see(replace(STATE, learned=Learned((rate,), 0.0, law)))
    assert measured.trainer.training.measured == (rate,)
    assert measured.lengths == law
    slower = see(replace(STATE, learned=Learned(log_decode=1.0)))
    assert slower.costs.decode.floor_s == pytest.approx(2.718 * SPEC.costs.decode.floor_s, rel=1e-3)
    assert replace(slower.costs, decode=SPEC.costs.decode) == SPEC.costs
    others = see(replace(STATE, learned=Learned(update_s=0.75, inference_tokens_per_s=77.0)))
    assert others.costs == replace(SPEC.costs, update_s=0.75)
    assert others.inference_tokens_per_s_per_gpu == 77.0


MAX_MS = 15.0
"""CPU time: ten times the 1.5 ms that it takes. A loop in Python over the sequences would take more."""


def test_four_thousand_running_sequences_on_a_thousand_gpus_are_seen_at_once() -> None:
    big = job(actor=192, rollout=768, inference=64, actor_tp=4, rollout_tp=2, prompts=256, group_size=16, minibatches=4)
    engines = [gpus(start, start + 2) for start in range(192, 960, 2)]
    places = tuple(index % len(engines) for index in range(4096))
    picture = Generation(
        tuple(Engine(each, places.count(index), 0, 9000, 10**6, 64, 300.0) for index, each in enumerate(engines)),
        group_size=16,
        lengths=tuple(range(4096)),
        places=places,
    )
    state = state_of(big, Pictures(picture, Inferring(), Training()))
    state = moving(state, Role.ROLLOUT, gpus(192, 256), (), new=Layout(tp=2, dp=352))

    taken_ms = []
    for _ in range(5):
        fresh = replace(state, seen=replace(state.seen, generation=replace(picture)))
        start_s = time.thread_time()
        situation = situation_of(fresh, now_ms=0)
        taken_ms.append((time.thread_time() - start_s) * 1000)
        assert situation is not None
        assert len(situation.engines) == 352
    assert min(taken_ms) < MAX_MS
