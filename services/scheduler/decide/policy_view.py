"""`situation_of(state, now_ms)` makes the input of a policy from the components' pictures and from GPU ownership. Pure.

The three pictures come from three leads and are a little old. Only the ownership record says where a GPU is. So the
pictures are changed to agree with the record:
- An engine is left out if one of its GPUs moves, is lost, or is not the rollout's any more. Its sequences are away.
- An engine that the rollout has and has not reported yet is there, without sequences.
- A group that inference handed on has ended, also where an older picture of the rollout says otherwise.
- An actor that has reported its account has trained all its minibatches, also where its picture says less. The picture
  of a new lead says less, and so does that of an iteration with too few groups for its minibatches.
- A free GPU is left out if no instance of its node lives, or if it is drained by hand.
- A trainer that lacks ranks has no GPUs and is between two updates. Its other GPUs count as moving.

Invariants:
- Every state of an open iteration, whatever its pictures and transitions, gives a situation and no error.
  [test_situations: every_state_of_an_open_iteration]
- A GPU is in a situation at most once. [test_situations: shows_no_gpu_twice]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.situation import Inference, Situation, Trainer
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.homes import home_spec
from services.scheduler.state.layouts import engine_size, replicas
from services.scheduler.state.observed import AWAY, ENDED, QUEUED, Engine, Generation, Inferring, Ints, Training
from services.scheduler.state.values import JobSpec, Placed
from tidegate.ownership.records import GpuState
from tidegate.types import GpuId, Layout, Role


def situation_of(state: ClusterState, now_ms: int, *, home: JobSpec | None = None) -> Situation | None:
    """None while no iteration is open, or a component has not reported it yet. `home` is the job with its components at
    home. Without it they are where the config or a person placed them."""
    iteration, seen = state.iteration, state.seen
    if state.spec is None or iteration is None:
        return None
    spec = home or home_spec(state, state.spec)
    if seen.generation is None or seen.inferring is None or seen.training is None:
        return None
    whereabouts = _whereabouts(state)
    trainer = _placed_trainer(state, whereabouts)
    generation = _generation(seen.generation, seen.inferring, whereabouts.held[Role.ROLLOUT], engine_size(spec))
    ready, num_taken = _handed_on(seen.inferring, seen.training, generation.num_groups)
    is_trained = Role.ACTOR in iteration.reports
    num_done = spec.num_minibatches if is_trained else seen.training.num_minibatches_done
    num_done = min(num_done, spec.num_minibatches)
    # A picture may say that all minibatches are done and one is open: there is none that could be.
    is_over = num_done == spec.num_minibatches
    training = replace(
        seen.training,
        num_minibatches_done=num_done,
        num_taken=num_taken,
        is_at_boundary=seen.training.is_at_boundary or is_over or trainer is None,
        measured=state.learned.rates,
    )
    idle = () if trainer else whereabouts.held[Role.ACTOR]
    if not generation.engines:
        # No engine is reported that new ones could be modelled on: their GPUs count as moving.
        idle += whereabouts.held[Role.ROLLOUT]
    inference = Inference(
        gpus=whereabouts.held[Role.INFERENCE],
        measured_tokens_per_s_per_gpu=state.learned.inference_tokens_per_s,
        inferring=Inferring(ready, seen.inferring.is_busy, num_tokens_ahead=seen.inferring.num_tokens_ahead),
    )
    return Situation(
        now_ms=now_ms,
        incarnation=state.incarnation,
        iteration=iteration.plan.iteration,
        spec=spec,
        generation=generation,
        inference=inference,
        trainer=Trainer(trainer, training),
        free=whereabouts.free,
        moving=tuple(sorted({*whereabouts.moving, *idle})),
        costs=state.learned.costs(spec.costs),
        lengths=state.learned.lengths or spec.lengths,
        remembered=state.remembered,
    )


@dataclass(frozen=True, slots=True)
class _Whereabouts:
    """GPUs by the ownership record. `held` are those that a component works with, in rank order, without those that
    are `moving`."""

    held: dict[Role, tuple[GpuId, ...]]
    free: tuple[GpuId, ...]
    moving: frozenset[GpuId]


def _whereabouts(state: ClusterState) -> _Whereabouts:
    moving = frozenset(move.gpu for transition in state.transitions.values() for move in transition.moves)
    free = [each.gpu for each in state.owned_by(None) if each.state is GpuState.FREE]
    closed = moving.union(state.absent, state.manual.drained)
    free = [gpu for gpu in free if gpu not in closed]
    held = {role: _held(state, role, moving) for role in Role}
    return _Whereabouts(held=held, free=tuple(free), moving=moving)


def _held(state: ClusterState, role: Role, moving: frozenset[GpuId]) -> tuple[GpuId, ...]:
    """The GPUs of the role's grants that agree with the store's record and do not move."""
    owned = {each.gpu: each.token for each in state.owned_by(role) if each.state is GpuState.OWNED}
    grants = state.components[role].grants
    return tuple([each.gpu for each in grants if owned.get(each.gpu) == each.token and each.gpu not in moving])


def _placed_trainer(state: ClusterState, whereabouts: _Whereabouts) -> Placed | None:
    """The trainer's GPUs, in the layout that fits their number: the next layout while a resize takes GPUs away."""
    gpus = whereabouts.held[Role.ACTOR]
    for layout in _layouts(state):
        if gpus and layout.num_ranks == len(gpus):
            return Placed(gpus, layout)
    return None


