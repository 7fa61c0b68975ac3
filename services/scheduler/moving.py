"""What moving GPUs needs next: transitions begun, carried on and ended, and lost GPUs taken back. Pure.

A start is free -> component, a stop component -> free; a transition moves GPUs of one component, and one is planned at
a time. Each step is derived from the store's record and from what components told, never from what was asked before.

A transition past its deadline goes no further: a start is closed and counts as failed, a stop ends the job without it.

A component that lost GPUs: the store counts them as lost, the node's gate is asked, a worker that still holds one is
stopped through the component's lead, and a GPU that nobody holds is reclaimed; then a new start takes it again.
A world that lost one rank goes this way with all its GPUs; the rollout, and an actor that is past its start, with the
lost ones alone. An actor that changes while it works, or gets its lost ranks back, is `resizing`'s.
"""

from __future__ import annotations

from services.scheduler import commands as cmd
from services.scheduler.policy import Proposal
from services.scheduler.resizes import is_free, moving
from services.scheduler.resizing import planned_resize, resized
from services.scheduler.state import ClusterState, Phase
from services.scheduler.stepping import advance, close, commit, described, nodes_of, plan
from services.scheduler.values import Placed, Snapshot
from services.scheduler.wanted import Wanted, header, waiting
from tidegate.ownership import GpuState, Move, MoveState, Part, PartState, Transition
from tidegate.types import CommandId, Grant, Role, instance_id, node_of

MAX_FAILED_STARTS = 4
"""Starts of a component that may fail in a row; with the pauses between them 42 s, twice the default lease. Fewer, and
an instance that is dead but still has its lease ends the job."""

START_PAUSE_MS = 2_000
START_PAUSE_GROWTH = 4


def wanted_moves(state: ClusterState, proposal: Proposal, now_ms: int) -> Wanted:
    """All components, in role order."""
    wanted = Wanted()
    for role in Role:
        transition = state.transition_of(role)
        if transition is not None:
            wanted += _continued(state, role, transition, proposal, now_ms)
        wanted += _recovered(state, role, now_ms)
    plans = [plan for role in Role if (plan := _planned(state, role, proposal, now_ms)) is not None]
    begun = False
    for plan in plans:
        # The next id depends on the store's last transition, so the others wait until this one is observed.
        is_plan = any(isinstance(command, cmd.PlanTransition) for command in plan.commands)
        if not (is_plan and begun):
            wanted += plan
        begun = begun or is_plan
    return wanted


def _continued(state: ClusterState, role: Role, transition: Transition, proposal: Proposal, now_ms: int) -> Wanted:
    if _is_hopeless(state, role, transition):
        return close(transition)
    if transition == state.resize():
        return resized(state, transition, proposal.placement.get(role), now_ms)
    if transition.part(role).state is PartState.COMMITTED:
        return close(transition)
    if transition.part(role).new_layout is None:
        return _stopped(state, role, transition, now_ms)
    return _started(state, role, transition, now_ms)


def _is_hopeless(state: ClusterState, role: Role, transition: Transition) -> bool:
    starts = transition.part(role).new_layout is not None
    lost = any(state.gpus[move.gpu].state is GpuState.LOST for move in transition.moves if move.gpu in state.gpus)
    return lost or transition.id in state.components[role].broken or (starts and state.phase is Phase.STOPPING)


