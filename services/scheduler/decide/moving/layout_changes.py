"""How a component resizes: it changes its GPUs, its layout or both while it works. Pure.

Steps:
1. The transition is planned.
2. GPUs that leave are draining and GPUs that come are acquiring, in one turn.
3. The lead is asked.
4. The component switches its layout, and the lead says so.
5. GPUs that left are released.
6. The transition ends.
The other components are asked nothing, and the open iteration stays open.

GPUs of the rollout or the inference either come or go, and the lead's report brings the new layout into force. The
actor's may come and go at once: its ranks make the new layout beside the old one. The commit of its part in the store,
by its lead, decides.

An actor that lacks ranks gets them back by a resize too, once the lost GPUs are free: to where it was, or to where a
person asked for. Such an actor cannot go on as it was:
- Where its lead says that a death was in the way, the resize is made again.
- Where the resize fails otherwise, or is not done by its deadline, it costs the incarnation.

Invariants:
- A GPU leaves the store's record only after the layout without it is in force.
  [test_unfinished_moves: release_that_arrives_before_its_layout]
- Past its deadline a resize that is not in force is closed, and the component goes on as it was.
  [test_layout_changes: costs_the_resize_at_its_deadline]
- A resize that the store has committed stays open until the lead has switched.
  [test_layout_changes: open_until_the_lead_switched]
- A resize in force waits for no GPU of a node that is lost. [test_deaths_in_moves: node_of_engines_that_leave]
"""

from __future__ import annotations

from services.scheduler.decide.moving.starts import pause, ranked, scale_up
from services.scheduler.decide.moving.steps import (
    advance,
    change_deadline_ms,
    close,
    commit,
    described,
    may_be_told_of,
    nodes_of,
    plan,
)
from services.scheduler.decide.needs import Needs, header
from services.scheduler.evolve.resizes import is_free, members_after
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Target
from services.scheduler.state.values import Placed
from tidegate.ownership.records import Move, MoveState, Part, PartKind, PartState, Transition
from tidegate.short_lists import counted
from tidegate.types import GpuId, Grant, Role, instance_id, node_of


def planned_resize(
    state: ClusterState, placed: Placed, now_ms: int, *, gone: frozenset[GpuId] = frozenset()
) -> Needs | None:
    """The next resize of an actor that works; None when it is where it should be. `gone`: GPUs that the job goes on
    without."""
    component = state.components[Role.ACTOR]
    have = tuple(grant.gpu for grant in component.grants)
    if (have, component.layout) == (placed.gpus, placed.layout):
        return None
    target = f"{placed.layout} on {', '.join(placed.gpus)}"
    if not _may_resize(state, placed, gone):
        return Needs((), (f"the actor goes to {target} once the job runs and nothing of it is lost",))
    kept = {*have}.intersection(placed.gpus)
    coming = [gpu for gpu in placed.gpus if gpu not in kept]
    records = [state.gpus[gpu] for gpu in coming if gpu in state.gpus]
    busy = [described(record) for record in records if not is_free(record)]
    absent = sorted({node_of(gpu) for gpu in coming} - nodes_of(state, Role.ACTOR))
    if busy or absent or len(records) < len(coming):
        waits = [*busy, *(f"{instance_id(Role.ACTOR, node)} is not there" for node in absent)]
        return Needs((), (f"the actor goes to {target} once it can ({', '.join(waits)})",))
    is_own = placed != state.asked and not component.lacks_ranks
    if is_own and (paused := pause(state, Role.ACTOR, now_ms)) is not None:
        return paused
    owner = state.owner(Role.ACTOR)
    leaving = [grant for grant in component.grants if grant.gpu not in kept]
    moves = (
        *(Move(gpu=grant.gpu, source=owner, target=None, planned_token=grant.token) for grant in leaving),
        *(Move(gpu=gpu, source=None, target=owner, planned_token=state.gpus[gpu].token) for gpu in coming),
    )
    is_asked, split = placed == state.asked, state.manual.split
    return plan(
        state,
        moves,
        Part(role=Role.ACTOR, kind=PartKind.RESIZE, old_layout=component.layout, new_layout=placed.layout),
        reason=f"the actor from {component.layout} to {target}",
        now_ms=now_ms,
        deadline_ms=change_deadline_ms(state),
        target=Target(placed, is_asked=is_asked, split=split if is_asked and split.get(Role.ACTOR) == placed else {}),
    )


def _may_resize(state: ClusterState, placed: Placed, gone: frozenset[GpuId]) -> bool:
    """A person's wish and a lost rank wait until the job runs. A resize does not wait while the job cannot start
    without it."""
    component = state.components[Role.ACTOR]
    is_in_the_way = state.phase is Phase.STARTING and placed != state.asked and not component.lacks_ranks
    lost = {grant.gpu for grant in state.suspects(Role.ACTOR)} - gone
    can_be_asked = state.lead_of(Role.ACTOR) is not None and not lost
    return can_be_asked and (state.phase is Phase.RUNNING or is_in_the_way)


def changed(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Needs:
    """The next step of an open resize."""
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
        return Needs(steps, (f"moves {counted(len(steps), 'GPU')} of {transition.id}",))
    return _asked(state, role, transition, now_ms)


def _asked(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Needs:
    """Ask the lead until it says that it switched, after the commit too: from there on there is no way back."""
    lead, layout = state.lead_of(role), transition.part(role).new_layout
    assert layout is not None, f"{transition.id} is a change of layout"
    if lead is None:
        return Needs((), (f"{transition.id} waits for a lead of the {role}",))
    leaving, coming = state.moving(role, transition)
    # Grants of ranks that died meanwhile stay in it: a command never changes under its id. The lead finds them dead.
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
    turnover = f"{len(coming)} come, {len(leaving)} leave"
    note = f"the {role} changes to {layout} on {counted(len(members), 'GPU')} ({turnover})"
    return Needs((command,), (note,))


def _released(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Needs:
    """The layout is in force. Each GPU that left is released when its holder or its gate says that it is free. GPUs of
    which nobody can say so stay the component's, which counts them as lost once the transition is closed."""
    leaving = [move for move in transition.moves if move.state is MoveState.DRAINING]
    free = [move for move in leaving if Grant(move.gpu, move.token) in state.released]
    is_told_of = bool(free) or any(may_be_told_of(state, move.gpu) for move in leaving)
    if not is_told_of or now_ms >= transition.deadline_unix_ms:
        return close(transition)
    steps = tuple(advance(transition, move, MoveState.RELEASED) for move in free)
    return Needs(steps, (f"releases {len(free)} of {len(leaving)} GPUs that the {role} left",))
