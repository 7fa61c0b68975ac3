"""Which GPUs each component gets, once their numbers are known: with few moves, and near each other.

Order:
1. A component keeps the GPUs that it has, as far as the numbers allow. Of the engines those leave first that share a
   node with the trainer, or with its home while it has no GPUs: its state is in that node's memory.
2. From the pool the trainer takes whole data-parallel copies, inside a node first.
3. The rollout takes engines, inside a node first. Inference takes its share.
4. The rest becomes further engines while sequences are unfinished. What is too small for an engine goes to inference,
   in whole copies, while groups are left for it.

Invariants:
- Only GPUs that are there are assigned. [test_seating: only_gpus_that_are_there]
- The trainer gets exactly its layout's ranks. [test_seating: whole_copies_inside_a_node]
- While a component has work, no GPU is idle that could make a whole unit of it. [test_seating: nothing_is_left_over]
"""

from __future__ import annotations

from services.scheduler.policy.actor_layouts import is_allowed
from services.scheduler.policy.situation import Situation, Split
from services.scheduler.policy.tide.cluster import copy_size, trainer_layouts
from services.scheduler.state.layouts import Replica, engine_size, replica_size, replicas
from services.scheduler.state.remembered import Assignment
from services.scheduler.state.units import but_for, by_node, in_units
from services.scheduler.state.values import Placed
from tidegate.types import GpuId, Layout, NodeId, Role, node_of


def seated(situation: Situation, split: Split, before: Assignment, there: tuple[GpuId, ...]) -> Assignment:
    """`there`: all GPUs that may be assigned; they suffice for the split (`cluster.fitting`)."""
    alive = set(there)
    layout = _layout(situation, split, before, alive)
    # GPUs beyond the largest layout are left to the other components.
    num_trainer = layout.num_ranks if layout else 0
    engines = [engine for engine in before.engines if alive.issuperset(engine)]
    trainer = [gpu for gpu in (before.trainer.gpus if before.trainer else ()) if gpu in alive][:num_trainer]
    near = {node_of(gpu) for gpu in trainer or situation.spec.placement[Role.ACTOR].gpus}
    engines = _kept(engines, split.num_engines, near)
    taken = {*trainer, *(gpu for engine in engines for gpu in engine)}
    present = set(before.inference)
    pool = [gpu for gpu in there if gpu not in taken]
    stays = [gpu for gpu in pool if gpu in present][: split.num_inference_gpus]
    pool = but_for(pool, stays)
    more = in_units(pool, replica_size(layout), num_trainer - len(trainer), near) if layout else ()
    pool = but_for(pool, more)
    num_new = split.num_engines - len(engines)
    new = _new_engines(pool, engine_size(situation.spec), num_new) if situation.num_unfinished else []
    pool = but_for(pool, [gpu for engine in new for gpu in engine])
    joins = pool[: split.num_inference_gpus - len(stays)]
    pool = but_for(pool, joins)
    extra = _new_engines(pool, engine_size(situation.spec), len(pool)) if situation.num_unfinished else []
    pool = but_for(pool, [gpu for engine in extra for gpu in engine])
    odd = [] if situation.is_inferred else pool
    inference = (*stays, *joins, *odd)
    return Assignment(
        engines=(*engines, *new, *extra),
        trainer=_placed(situation, (*trainer, *more), layout),
        inference=inference[: len(inference) // copy_size(situation) * copy_size(situation)],
    )


def _layout(situation: Situation, split: Split, before: Assignment, alive: set[GpuId]) -> Layout | None:
    """The trainer's layout; None where it gets no GPUs. Where it keeps all its GPUs it keeps its layout."""
    kept = before.trainer
    is_kept = kept is not None and len(kept.gpus) == split.num_trainer_gpus and alive.issuperset(kept.gpus)
    if kept is not None and is_kept and is_allowed(situation.spec, kept.layout):
        return kept.layout
    return trainer_layouts(situation, len(alive)).on(split.num_trainer_gpus)


def _placed(situation: Situation, gpus: tuple[GpuId, ...], layout: Layout | None) -> Placed | None:
    if layout is not None and len(gpus) == layout.num_ranks:
        return Placed(gpus, layout)
    # Engines keep GPUs where one of the split's was lost, so the trainer may find fewer than its share.
    return trainer_layouts(situation, len(gpus)).placed(gpus)


def _kept(engines: list[Replica], num: int, near: set[NodeId]) -> list[Replica]:
    """`num` of the engines, in their own order."""
    by_nearness = sorted(engines, key=lambda engine: node_of(engine[0]) not in near)
    leaving = set(by_nearness[: max(0, len(engines) - num)])
    return [engine for engine in engines if engine not in leaving]


def _new_engines(pool: list[GpuId], size: int, num: int) -> list[Replica]:
    if num <= 0:
        return []
    inside = [engine for node in by_node(pool) for engine in replicas(node, size)]
    across = replicas(tuple(but_for(pool, [gpu for engine in inside for gpu in engine])), size)
    return [*inside, *across][:num]