def _started(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Wanted:
    steps = tuple(
        advance(transition, move, MoveState.ACQUIRING) for move in transition.moves if move.state is MoveState.PLANNED
    )
    is_overdue = now_ms >= transition.deadline_unix_ms
    if steps and not is_overdue:
        return Wanted(steps, (f"hands {len(steps)} GPUs to the {role}",))
    component, layout = state.components[role], transition.part(role).new_layout
    coming = tuple(Grant(move.gpu, move.token) for move in transition.moves)
    if layout is None or (component.is_up and set(coming) <= set(component.grants)):
        return commit(transition, role, layout)
    if is_overdue:
        return close(transition)
    lead = state.lead_of(role)
    if lead is None:
        return waiting(state, role, "lead", what=f"a lead of the {role}")
    weights, reference = _to_load(state, role)
    members = (*component.grants, *coming)
    up = cmd.ScaleUp(
        header=header(state, role, lead, step=f"{transition.id}/up", now_ms=now_ms, transition_id=transition.id),
        grants=coming,
        members=_in_rank_order(state, role, members),
        layout=layout,
        weights=weights,
        reference=reference,
        checkpoint=state.checkpoint.name if role is Role.ACTOR and state.checkpoint else "",
    )
    return Wanted((up,), (f"starts the {role} on {len(coming)} GPUs, {len(members)} in all",))


def _to_load(state: ClusterState, role: Role) -> tuple[Snapshot | None, Snapshot | None]:
    """Weights and reference for a component that starts: both, or none before they are published."""
    weights = state.snapshots.get(state.target_version)
    reference = state.reference if state.needs_reference(role) else None
    if role is Role.ACTOR or weights is None or (reference is None and state.needs_reference(role)):
        return None, None
    return weights, reference


def _in_rank_order(state: ClusterState, role: Role, grants: tuple[Grant, ...]) -> tuple[Grant, ...]:
    home = state.home(role)
    rank = {gpu: index for index, gpu in enumerate(home.gpus if home else ())}
    return tuple(sorted(grants, key=lambda grant: (rank.get(grant.gpu, len(rank)), grant)))


def _stopped(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Wanted:
    planned = [move for move in transition.moves if move.state is MoveState.PLANNED]
    draining = [move for move in transition.moves if move.state is MoveState.DRAINING]
    if now_ms >= transition.deadline_unix_ms and (planned or draining):
        left = f"{len(planned) + len(draining)} of {len(transition.moves)} GPUs still draining"
        return Wanted(failure=f"{transition.id} was not done by its deadline, {left}")
    if planned:
        steps = tuple(advance(transition, move, MoveState.DRAINING) for move in planned)
        return Wanted(steps, (f"drains {len(steps)} GPUs of the {role}",))
    if not draining:
        return commit(transition, role, None)
    component = state.components[role]
    free = [move for move in draining if Grant(move.gpu, move.token) in state.released]
    steps = tuple(advance(transition, move, MoveState.RELEASED) for move in free)
    working = tuple(grant for move in draining if (grant := Grant(move.gpu, move.token)) in component.grants)
    wanted = Wanted(steps, (f"releases {len(free)} of the {role}'s {len(draining)} draining GPUs",))
    if not working:
        return wanted
    lead = state.lead_of(role)
    if lead is None:
        return wanted + waiting(state, role, "lead", what=f"a lead of the {role}")
    down = cmd.ScaleDown(
        header=header(state, role, lead, step=f"{transition.id}/down", now_ms=now_ms, transition_id=transition.id),
        grants=working,
        members=(),
        layout=None,
    )
    return wanted + Wanted((down,), (f"stops the {role} on {len(working)} GPUs",))


def _recovered(state: ClusterState, role: Role, now_ms: int) -> Wanted:
    """Suspects on their way back to the free pool. Within a transition that stops the component they need only be
    released; else the store counts them as lost first."""
    wanted = Wanted()
    for grant in state.suspects(role):
        record = state.gpus[grant.gpu]
        key = f"{state.job}/{grant.gpu}/{grant.token}"
        if record.state is GpuState.OWNED and record.transition is None:
            lost = cmd.MarkLost(CommandId(f"{key}/lost"), grant.gpu, grant.token)
            wanted += Wanted((lost,), (f"counts {grant.gpu} of the {role} as lost",))
        elif grant not in state.released:
            wanted += _asked_gate(state, role, grant)
            if grant in state.held and not _is_leaving(state, grant):
                wanted += _cleared(state, role, grant, now_ms)
        elif record.state is GpuState.LOST and record.transition is None:
            reclaim = cmd.Reclaim(CommandId(f"{key}/reclaim"), grant.gpu, grant.token)
            wanted += Wanted((reclaim,), (f"takes {grant.gpu} back, which nobody holds",))
    return wanted


def _is_leaving(state: ClusterState, grant: Grant) -> bool:
    """By a resize that is under way: its lead has the worker stand down."""
    transition = state.resize()
    return transition is not None and grant in moving(state, transition)[0]


def _cleared(state: ClusterState, role: Role, grant: Grant, now_ms: int) -> Wanted:
    """A command a GPU: the id names the grant, so that no later one is answered from its result."""
    lead, component = state.lead_of(role), state.components[role]
    if lead is None:
        return Wanted((), (f"{grant.gpu} is held by a living worker of the {role}, which has no lead to stop it",))
    step = f"{state.job}/{grant.gpu}/{grant.token}/clear"
    down = cmd.ScaleDown(
        header=header(state, role, lead, step=step, now_ms=now_ms),
        grants=(grant,),
        members=component.grants,
        layout=component.layout,
    )
    return Wanted((down,), (f"clears {grant.gpu}, which a living worker of the {role} holds",))


def _asked_gate(state: ClusterState, role: Role, grant: Grant) -> Wanted:
    node, component = node_of(grant.gpu), state.components[role]
    is_needed = not component.is_up or (role is Role.ACTOR and component.lacks_ranks)
    endpoints = tuple(state.instances[name].endpoint for name in state.living(node=node))
    note = f"{grant.gpu} waits for its gate"
    if endpoints:
        key = CommandId(f"{state.job}/{grant.gpu}/{grant.token}/gate")
        return Wanted((cmd.AskGate(key, node, grant, endpoints, is_needed),), (note,))
    if is_needed:
        return waiting(state, role, f"gate-{node}", what=f"an instance on {node}, whose gate must tell of lost GPUs")
    return Wanted((), (f"{note}, which no living instance on {node} can ask",))


def _planned(state: ClusterState, role: Role, proposal: Proposal, now_ms: int) -> Wanted | None:
    """The role's next transition; None when it has one, or needs none."""
    if state.transition_of(role) is not None:
        return None
    if state.phase is Phase.STOPPING:
        return _planned_stop(state, role, now_ms)
    placed = proposal.placement.get(role)
    if placed is None:
        return None
    if role is Role.ACTOR and state.components[role].is_up:
        return planned_resize(state, placed, now_ms)
    return _planned_start(state, role, placed, now_ms)


def _planned_stop(state: ClusterState, role: Role, now_ms: int) -> Wanted | None:
    component = state.components[role]
    if not component.grants:
        return None
    moves = tuple(
        Move(gpu=grant.gpu, source=state.owner(role), target=None, planned_token=grant.token)
        for grant in component.grants
    )
    part = Part(role=role, old_layout=component.layout, new_layout=None)
    return plan(state, moves, part, reason=f"stop the {role}: the job ends {state.outcome}", now_ms=now_ms)


def _planned_start(state: ClusterState, role: Role, placed: Placed, now_ms: int) -> Wanted | None:
    component = state.components[role]
    missing = [gpu for gpu in placed.gpus if gpu not in {grant.gpu for grant in component.grants}]
    if not missing:
        return None
    if component.num_failed_starts >= MAX_FAILED_STARTS:
        times = f"the {role} failed to start {component.num_failed_starts} times in a row"
        return Wanted(failure=f"{times}, the last time: {component.last_failure}; see its logs")
    pause = _pause(state, role, now_ms)
    if pause is not None:
        return pause
    unknown = [gpu for gpu in missing if gpu not in state.gpus]
    if unknown:
        return Wanted((), (f"{len(unknown)} GPUs of the {role} are not registered in the store yet",))
    free = [gpu for gpu in missing if is_free(state.gpus[gpu])]
    if not free or (len(free) < len(missing) and not component.is_up):
        busy = ", ".join(described(state.gpus[gpu]) for gpu in missing if gpu not in free)
        return Wanted((), (f"{len(free)} of {len(missing)} GPUs of the {role} are free ({busy})",))
    absent = sorted({node_of(gpu) for gpu in free} - nodes_of(state, role))
    if state.lead_of(role) is None or absent:
        instances = ", ".join(instance_id(role, node) for node in absent)
        what = f"{instances} to join" if absent else f"a lead of the {role}"
        if component.is_up:
            return Wanted((), (f"{len(free)} GPUs of the {role} wait for {what}",))
        return waiting(state, role, "instances" if absent else "lead", what=what)
    moves = tuple(
        Move(gpu=gpu, source=None, target=state.owner(role), planned_token=state.gpus[gpu].token) for gpu in free
    )
    part = Part(role=role, old_layout=component.layout, new_layout=placed.layout)
    return plan(state, moves, part, reason=f"start the {role} on {len(free)} GPUs", now_ms=now_ms)


def _pause(state: ClusterState, role: Role, now_ms: int) -> Wanted | None:
    """None when the component may start: it did not fail last time, or the pause since is over."""
    num_failed = state.components[role].num_failed_starts
    if not num_failed:
        return None
    key = f"{state.job}/{state.incarnation}/pause/{role}/{num_failed}"
    known = state.expectations.get(key)
    if known is not None and now_ms >= known.due_ms:
        return None
    wait_ms = START_PAUSE_MS * START_PAUSE_GROWTH ** (num_failed - 1)
    note = f"the {role} failed to start {num_failed} times and pauses {wait_ms / 1000:g} s"
    return Wanted((cmd.Await(CommandId(key), f"the {role} to be started again", wait_ms),), (note,))
