"""What a resize of the actor needs next: GPUs, layout, or both changed while it works. Pure.

Order: it is planned; what leaves is draining and what comes is acquiring, in one turn; the lead is asked; its ranks
make the new layout beside the old one, and the store's commit of the actor's part, by the lead, decides; the lead says
that it switched; what leaves is released; the transition ends. Rollout and inference are asked nothing, and the open
iteration stays open. Invariants: a GPU leaves the store's record only after the layout without it is in force; past its
deadline an uncommitted resize is closed, and the actor goes on as it was.
An actor that lacks ranks is brought back in the same way, once what it lost is free: to where it was, or was asked to.
For it there is no going on as it was: such a resize is made again where its lead says that a death was in its way, and
costs the incarnation where it fails otherwise, or comes to nothing by its deadline.
"""

from __future__ import annotations

from services.scheduler import commands as cmd
from services.scheduler.expectations import command_deadline_ms
from services.scheduler.resizes import is_free, members_after, moving
from services.scheduler.state import ClusterState, Phase
from services.scheduler.stepping import advance, close, described, nodes_of, plan
from services.scheduler.values import Placed
from services.scheduler.wanted import Wanted, header
from tidegate.ownership import Move, MoveState, Part, PartState, Transition
from tidegate.types import Grant, Role, instance_id, node_of

RESIZE_DEADLINES = 2
"""Command deadlines that a resize has to commit. One fewer than end the job for a lead without effect: an update that
takes longer than this costs the resize, not the job."""


def planned_resize(state: ClusterState, placed: Placed, now_ms: int) -> Wanted | None:
    """The next resize of an actor that is up; None when it is where it should be."""
    component = state.components[Role.ACTOR]
    have = tuple(grant.gpu for grant in component.grants)
    if (have, component.layout) == (placed.gpus, placed.layout):
        return None
    target = f"{placed.layout} on {', '.join(placed.gpus)}"
    if state.phase is not Phase.RUNNING or state.lead_of(Role.ACTOR) is None or state.suspects(Role.ACTOR):
        return Wanted((), (f"the actor goes to {target} once the job runs and nothing of it is lost",))
    coming = [gpu for gpu in placed.gpus if gpu not in have]
    records = [state.gpus[gpu] for gpu in coming if gpu in state.gpus]
    busy = [described(record) for record in records if not is_free(record)]
    absent = sorted({node_of(gpu) for gpu in coming} - nodes_of(state, Role.ACTOR))
    if busy or absent or len(records) < len(coming):
        waits = [*busy, *(f"{instance_id(Role.ACTOR, node)} is not there" for node in absent)]
        return Wanted((), (f"the actor goes to {target} once it can ({', '.join(waits)})",))
    owner = state.owner(Role.ACTOR)
    leaving = [grant for grant in component.grants if grant.gpu not in placed.gpus]
    moves = (
        *(Move(gpu=grant.gpu, source=owner, target=None, planned_token=grant.token) for grant in leaving),
        *(Move(gpu=gpu, source=None, target=owner, planned_token=state.gpus[gpu].token) for gpu in coming),
    )
    part = Part(role=Role.ACTOR, old_layout=component.layout, new_layout=placed.layout)
    reason = f"the actor from {component.layout} to {target}"
    deadline_ms = RESIZE_DEADLINES * command_deadline_ms(state)
    return plan(state, moves, part, reason=reason, now_ms=now_ms, deadline_ms=deadline_ms)


def resized(state: ClusterState, transition: Transition, placed: Placed | None, now_ms: int) -> Wanted:
    """An open resize, carried on. `placed` gives the order of the ranks."""
    is_committed = transition.part(Role.ACTOR).state is PartState.COMMITTED
    if is_committed and state.components[Role.ACTOR].switched == transition.id:
        return _released(state, transition, now_ms)
    if not is_committed and now_ms >= transition.deadline_unix_ms:
        return close(transition)
    steps = tuple(
        advance(transition, move, MoveState.DRAINING if move.source else MoveState.ACQUIRING)
        for move in transition.moves
        if move.state is MoveState.PLANNED
    )
    if steps:
        return Wanted(steps, (f"moves {len(steps)} GPUs of {transition.id}",))
    return _asked(state, transition, placed, now_ms)


def _asked(state: ClusterState, transition: Transition, placed: Placed | None, now_ms: int) -> Wanted:
    """The lead is asked until it says that it switched: after the commit as well, for then there is no way back."""
    lead, layout = state.lead_of(Role.ACTOR), transition.part(Role.ACTOR).new_layout
    assert layout is not None, f"{transition.id} is a resize"
    if lead is None:
        return Wanted((), (f"{transition.id} waits for a lead of the actor",))
    leaving, coming = moving(state, transition)
    rank = {gpu: index for index, gpu in enumerate(placed.gpus if placed else ())}
    # Who died meanwhile too: what is asked under an id never changes, and the lead finds them dead.
    after = members_after(state, transition)
    members = tuple(sorted(after, key=lambda grant: (rank.get(grant.gpu, len(rank)), grant)))
    step = f"{transition.id}/resize"
    head = header(state, Role.ACTOR, lead, step=step, now_ms=now_ms, transition_id=transition.id)
    command: cmd.Command
    if coming and not leaving:
        command = cmd.ScaleUp(head, coming, members, layout, weights=None, reference=None, checkpoint="")
    elif leaving and not coming:
        command = cmd.ScaleDown(head, leaving, members, layout)
    else:
        command = cmd.Migrate(head, leaving, coming, members, layout)
    note = f"the actor changes to {layout} on {len(members)} GPUs ({len(coming)} come, {len(leaving)} leave)"
    return Wanted((command,), (note,))


def _released(state: ClusterState, transition: Transition, now_ms: int) -> Wanted:
    """The layout is in force: what left is released as its holder, or its gate, says that it is free."""
    leaving = [move for move in transition.moves if move.state is MoveState.DRAINING]
    free = [move for move in leaving if Grant(move.gpu, move.token) in state.released]
    if not leaving or now_ms >= transition.deadline_unix_ms:
        return close(transition)
    steps = tuple(advance(transition, move, MoveState.RELEASED) for move in free)
    return Wanted(steps, (f"releases {len(free)} of {len(leaving)} GPUs that the actor left",))