def _layouts(state: ClusterState) -> Sequence[Layout]:
    present, transition = state.components[Role.ACTOR].layout, state.resize()
    coming = transition.part(Role.ACTOR).new_layout if transition else None
    return tuple(layout for layout in (present, coming) if layout is not None)


def _handed_on(inferring: Inferring, training: Training, num_groups: int) -> tuple[tuple[int, ...], int]:
    """The ready groups that the rollout has reported, and how many of them are in a minibatch."""
    if not inferring.ready or max(inferring.ready) < num_groups:
        return inferring.ready, min(training.num_taken, len(inferring.ready))
    num_taken = sum(group < num_groups for group in inferring.ready[: training.num_taken])
    return tuple(group for group in inferring.ready if group < num_groups), num_taken


def _generation(picture: Generation, inferring: Inferring, held: tuple[GpuId, ...], size: int) -> Generation:
    """The picture that agrees with the record. One that already agrees stays the same object, because the values
    computed from it are cached on it."""
    mine = set(held)
    stays = [len(engine.gpus) == size and mine.issuperset(engine.gpus) for engine in picture.engines]
    ended = np.array([group for group in inferring.ready if group < picture.num_groups], dtype=np.int64)
    is_stale = bool(picture.unfinished_by_group[ended].any())
    new = _unreported_engines(picture, held, stays, size)
    if all(stays) and not is_stale:
        return replace(picture, engines=(*picture.engines, *new)) if new else picture
    engines = tuple(engine for engine, does in zip(picture.engines, stays, strict=True) if does)
    places = _places_among(picture.place_of, np.array(stays, dtype=np.bool_))
    if is_stale:
        in_groups = places.reshape(-1, picture.group_size)
        in_groups[ended] = np.where(in_groups[ended] > ENDED, ENDED, in_groups[ended])
    queue = picture.in_queue
    return replace(
        picture,
        engines=(*_with_counts(engines, places), *new),
        places=tuple(places.tolist()),
        queue=tuple(queue[places[queue] == QUEUED].tolist()),
    )


def _unreported_engines(
    picture: Generation, held: tuple[GpuId, ...], stays: Sequence[bool], size: int
) -> tuple[Engine, ...]:
    """Empty engines that the rollout holds and has not reported, with the capacity of the first reported one. None
    where no engine is reported."""
    known = {gpu for engine, does in zip(picture.engines, stays, strict=True) if does for gpu in engine.gpus}
    if not picture.engines or len(known) == len(held):
        return ()
    empty = replace(picture.engines[0], gpus=(), num_running=0, num_waiting=0, num_kv_tokens=0, rate_tokens_per_s=0.0)
    return tuple(replace(empty, gpus=gpus) for gpus in replicas(tuple(g for g in held if g not in known), size))


def _places_among(places: Ints, stays: np.typing.NDArray[np.bool_]) -> Ints:
    """Places among the engines that stay. A sequence on another engine is away."""
    index_of = np.where(stays, np.cumsum(stays) - 1, AWAY)
    moved: Ints = places.copy()
    is_placed = moved >= 0
    moved[is_placed] = index_of[moved[is_placed]]
    return moved


def _with_counts(engines: tuple[Engine, ...], places: Ints) -> tuple[Engine, ...]:
    """Engines with the number of sequences that have a place on them. Of these, as many wait as waited before."""
    held = np.bincount(places[places >= 0], minlength=len(engines)).tolist()
    return tuple(
        engine
        if engine.num_running + engine.num_waiting == num
        else replace(engine, num_running=num - min(num, engine.num_waiting), num_waiting=min(num, engine.num_waiting))
        for engine, num in zip(engines, held, strict=True)
    )
