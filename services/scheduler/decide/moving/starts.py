"""How a component gets GPUs that it does not have: it starts, resumes, gets dead replicas back, or grows. Pure.

- The rollout takes whole engines as they become free, while others work. An inference that works takes whole copies.
- Every other start takes all its GPUs at once.
- A component that comes into another layout resizes, by the steps of `layout_changes`.
- Replicas that died come back in the same layout (`replace`), by the steps of a start.
- A suspended actor resumes from the state that it kept.

A start past its deadline is closed and counts as failed. It is made again after a pause.

Invariants:
- A component that cannot work without the start fails the job after `MAX_FAILED_STARTS` starts in a row.
  [test_failed_changes: fails_to_start_again_and_again]
- A component that works goes on, however often it fails to grow. [test_unfinished_moves: growing_fails_again]
- A start past its deadline counts as failed. [test_failed_changes: start_that_is_not_done]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.decide.moving.steps import (
    advance,
    change_deadline_ms,
    close,
    commit,
    described,
    nodes_of,
    plan,
)
from services.scheduler.decide.needs import Needs, header, waiting
from services.scheduler.evolve.losses import MAX_FAILED_STARTS
from services.scheduler.evolve.resizes import is_free
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Component, Target
from services.scheduler.state.layouts import Replica, comes, in_rank_order, stays
from services.scheduler.state.values import Placed, Snapshot
from tidegate.ownership.records import Move, MoveState, Part, PartKind, Transition
from tidegate.short_lists import counted
from tidegate.types import CommandId, GpuId, Grant, Layout, Role, instance_id, node_of

START_PAUSE_MS = 2_000
START_PAUSE_GROWTH = 4


def planned_start(state: ClusterState, role: Role, placed: Placed, now_ms: int) -> Needs | None:
    """None when it has all the GPUs where it is placed."""
    component = state.components[role]
    missing = _missing(state, role, placed)
    if not missing:
        return None
    # A component that works needs the replicas that died. It can do without growing.
    is_needed = not component.is_up or component.layout == placed.layout
    if is_needed and component.num_failed_starts >= MAX_FAILED_STARTS:
        times = f"the {role} failed to start {counted(component.num_failed_starts, 'time')} in a row"
        return Needs(failure=f"{times}, the last time: {component.last_failure}; see its logs")
    paused = pause(state, role, now_ms)
    found = _there(state, role, missing)
    if isinstance(found, Needs):
        # Ask for both: without its `Await`, a pause that is over would be forgotten and would begin again.
        return paused + found if is_needed and paused is not None else found
    return paused or _plan(state, role, placed, found, now_ms=now_ms)


def _there(state: ClusterState, role: Role, missing: tuple[Replica, ...]) -> tuple[Replica, ...] | Needs:
    """The missing replicas that can be taken now, or what the component waits for."""
    component = state.components[role]
    gpus = [gpu for each in missing for gpu in each]
    unknown = [gpu for gpu in gpus if gpu not in state.gpus]
    if unknown:
        return Needs((), (f"{len(unknown)} GPUs of the {role} are not registered in the store yet",))
    free = tuple(each for each in missing if all(is_free(state.gpus[gpu]) for gpu in each))
    in_parts = component.is_up or (component.is_suspended and role is Role.ROLLOUT)
    if not free or (len(free) < len(missing) and not in_parts):
        held = [described(state.gpus[gpu]) for gpu in gpus if not is_free(state.gpus[gpu])]
        return Needs((), (f"{len(gpus) - len(held)} of {len(gpus)} GPUs of the {role} are free ({', '.join(held)})",))
    nodes = nodes_of(state, role)
    there = tuple(each for each in free if {node_of(gpu) for gpu in each} <= nodes)
    if state.lead_of(role) is None or not there or (len(there) < len(free) and not in_parts):
        return _waiting_for(state, role, free)
    return there


def _missing(state: ClusterState, role: Role, placed: Placed) -> tuple[Replica, ...]:
    component = state.components[role]
    if component.is_up or role is Role.ROLLOUT:
        return comes(component, placed)
    return (placed.gpus,) if placed.gpus else ()


def _waiting_for(state: ClusterState, role: Role, free: tuple[Replica, ...]) -> Needs:
    absent = sorted({node_of(gpu) for each in free for gpu in each} - nodes_of(state, role))
    instances = ", ".join(instance_id(role, node) for node in absent)
    what = f"{instances} to join" if absent else f"a lead of the {role}"
    if state.components[role].is_up:
        return Needs((), (f"{sum(map(len, free))} GPUs of the {role} wait for {what}",))
    return waiting(state, role, "instances" if absent else "lead", what=what, is_of_gpus=bool(absent))


def _plan(state: ClusterState, role: Role, placed: Placed, there: tuple[Replica, ...], *, now_ms: int) -> Needs:
    component, owner = state.components[role], state.owner(role)
    after = (*stays(component, placed), *there)
    layout, is_change = placed.layout, component.is_up and component.layout != placed.layout
    if is_change or (role is Role.ROLLOUT and component.is_suspended):
        layout = replace(layout, dp=len(after))
    gpus = tuple(gpu for each in there for gpu in each)
    moves = tuple(Move(gpu=gpu, source=None, target=owner, planned_token=state.gpus[gpu].token) for gpu in gpus)
    part = Part(role=role, kind=_kind(component, layout), old_layout=component.layout, new_layout=layout)
    verb = "resume" if role is Role.ACTOR and part.kind is PartKind.RESUME else "start"
    return plan(
        state,
        moves,
        part,
        reason=f"{verb} the {role} on {counted(len(gpus), 'GPU')}",
        now_ms=now_ms,
        deadline_ms=change_deadline_ms(state) if is_change else None,
        target=Target(Placed(in_rank_order(after, placed), layout)),
    )


def _kind(component: Component, layout: Layout) -> PartKind:
    if not component.is_up:
        return PartKind.RESUME if component.is_suspended else PartKind.START
    return PartKind.REPLACE if layout == component.layout else PartKind.RESIZE


def pause(state: ClusterState, role: Role, now_ms: int) -> Needs | None:
    """None when the component may move: its last move did not fail, or the pause since is over."""
    num_failed = state.components[role].num_failed_starts
    if not num_failed:
        return None
    key = f"{state.job}/{state.incarnation}/pause/{role}/{num_failed}"
    known = state.expectations.get(key)
    if known is not None and now_ms >= known.due_ms:
        return None
    wait_ms = START_PAUSE_MS * START_PAUSE_GROWTH ** (min(num_failed, MAX_FAILED_STARTS) - 1)
    note = f"the {role} failed to start {counted(num_failed, 'time')} and pauses {wait_ms / 1000:g} s"
    return Needs((cmd.Await(CommandId(key), f"the {role} to be started again", wait_ms),), (note,))


def started(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Needs:
    """The next step of an open start, resumption or replacement."""
    steps = tuple(
        advance(transition, move, MoveState.ACQUIRING) for move in transition.moves if move.state is MoveState.PLANNED
    )
    is_overdue = now_ms >= transition.deadline_unix_ms
    if steps and not is_overdue:
        return Needs(steps, (f"hands {counted(len(steps), 'GPU')} to the {role}",))
    component, layout = state.components[role], transition.part(role).new_layout
    coming = tuple(Grant(move.gpu, move.token) for move in transition.moves)
    if layout is None or (component.is_up and set(coming) <= set(component.grants)):
        return commit(transition, role, layout)
    if is_overdue:
        return close(transition)
    lead = state.lead_of(role)
    if lead is None:
        return waiting(state, role, "lead", what=f"a lead of the {role}")
    head = header(state, role, lead, step=f"{transition.id}/up", now_ms=now_ms, transition_id=transition.id)
    members = ranked(state, transition, (*component.grants, *coming))
    if role is Role.ACTOR and transition.part(role).kind is PartKind.RESUME:
        resume = cmd.Resume(head, members, layout)
        return Needs((resume,), (f"resumes the actor on {counted(len(members), 'GPU')}",))
    return Needs(
        (scale_up(state, role, head, coming, members, layout),),
        (f"starts the {role} on {counted(len(coming), 'GPU')}, {len(members)} in all",),
    )


def scale_up(
    state: ClusterState,
    role: Role,
    head: cmd.Header,
    coming: tuple[Grant, ...],
    members: tuple[Grant, ...],
    layout: Layout,
) -> cmd.ScaleUp:
    weights, reference = _to_load(state, role)
    is_new = role is Role.ACTOR and not state.components[role].is_up
    checkpoint = state.checkpoint.name if is_new and state.checkpoint else ""
    return cmd.ScaleUp(head, coming, members, layout, weights, reference, checkpoint)


def _to_load(state: ClusterState, role: Role) -> tuple[Snapshot | None, Snapshot | None]:
    """Weights and reference for the ranks that come: both, or none before they are published."""
    weights = state.snapshots.get(state.target_version)
    reference = state.reference if state.needs_reference(role) else None
    if role is Role.ACTOR or weights is None or (reference is None and state.needs_reference(role)):
        return None, None
    return weights, reference


def ranked(state: ClusterState, transition: Transition, grants: tuple[Grant, ...]) -> tuple[Grant, ...]:
    """The grants in the rank order that was planned."""
    target = state.targets.get(transition.id)
    gpus: tuple[GpuId, ...] = target.placed.gpus if target is not None and target.placed is not None else ()
    rank = {gpu: index for index, gpu in enumerate(gpus)}
    return tuple(sorted(grants, key=lambda grant: (rank.get(grant.gpu, len(rank)), grant)))
