"""How a component lets go of GPUs: all when the job ends, all while the job goes on, or whole replicas. Pure.

A stop and a suspension take the same steps:
1. The GPUs drain.
2. The lead lets go of them.
3. Each is released when its holder or its gate says that it is free.
4. The component's part is committed.

A component that keeps some GPUs changes its layout first, by the steps of `layout_changes`.

Past its deadline a stop ends the job. A suspension past its deadline is closed, and so is one that waits for GPUs of
lost nodes alone: GPUs that are not released stay as they were. Where the component is down by then, they are taken
back.

Invariants:
- A stop past its deadline ends the job, with the GPUs that still drain. [test_failed_changes: stop_that_is_not_done]
- A change past its deadline leaves the component as it was. [test_unfinished_moves: change_that_is_overdue]
- A suspension waits for no GPU of a node that is lost. [test_deaths_in_moves: node_of_engines_that_leave]
- A component that fails to give GPUs back again and again ends the job. [test_unfinished_moves: never_gives_its_gpus]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.decide.moving.starts import pause
from services.scheduler.decide.moving.steps import advance, change_deadline_ms, close, commit, may_be_told_of, plan
from services.scheduler.decide.needs import Needs, header, waiting
from services.scheduler.evolve.losses import MAX_FAILED_RELEASES
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Target
from services.scheduler.state.layouts import Replica, in_rank_order, stays
from services.scheduler.state.values import Placed
from tidegate.ownership.records import Move, MoveState, Part, PartKind, Transition
from tidegate.short_lists import counted
from tidegate.types import Grant, Role


def planned_stop(state: ClusterState, role: Role, now_ms: int) -> Needs | None:
    """A stop, for a job that ends; None where the component has no GPUs."""
    component = state.components[role]
    if not component.grants:
        return None
    part = Part(role=role, kind=PartKind.STOP, old_layout=component.layout, new_layout=None)
    reason = f"stop the {role}: the job ends {state.outcome}"
    return plan(state, _moves(state, role, component.grants), part, reason=reason, now_ms=now_ms)


def planned_release(state: ClusterState, role: Role, placed: Placed | None, now_ms: int) -> Needs | None:
    """The plan by which a working component gives up the GPUs that are not in `placed`; None where it has no others.
    It is a resize where whole replicas stay, else a suspension."""
    component = state.components[role]
    kept: tuple[Replica, ...] = stays(component, placed) if placed is not None else ()
    kept_gpus = {gpu for each in kept for gpu in each}
    grants = tuple(grant for grant in component.grants if grant.gpu not in kept_gpus)
    if not grants:
        return None
    if role is Role.ACTOR and state.phase is not Phase.RUNNING:
        return Needs((), ("the actor is suspended once the job runs",))
    if state.lead_of(role) is None:
        return Needs((), (f"the {role} gives {counted(len(grants), 'GPU')} back once it has a lead",))
    if component.num_failed_releases >= MAX_FAILED_RELEASES:
        asked = f"the {role} was asked {counted(component.num_failed_releases, 'time')} in a row to give GPUs back"
        return Needs(failure=f"{asked} without effect, the last time: {component.last_failure}; see its logs")
    if (paused := pause(state, role, now_ms)) is not None:
        return paused
    kind, layout, target = PartKind.SUSPEND, None, Target(None)
    if placed is not None and component.layout is not None and kept:
        kind, layout = PartKind.RESIZE, replace(component.layout, dp=len(kept))
        target = Target(Placed(in_rank_order(kept, placed), layout))
    part = Part(role=role, kind=kind, old_layout=component.layout, new_layout=layout)
    return plan(
        state,
        _moves(state, role, grants),
        part,
        reason=f"the {role} gives {len(grants)} of {len(component.grants)} GPUs back",
        now_ms=now_ms,
        deadline_ms=change_deadline_ms(state),
        target=target,
    )


def _moves(state: ClusterState, role: Role, grants: tuple[Grant, ...]) -> tuple[Move, ...]:
    owner = state.owner(role)
    return tuple(Move(gpu=grant.gpu, source=owner, target=None, planned_token=grant.token) for grant in grants)


def emptied(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Needs:
    """The next step of an open stop or suspension."""
    planned = [move for move in transition.moves if move.state is MoveState.PLANNED]
    draining = [move for move in transition.moves if move.state is MoveState.DRAINING]
    is_suspend = transition.part(role).kind is PartKind.SUSPEND
    if now_ms >= transition.deadline_unix_ms and (planned or draining):
        if is_suspend:
            return close(transition)
        left = f"{len(planned) + len(draining)} of {len(transition.moves)} GPUs still draining"
        return Needs(failure=f"{transition.id} was not done by its deadline, {left}")
    if planned:
        steps = tuple(advance(transition, move, MoveState.DRAINING) for move in planned)
        return Needs(steps, (f"drains {counted(len(steps), 'GPU')} of the {role}",))
    if not draining:
        return commit(transition, role, None)
    at_work = set(state.components[role].grants)
    free = [move for move in draining if Grant(move.gpu, move.token) in state.released]
    steps = tuple(advance(transition, move, MoveState.RELEASED) for move in free)
    working = tuple(grant for move in draining if (grant := Grant(move.gpu, move.token)) in at_work)
    if is_suspend and not (free or working or any(may_be_told_of(state, move.gpu) for move in draining)):
        return close(transition)
    needs = Needs(steps, (f"releases {len(free)} of the {role}'s {len(draining)} draining GPUs",))
    return needs + _asked(state, role, transition, working, now_ms) if working else needs


def _asked(state: ClusterState, role: Role, transition: Transition, working: tuple[Grant, ...], now_ms: int) -> Needs:
    lead = state.lead_of(role)
    is_stop = transition.part(role).kind is PartKind.STOP or state.phase is Phase.STOPPING
    if lead is None:
        if is_stop:
            return waiting(state, role, "lead", what=f"a lead of the {role}")
        return Needs((), (f"{transition.id} waits for a lead of the {role}",))
    is_suspend = role is Role.ACTOR and not is_stop
    step = f"{transition.id}/{'suspend' if is_suspend else 'down'}"
    head = header(state, role, lead, step=step, now_ms=now_ms, transition_id=transition.id)
    if is_suspend:
        # Grants of ranks that died meanwhile stay in it: a command never changes under its id.
        leaving, _ = state.moving(role, transition)
        return Needs((cmd.Suspend(head, leaving),), (f"suspends the actor on {counted(len(leaving), 'GPU')}",))
    down = cmd.ScaleDown(head, working, members=(), layout=None)
    return Needs((down,), (f"stops the {role} on {counted(len(working), 'GPU')}",))
