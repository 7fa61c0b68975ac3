"""Foretells the transitions of a manual move, without making any. Pure.

The rollout and the inference give GPUs up first. The actor then resizes, and the others get theirs after it. So each
transition waits only for earlier ones.

Invariants:
- A step takes only GPUs that are free or that an earlier step gives up. [test_manual_plan: takes_only_gpus]
- The job makes the foretold transitions, if no policy and no death comes between.
  [test_manual_plan: makes_the_foretold_transitions]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Component, Suspended
from services.scheduler.state.costs import Costs
from services.scheduler.state.homes import DONORS
from services.scheduler.state.layouts import comes, replica_size, stays
from services.scheduler.state.values import Placed
from tidegate.ownership.records import PartKind
from tidegate.types import GpuId, Layout, Role


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A transition to come. `waits_for`: the GPUs among `comes` that another component has now. `estimated_s` is by the
    costs that policies plan with."""

    role: Role
    change: PartKind
    leaves: tuple[GpuId, ...] = ()
    comes: tuple[GpuId, ...] = ()
    old_layout: Layout | None = None
    new_layout: Layout | None = None
    waits_for: tuple[GpuId, ...] = ()
    estimated_s: float | None = None


def planned_steps(state: ClusterState, placement: Mapping[Role, Placed | None]) -> tuple[PlannedStep, ...]:
    """From where the components are now to `placement`, in order. None: the role is to have no GPUs."""
    assert state.spec is not None, "a job without a config has no components"
    costs = state.learned.costs(state.spec.costs)
    held = {grant.gpu for role in Role for grant in state.components[role].grants}
    steps = [
        *(_given_up(role, state.components[role], placement[role], costs) for role in DONORS),
        _resized(state.components[Role.ACTOR], placement[Role.ACTOR], costs),
        *(_taken(role, state.components[role], placement[role], costs) for role in DONORS),
    ]
    return tuple(_waiting(steps, held))


def _waiting(steps: list[PlannedStep | None], held: set[GpuId]) -> Iterator[PlannedStep]:
    for step in steps:
        if step is not None:
            yield replace(step, waits_for=tuple(gpu for gpu in step.comes if gpu in held))


def _given_up(role: Role, component: Component, placed: Placed | None, costs: Costs) -> PlannedStep | None:
    kept = [gpu for each in stays(component, placed) for gpu in each] if placed else []
    leaves = tuple(grant.gpu for grant in component.grants if grant.gpu not in kept)
    if not leaves or component.layout is None:
        return None
    layout = replace(component.layout, dp=len(kept) // replica_size(component.layout)) if kept else None
    change = PartKind.RESIZE if kept else PartKind.SUSPEND
    return PlannedStep(
        role, change, leaves, old_layout=component.layout, new_layout=layout, estimated_s=costs.release_s
    )


def _taken(role: Role, component: Component, placed: Placed | None, costs: Costs) -> PlannedStep | None:
    gpus = tuple(gpu for each in comes(component, placed) for gpu in each) if placed else ()
    if placed is None or not gpus:
        return None
    staying = stays(component, placed)
    layout = replace(component.layout, dp=len(staying)) if component.layout and staying else None
    change = PartKind.RESIZE if staying else PartKind.RESUME
    if not component.is_up and not component.is_suspended:
        change = PartKind.START
    cost_s = costs.acquire_s if role is Role.ROLLOUT else costs.inference_start_s
    return PlannedStep(role, change, comes=gpus, old_layout=layout, new_layout=placed.layout, estimated_s=cost_s)


def _resized(actor: Component, placed: Placed | None, costs: Costs) -> PlannedStep | None:
    have = tuple(grant.gpu for grant in actor.grants)
    if placed is None:
        suspended = PlannedStep(
            Role.ACTOR, PartKind.SUSPEND, have, old_layout=actor.layout, estimated_s=costs.release_s
        )
        return suspended if have else None
    if actor.layout is None:
        change = PartKind.RESUME if isinstance(actor.state, Suspended) else PartKind.START
        return PlannedStep(Role.ACTOR, change, comes=placed.gpus, new_layout=placed.layout, estimated_s=costs.load_s)
    if (have, actor.layout) == (placed.gpus, placed.layout):
        return None
    return PlannedStep(
        Role.ACTOR,
        PartKind.RESIZE,
        tuple(gpu for gpu in have if gpu not in placed.gpus),
        tuple(gpu for gpu in placed.gpus if gpu not in have),
        actor.layout,
        placed.layout,
        estimated_s=_reshard_s(actor.layout, placed.layout, costs),
    )


def _reshard_s(before: Layout, after: Layout, costs: Costs) -> float:
    if before == after:
        return costs.reshard_s
    most, size, new_size = max(before.dp, after.dp), replica_size(before), replica_size(after)
    if replace(before, dp=1) == replace(after, dp=1):
        matrix = costs.trainer_switches_s(copy_size=size, most=most)
    else:
        matrix = costs.trainer_reshapes_s(copy_size=size, new_size=new_size, most=most)
    return float(matrix[before.dp, after.dp])
