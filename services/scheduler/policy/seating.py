"""Which GPUs each component gets when it is known how many: as few moves as possible, and near to each other.

Order: who has a GPU keeps it as far as the numbers allow; engines that go are those of the nodes where the trainer is
already, then of the nodes whose engines hold the fewest KV tokens; of what is given up the trainer takes whole
data-parallel copies inside a node first, then inference its share, then the rollout engines inside a node; what is too
small for anybody's unit goes to inference in whole copies while groups are left for it.

Invariants: only GPUs that are there are assigned; the trainer gets exactly its layout's ranks; with work waiting, no
GPU is left out that a whole unit of a component with work could use.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from services.scheduler.policy.cluster import copy_size
from services.scheduler.policy.situation import Situation, as_engines, engine_size, replica_size, with_dp
from services.scheduler.policy.stages import Split
from services.scheduler.remembered import Assignment, EngineGpus
from services.scheduler.values import Placed
from tidegate.types import GpuId, NodeId, Role, node_of


def seated(situation: Situation, split: Split, before: Assignment, there: tuple[GpuId, ...]) -> Assignment:
    """`there` are all GPUs that may be assigned, and suffice for the split (`cluster.fitting`)."""
    alive = set(there)
    engines = [engine for engine in before.engines if alive.issuperset(engine)]
    trainer = [gpu for gpu in (before.trainer.gpus if before.trainer else ()) if gpu in alive][: split.num_trainer_gpus]
    near = {node_of(gpu) for gpu in trainer}
    engines = _kept(situation, engines, split.num_engines, near)
    taken = {*trainer, *(gpu for engine in engines for gpu in engine)}
    present = set(before.inference)
    pool = [gpu for gpu in there if gpu not in taken]
    stays = [gpu for gpu in pool if gpu in present][: split.num_inference_gpus]
    pool = _without(pool, stays)
    unit = replica_size(situation.spec.placement[Role.ACTOR].layout)
    more = _units(pool, unit, split.num_trainer_gpus - len(trainer), near)
    pool = _without(pool, more)
    wanted = split.num_engines - len(engines)
    new = _new_engines(pool, engine_size(situation.spec), wanted) if situation.num_unfinished else []
    pool = _without(pool, [gpu for engine in new for gpu in engine])
    joins = pool[: split.num_inference_gpus - len(stays)]
    pool = _without(pool, joins)
    extra = _new_engines(pool, engine_size(situation.spec), len(pool)) if situation.num_unfinished else []
    pool = _without(pool, [gpu for engine in extra for gpu in engine])
    odd = [] if situation.is_inferred else pool
    inference = (*stays, *joins, *odd)
    return Assignment(
        engines=(*engines, *new, *extra),
        trainer=_placed(situation, (*trainer, *more)),
        inference=inference[: len(inference) // copy_size(situation) * copy_size(situation)],
    )


def _without(gpus: Iterable[GpuId], gone: Iterable[GpuId]) -> list[GpuId]:
    left_out = set(gone)
    return [gpu for gpu in gpus if gpu not in left_out]


def _kept(situation: Situation, engines: list[EngineGpus], num: int, near: set[NodeId]) -> list[EngineGpus]:
    """In their own order."""
    if len(engines) <= num:
        return engines
    cached = {engine.gpus: engine.num_kv_tokens for engine in situation.engines}
    by_node: dict[NodeId, list[int]] = {}
    for engine in engines:
        by_node.setdefault(node_of(engine[0]), []).append(cached.get(engine, 0))
    mean = {node: sum(tokens) / len(tokens) for node, tokens in by_node.items()}

    def leaves_later(engine: EngineGpus) -> tuple[bool, float, str, int]:
        node = node_of(engine[0])
        return node not in near, mean[node], node, cached.get(engine, 0)

    gone = set(sorted(engines, key=leaves_later)[: len(engines) - num])
    return [engine for engine in engines if engine not in gone]


def _units(pool: list[GpuId], unit: int, num_gpus: int, near: set[NodeId]) -> list[GpuId]:
    """Whole units inside a node, those where it is already first; then what is left, across nodes."""
    if num_gpus <= 0:
        return []
    in_order = sorted(_by_node(pool), key=lambda node: node_of(node[0]) not in near)
    whole = [gpu for node in in_order for each in as_engines(node, unit) for gpu in each][:num_gpus]
    rest = _without(pool, whole)[: num_gpus - len(whole)]
    return [*whole, *rest]


def _new_engines(pool: list[GpuId], size: int, num: int) -> list[EngineGpus]:
    if num <= 0:
        return []
    inside = [engine for node in _by_node(pool) for engine in as_engines(node, size)]
    across = as_engines(tuple(_without(pool, [gpu for engine in inside for gpu in engine])), size)
    return [*inside, *across][:num]


def _by_node(gpus: Iterable[GpuId]) -> list[tuple[GpuId, ...]]:
    ordered = sorted(gpus, key=node_of)
    return [tuple(each) for _, each in groupby(ordered, key=node_of)]


def _placed(situation: Situation, gpus: tuple[GpuId, ...]) -> Placed | None:
    """As many of them as there is a layout for; the others would have no rank."""
    layout = situation.spec.placement[Role.ACTOR].layout
    size = replica_size(layout)
    for dp in range(len(gpus) // size, 0, -1):
        if (grown := with_dp(layout, dp)) is not None:
            return Placed(gpus[: dp * size], grown)
    return None
