"""Answers what a person asks by hand (`scale`, `migrate`, `drain`) with the event that does it, and with its plan.

Invariants:
- A request that cannot be is refused with what would work, and leads to no event.
  [test_manual_requests: cannot_be_is_refused]
- The plan of a dry run is that of the request itself. [test_manual_requests: dry_run_has_the_plan]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.scheduler.decide.homes import home_of
from services.scheduler.decide.manual_plan import PlannedStep, planned_steps
from services.scheduler.decide.manual_splits import LayoutFault, MoveRefused, Wish, drained_by, migration_of, split_of
from services.scheduler.decide.proposals import proposal_of
from services.scheduler.evolve.manual_moves import drain_requested
from services.scheduler.policy import Policy
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.values import Placed
from tidegate.codec import decode_layout, encode_layout, encode_role
from tidegate.types import GpuId, Role
from tidegate.v1 import control_pb2, events_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Answer:
    """The event that does it, and the move as the person is told."""

    body: events_pb2.SplitRequested | events_pb2.DrainRequested
    move: control_pb2.ManualMove


def scaled(
    state: ClusterState, policy: Policy, request: control_pb2.ScaleJobRequest, layout_fault: LayoutFault
) -> Answer:
    """MoveRefused: the job can never be so."""
    asked = {
        Role.ACTOR: request.actor if request.HasField("actor") else None,
        Role.ROLLOUT: request.rollout if request.HasField("rollout") else None,
        Role.INFERENCE: request.inference if request.HasField("inference") else None,
    }
    sizes = {role: size for role, size in asked.items() if size is not None}
    layout = decode_layout(request.layout) if request.HasField("layout") else None
    if not sizes and layout is None:
        raise MoveRefused("no component is named; give a number of GPUs for one of them, or the actor's layout")
    if layout is not None and Role.ACTOR in sizes:
        raise MoveRefused(f"the actor has {sizes[Role.ACTOR]} GPUs and layout {layout}; give one of the two")
    if request.gpus and layout is None and Role.ACTOR not in sizes:
        raise MoveRefused("GPUs are named for the actor; give its number of GPUs or its layout too")
    gpus = tuple(GpuId(gpu) for gpu in request.gpus)
    return _split(state, split_of(state, policy, Wish(sizes, layout, gpus), layout_fault))


def migrated(state: ClusterState, policy: Policy, request: control_pb2.MigrateGpusRequest) -> Answer:
    """MoveRefused: the GPUs are no whole copies, or not free."""
    leaving, coming = [GpuId(gpu) for gpu in request.leaving], [GpuId(gpu) for gpu in request.coming]
    return _split(state, migration_of(state, policy, leaving, coming))


def drained(state: ClusterState, policy: Policy, request: control_pb2.DrainGpusRequest) -> Answer:
    """MoveRefused: a component would have no copy, or the job has no such GPU."""
    gpus = drained_by(state, policy, request.targets, is_undone=request.undo)
    after = drain_requested(state, ev.DrainRequested(gpus, is_undone=request.undo))
    assert isinstance(after, ClusterState), "checked by drained_by"
    placement = _placement_after(state, after, policy)
    return Answer(
        events_pb2.DrainRequested(gpus=gpus, undo=request.undo),
        _move(placement, planned_steps(state, placement), after.manual.drained),
    )


def _placement_after(state: ClusterState, after: ClusterState, policy: Policy) -> Mapping[Role, Placed | None]:
    """Where the components go. A policy that moves GPUs is asked once the drained GPUs are given back, and what the job
    gets back is the policy's to use: until then all stay."""
    assert after.spec is not None, "a job without a config has no GPUs"
    home = home_of(after, after.spec, policy)
    at_work = {grant.gpu for role in Role for grant in state.components[role].grants}
    if home.drained & at_work:
        # The time does not matter: no policy is asked before they are given back.
        return proposal_of(after, policy, 0).proposal.placement
    if state.remembered.assignment is None:
        return home.spec.placement
    return {role: _present(state, role) for role in Role}


def used_drained(state: ClusterState, policy: Policy) -> tuple[GpuId, ...]:
    """The drained GPUs that components may use after all, because one would have no copy without them."""
    if state.spec is None or not state.manual.drained:
        return ()
    given_back = home_of(state, state.spec, policy).drained
    return tuple(gpu for gpu in state.manual.drained if gpu not in given_back)


def _present(state: ClusterState, role: Role) -> Placed | None:
    component = state.components[role]
    gpus = tuple(grant.gpu for grant in component.grants)
    return Placed(gpus, component.layout) if component.layout is not None else None


def _split(state: ClusterState, placement: Mapping[Role, Placed]) -> Answer:
    body = events_pb2.SplitRequested(places=encode_places(placement.items()))
    return Answer(body, _move(placement, planned_steps(state, placement), state.manual.drained))


def _move(
    placement: Mapping[Role, Placed | None], steps: tuple[PlannedStep, ...], drained_gpus: tuple[GpuId, ...]
) -> control_pb2.ManualMove:
    places = [(role, placed) for role in Role if (placed := placement.get(role)) is not None]
    return control_pb2.ManualMove(places=encode_places(places), steps=map(_step, steps), drained_gpus=drained_gpus)


def encode_places(places: Iterable[tuple[Role, Placed]]) -> list[types_pb2.RolePlace]:
    return [
        types_pb2.RolePlace(role=encode_role(role), layout=encode_layout(placed.layout), gpus=placed.gpus)
        for role, placed in places
    ]


def _step(step: PlannedStep) -> control_pb2.PlannedStep:
    return control_pb2.PlannedStep(
        role=encode_role(step.role),
        change=step.change,
        leaves=step.leaves,
        comes=step.comes,
        old_layout=encode_layout(step.old_layout) if step.old_layout else None,
        new_layout=encode_layout(step.new_layout) if step.new_layout else None,
        waits_for=step.waits_for,
        estimated_s=step.estimated_s,
    )
