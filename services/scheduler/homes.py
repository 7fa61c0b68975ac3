"""Which lost GPUs a job goes on without, and where its components are at home then. Pure.

A GPU that is lost is asked for at its gate. Where that has not let go of it for a minute, and the policy places GPUs
itself, the components are at home on the others: each keeps its whole copies, one that has none left gets what rollout
or inference can spare. The actor spares none: it lets go of GPUs after an update, which may wait for that very
component. Once the gate says that nobody holds it, the GPU is as any other again.

Two cases fail the job as they would under a fixed split: a node of which no instance lives, because nobody there can
ask its gate and that is told as a wait of its own; and a GPU lost before the policy first chose.

Invariants: nothing is done without where a component could not get a copy, nor under a policy that leaves everything
where the config has it, nor while the job ends; no home has such a GPU, and none is in two homes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from services.scheduler.expectations import MAX_GATE_ASKS
from services.scheduler.issued import Kind
from services.scheduler.losses import OVER
from services.scheduler.policy.situation import as_configured, replica_size, with_dp
from services.scheduler.remembered import Assignment
from services.scheduler.state import ClusterState
from services.scheduler.values import JobSpec, Placed
from tidegate.ownership import GpuRecord, GpuState
from tidegate.types import GpuId, Role

NUM_ASKS = MAX_GATE_ASKS // 2
"""Of a gate, with the doubling pause between them a minute. Fewer, and a worker that takes its time to end costs its
component a start on other GPUs, and another one when the GPU is back; after twice as many the job fails."""

DONORS = (Role.ROLLOUT, Role.INFERENCE)


def gate_key(state: ClusterState, record: GpuRecord) -> str:
    """Under which its gate is asked for a GPU."""
    return f"{state.job}/{record.gpu}/{record.token}/gate"


def at_home(state: ClusterState, spec: JobSpec) -> JobSpec:
    """The job with every component placed where it starts: the actor where a person moved it, and without the GPUs that
    the job goes on without."""
    gone = done_without(state)
    placement = _moved(state, spec)
    return replace(spec, placement=(_left(placement, gone) if gone else None) or placement)


def done_without(state: ClusterState) -> frozenset[GpuId]:
    if state.spec is None or state.phase in OVER or state.remembered.assignment is None:
        return frozenset()
    if not any(each.kind is Kind.GATE and each.num_issued >= NUM_ASKS for each in state.expectations.values()):
        # Of a thousand GPUs none was lost for so long.
        return frozenset()
    gone = frozenset(
        record.gpu
        for role in Role
        for record in state.records_of(role)
        if record.state is GpuState.LOST and _is_asked_enough(state, record)
    )
    home = _left(_moved(state, state.spec), gone) if gone else None
    return gone if home is not None and not _waits_for_actor(state, home) else frozenset()


def _waits_for_actor(state: ClusterState, home: Mapping[Role, Placed]) -> bool:
    """Whether a component that went down is to start on what the actor has in this iteration."""
    held = {grant.gpu for grant in state.components[Role.ACTOR].grants}
    down = [role for role in DONORS if not (state.components[role].is_up or state.components[role].is_suspended)]
    return any(not held.isdisjoint(home[role].gpus) for role in down)


def without(assignment: Assignment, spec: JobSpec, gone: Iterable[GpuId]) -> Assignment:
    """Where a component would have nothing left of what it was assigned, everything is where `spec` places it."""
    lost = set(gone)
    if lost.isdisjoint(assignment.gpus):
        return assignment
    engines = tuple(engine for engine in assignment.engines if lost.isdisjoint(engine))
    inference = tuple(gpu for gpu in assignment.inference if gpu not in lost)
    size = replica_size(spec.placement[Role.INFERENCE].layout)
    inference = inference[: len(inference) // size * size]
    trainer = _copies(assignment.trainer, lost) if assignment.trainer else None
    has_lost_all = (
        (assignment.engines and not engines)
        or (assignment.inference and not inference)
        or (assignment.trainer is not None and trainer is None)
    )
    return as_configured(spec) if has_lost_all else Assignment(engines, trainer, inference)


def _is_asked_enough(state: ClusterState, record: GpuRecord) -> bool:
    known = state.expectations.get(gate_key(state, record))
    return known is not None and known.num_issued >= NUM_ASKS


def _moved(state: ClusterState, spec: JobSpec) -> dict[Role, Placed]:
    moved = state.home(Role.ACTOR) or spec.placement[Role.ACTOR]
    return {**spec.placement, Role.ACTOR: moved}


def _left(placement: Mapping[Role, Placed], gone: frozenset[GpuId]) -> dict[Role, Placed] | None:
    """None where a component would have no copy."""
    left = {role: _copies(placement[role], gone) for role in Role}
    for role in Role:
        if left[role] is not None:
            continue
        layout = placement[role].layout
        one = next((each for dp in range(1, layout.dp + 1) if (each := with_dp(layout, dp))), layout)
        taken = _spared(placement, left, gone, one.num_ranks)
        if taken is None:
            return None
        gpus, left = taken
        left[role] = Placed(gpus, one)
    return {role: placed for role, placed in left.items() if placed is not None}


def _spared(
    placement: Mapping[Role, Placed], left: Mapping[Role, Placed | None], gone: frozenset[GpuId], num_gpus: int
) -> tuple[tuple[GpuId, ...], dict[Role, Placed | None]] | None:
    """So many GPUs that are in no copy, or of as few copies as need be of who has most, and what is left then; None
    where that would take somebody's last copy."""
    others = dict(left)
    while True:
        held = {gpu for placed in others.values() if placed for gpu in placed.gpus}
        spare = [gpu for role in Role for gpu in placement[role].gpus if gpu not in held and gpu not in gone]
        if len(spare) >= num_gpus:
            return tuple(spare[:num_gpus]), others
        donors = [(placed.layout.dp, role) for role in DONORS if (placed := others[role]) and placed.layout.dp > 1]
        smaller = {role: _fewer(others[role]) for _, role in sorted(donors, key=lambda each: -each[0])}
        role, placed = next(((role, placed) for role, placed in smaller.items() if placed), (None, None))
        if role is None or placed is None:
            return None
        others[role] = placed


def _fewer(placed: Placed | None) -> Placed | None:
    """With at least one copy less; None where there is no such layout."""
    return _with_at_most(placed, placed.gpus, placed.layout.dp - 1) if placed else None


def _copies(placed: Placed, gone: Iterable[GpuId]) -> Placed | None:
    """Its whole copies, in rank order; None where none is left. Who is in a broken one makes others whole."""
    lost = set(gone)
    if lost.isdisjoint(placed.gpus):
        return placed
    size = replica_size(placed.layout)
    copies = [placed.gpus[start : start + size] for start in range(0, len(placed.gpus), size)]
    whole = [gpu for copy in copies if lost.isdisjoint(copy) for gpu in copy]
    broken = [gpu for copy in copies if not lost.isdisjoint(copy) for gpu in copy if gpu not in lost]
    gpus = (*whole, *broken)
    return _with_at_most(placed, gpus, len(gpus) // size)


def _with_at_most(placed: Placed, gpus: tuple[GpuId, ...], dp: int) -> Placed | None:
    size = replica_size(placed.layout)
    for copies in range(dp, 0, -1):
        if layout := with_dp(placed.layout, copies):
            return Placed(gpus[: copies * size], layout)
    return None
