"""`situation_of(state, now_ms)`: what a policy looks at, from what components told and from who owns which GPU. Pure.

What components tell comes from three places and is a little old, and the ownership record is the only word on GPUs. So
the record decides where a GPU is, and what was told is brought to agree with it:
- an engine with a GPU that is on its way, lost or no longer the rollout's is left out, and its sequences are away;
- an engine that the rollout has and has not told of yet is there with nothing in it;
- a group that inference handed on has ended, whatever an older picture of the rollout says of it;
- an actor that has reported has trained all that it will, whatever its picture says: one that a new lead tells, or of
  an iteration that had too few groups for its minibatches, says less;
- a free GPU of a node of which no instance lives is nowhere;
- a trainer whose ranks are not all there has no GPUs and is between two updates; what GPUs it has work on nothing.

Invariants: it never raises, whatever pictures and transitions the state holds; no GPU is in it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.decide.homes import moved
from services.scheduler.policy.situation import Inference, Situation, Trainer
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.layouts import engine_size, replicas
from services.scheduler.state.observed import AWAY, ENDED, QUEUED, Engine, Generation, Inferring, Ints, Training
from services.scheduler.state.values import JobSpec, Placed
from tidegate.ownership.records import GpuState
from tidegate.types import GpuId, Layout, Role


def situation_of(state: ClusterState, now_ms: int, *, home: JobSpec | None = None) -> Situation | None:
    """None while no iteration is open, or a component has not told of it yet. `home`: the job with its components where
    they start; None: where the config, or for the actor a person, places them."""
    iteration, seen = state.iteration, state.seen
    if state.spec is None or iteration is None:
        return None
    spec = home or moved(state, state.spec)
    if seen.generation is None or seen.inferring is None or seen.training is None:
        return None
    whereabouts = _whereabouts(state)
    trainer = _placed_trainer(state, whereabouts)
    generation = _generation(seen.generation, seen.inferring, whereabouts.held[Role.ROLLOUT], engine_size(spec))
    ready, num_taken = _handed_on(seen.inferring, seen.training, generation.num_groups)
    is_trained = Role.ACTOR in iteration.reports
    num_done = spec.num_minibatches if is_trained else seen.training.num_minibatches_done
    training = replace(
        seen.training,
        num_minibatches_done=min(num_done, spec.num_minibatches),
        num_taken=num_taken,
        is_at_boundary=seen.training.is_at_boundary or is_trained or trainer is None,
        measured=state.learned.rates,
    )
    idle = () if trainer else whereabouts.held[Role.ACTOR]
    if not generation.engines:
        # Of engines too new to be told of, where none was that they could be like.
        idle += whereabouts.held[Role.ROLLOUT]
    inference = Inference(
        gpus=whereabouts.held[Role.INFERENCE],
        measured_tokens_per_s_per_gpu=state.learned.inference_tokens_per_s,
        inferring=Inferring(ready, seen.inferring.is_busy),
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
    """By the ownership record. `held`: what a component works with, in rank order, apart from what is `moving`."""

    held: dict[Role, tuple[GpuId, ...]]
    free: tuple[GpuId, ...]
    moving: frozenset[GpuId]


def _whereabouts(state: ClusterState) -> _Whereabouts:
    moving = frozenset(move.gpu for transition in state.transitions.values() for move in transition.moves)
    free = [each.gpu for each in state.owned_by(None) if each.state is GpuState.FREE]
    free = [gpu for gpu in free if gpu not in moving and gpu not in state.absent]
    held = {role: _held(state, role, moving) for role in Role}
    return _Whereabouts(held=held, free=tuple(free), moving=moving)


def _held(state: ClusterState, role: Role, moving: frozenset[GpuId]) -> tuple[GpuId, ...]:
    """Those of its grants that the store's record agrees with."""
    owned = {each.gpu: each.token for each in state.owned_by(role) if each.state is GpuState.OWNED}
    grants = state.components[role].grants
    return tuple([each.gpu for each in grants if owned.get(each.gpu) == each.token and each.gpu not in moving])


def _placed_trainer(state: ClusterState, whereabouts: _Whereabouts) -> Placed | None:
    """Where it trains, in the layout that fits what it holds: while a resize takes GPUs away, the one to come."""
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
    """The groups that are ready, of those that the rollout told of, and how many of them are in a minibatch."""
    if not inferring.ready or max(inferring.ready) < num_groups:
        return inferring.ready, min(training.num_taken, len(inferring.ready))
    num_taken = sum(group < num_groups for group in inferring.ready[: training.num_taken])
    return tuple(group for group in inferring.ready if group < num_groups), num_taken


def _generation(told: Generation, inferring: Inferring, held: tuple[GpuId, ...], size: int) -> Generation:
    """What was told as it is where it agrees with the record: what was computed of it is then kept with it."""
    mine = set(held)
    stays = [len(engine.gpus) == size and mine.issuperset(engine.gpus) for engine in told.engines]
    ended = np.array([group for group in inferring.ready if group < told.num_groups], dtype=np.int64)
    is_stale = bool(told.unfinished_by_group[ended].any())
    new = _untold(told, held, stays, size)
    if all(stays) and not is_stale:
        return replace(told, engines=(*told.engines, *new)) if new else told
    engines = tuple(engine for engine, does in zip(told.engines, stays, strict=True) if does)
    places = _replaced(told.place_of, np.array(stays, dtype=np.bool_))
    if is_stale:
        in_groups = places.reshape(-1, told.group_size)
        in_groups[ended] = np.where(in_groups[ended] > ENDED, ENDED, in_groups[ended])
    queue = np.array(told.queue, dtype=np.int64)
    return replace(
        told,
        engines=(*_recounted(engines, places), *new),
        places=tuple(places.tolist()),
        queue=tuple(queue[places[queue] == QUEUED].tolist()),
    )


def _untold(told: Generation, held: tuple[GpuId, ...], stays: Sequence[bool], size: int) -> tuple[Engine, ...]:
    """Engines that the rollout holds and has not told of, as roomy as the first that it told of; none without one."""
    known = {gpu for engine, does in zip(told.engines, stays, strict=True) if does for gpu in engine.gpus}
    if not told.engines or len(known) == len(held):
        return ()
    empty = replace(told.engines[0], gpus=(), num_running=0, num_waiting=0, num_kv_tokens=0, rate_tokens_per_s=0.0)
    return tuple(replace(empty, gpus=gpus) for gpus in replicas(tuple(g for g in held if g not in known), size))


def _replaced(places: Ints, stays: np.typing.NDArray[np.bool_]) -> Ints:
    """Places among the engines that stay; who was on another is away."""
    index_of = np.where(stays, np.cumsum(stays) - 1, AWAY)
    moved: Ints = places.copy()
    is_placed = moved >= 0
    moved[is_placed] = index_of[moved[is_placed]]
    return moved


def _recounted(engines: tuple[Engine, ...], places: Ints) -> tuple[Engine, ...]:
    """Engines with as many sequences as are placed on them; those that wait stay waiting as far as there are any."""
    held = np.bincount(places[places >= 0], minlength=len(engines)).tolist()
    return tuple(
        engine
        if engine.num_running + engine.num_waiting == num
        else replace(engine, num_running=num - min(num, engine.num_waiting), num_waiting=min(num, engine.num_waiting))
        for engine, num in zip(engines, held, strict=True)
    )
