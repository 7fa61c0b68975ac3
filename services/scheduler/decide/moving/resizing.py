"""What a component needs that changes while it works and goes on: GPUs, layout, or both. Pure.

Order: it is planned; what leaves is draining and what comes is acquiring, in one turn; the lead is asked; the layout
is switched; the lead says so; what leaves is released; the transition ends. The other components are asked nothing, and
the open iteration stays open. Invariants: a GPU leaves the store's record only after the layout without it is in force;
past its deadline a change that is not in force is closed, and the component goes on as it was.

Of the rollout and the inference GPUs come or go, and the lead's word brings the new layout into force. The actor does
both at once: its ranks make the new layout beside the old one, and the store's commit of its part, by the lead,
decides.
An actor that lacks ranks is brought back in the same way, once what it lost is free: to where it was, or was asked to.
For it there is no going on as it was: such a resize is made again where its lead says that a death was in its way, and
costs the incarnation where it fails otherwise, or comes to nothing by its deadline.
"""

from __future__ import annotations

from services.scheduler.decide.moving.starting import pause, ranked, scale_up
from services.scheduler.decide.moving.stepping import (
    advance,
    change_deadline_ms,
    close,
    commit,
    described,
    nodes_of,
    plan,
)
from services.scheduler.decide.wanted import Wanted, header
from services.scheduler.evolve.resizes import is_free, members_after
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Target
from services.scheduler.state.values import Placed
from tidegate.ownership.records import Move, MoveState, Part, PartKind, PartState, Transition
from tidegate.types import GpuId, Grant, Role, instance_id, node_of


def planned_resize(
    state: ClusterState, placed: Placed, now_ms: int, *, gone: frozenset[GpuId] = frozenset()
) -> Wanted | None:
    """The next resize of an actor that is up; None when it is where it should be. `gone`: GPUs that the job goes on
    without."""
    component = state.components[Role.ACTOR]
    have = tuple(grant.gpu for grant in component.grants)
    if (have, component.layout) == (placed.gpus, placed.layout):
        return None
    target = f"{placed.layout} on {', '.join(placed.gpus)}"
    if not _may_resize(state, placed, gone):
        return Wanted((), (f"the actor goes to {target} once the job runs and nothing of it is lost",))
    kept = {*have}.intersection(placed.gpus)
    coming = [gpu for gpu in placed.gpus if gpu not in kept]
    records = [state.gpus[gpu] for gpu in coming if gpu in state.gpus]
    busy = [described(record) for record in records if not is_free(record)]
    absent = sorted({node_of(gpu) for gpu in coming} - nodes_of(state, Role.ACTOR))
    if busy or absent or len(records) < len(coming):
        waits = [*busy, *(f"{instance_id(Role.ACTOR, node)} is not there" for node in absent)]
        return Wanted((), (f"the actor goes to {target} once it can ({', '.join(waits)})",))
    is_own = placed != state.asked and not component.lacks_ranks
    if is_own and (paused := pause(state, Role.ACTOR, now_ms)) is not None:
        return paused
    owner = state.owner(Role.ACTOR)
    leaving = [grant for grant in component.grants if grant.gpu not in kept]
    moves = (
        *(Move(gpu=grant.gpu, source=owner, target=None, planned_token=grant.token) for grant in leaving),
        *(Move(gpu=gpu, source=None, target=owner, planned_token=state.gpus[gpu].token) for gpu in coming),
    )
    return plan(
        state,
        moves,
        Part(role=Role.ACTOR, kind=PartKind.RESIZE, old_layout=component.layout, new_layout=placed.layout),
        reason=f"the actor from {component.layout} to {target}",
        now_ms=now_ms,
        deadline_ms=change_deadline_ms(state),
        target=Target(placed, is_asked=placed == state.asked),
    )


def _may_resize(state: ClusterState, placed: Placed, gone: frozenset[GpuId]) -> bool:
    """A person's wish and a lost rank wait until the job runs; what is in the way of its start does not."""
    component = state.components[Role.ACTOR]
    is_in_the_way = state.phase is Phase.STARTING and placed != state.asked and not component.lacks_ranks
    lost = {grant.gpu for grant in state.suspects(Role.ACTOR)} - gone
    is_told = state.lead_of(Role.ACTOR) is not None and not lost
    return is_told and (state.phase is Phase.RUNNING or is_in_the_way)


def changed(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Wanted:
    """An open change of layout, carried on."""
    part, is_switched = transition.part(role), state.components[role].switched == transition.id
    is_committed = part.state is PartState.COMMITTED
    if is_switched and (is_committed or role is not Role.ACTOR):
        return _released(state, role, transition, now_ms) if is_committed else commit(transition, role, part.new_layout)
    if not is_committed and now_ms >= transition.deadline_unix_ms:
        return close(transition)
    steps = tuple(
        advance(transition, move, MoveState.DRAINING if move.source else MoveState.ACQUIRING)
        for move in transition.moves
        if move.state is MoveState.PLANNED
    )
    if steps:
        return Wanted(steps, (f"moves {len(steps)} GPUs of {transition.id}",))
    return _asked(state, role, transition, now_ms)


def _asked(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Wanted:
    """The lead is asked until it says that it switched: after the commit as well, for then there is no way back."""
    lead, layout = state.lead_of(role), transition.part(role).new_layout
    assert layout is not None, f"{transition.id} is a change of layout"
    if lead is None:
        return Wanted((), (f"{transition.id} waits for a lead of the {role}",))
    leaving, coming = state.moving(role, transition)
    # Who died meanwhile too: what is asked under an id never changes, and the lead finds them dead.
    members = ranked(state, transition, members_after(state, role, transition))
    step = f"{transition.id}/resize"
    head = header(state, role, lead, step=step, now_ms=now_ms, transition_id=transition.id)
    command: cmd.Command
    if coming and not leaving:
        command = scale_up(state, role, head, coming, members, layout)
    elif leaving and not coming:
        command = cmd.ScaleDown(head, leaving, members, layout)
    else:
        command = cmd.Migrate(head, leaving, coming, members, layout)
    note = f"the {role} changes to {layout} on {len(members)} GPUs ({len(coming)} come, {len(leaving)} leave)"
    return Wanted((command,), (note,))


def _released(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Wanted:
    """The layout is in force: what left is released as its holder, or its gate, says that it is free."""
    leaving = [move for move in transition.moves if move.state is MoveState.DRAINING]
    free = [move for move in leaving if Grant(move.gpu, move.token) in state.released]
    if not leaving or now_ms >= transition.deadline_unix_ms:
        return close(transition)
    steps = tuple(advance(transition, move, MoveState.RELEASED) for move in free)
    return Wanted(steps, (f"releases {len(free)} of {len(leaving)} GPUs that the {role} left",))
