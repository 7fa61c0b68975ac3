"""Events about GPUs: the store's records, releases, reports of gates, and layouts that components committed.

`released` and `held` name only grants that the store still counts as the component's, or as lost.

Invariants:
- A record's token never goes back but where the store lost a grant that nobody has.
  [test_fold: an_older_record_changes_nothing] [test_lost_gpus: store_lost_and_nobody_has]
- A layout counts only within the open transition that asked for it. [test_layout_changes: closed_resize_cannot_commit]
- An event under tokens that are no longer current changes nothing. [test_fold: that_is_refused_changes_only]
- A gate's report speaks only of grants that it was asked about. [test_lost_gpus: gates_answer_about_an_earlier_grant]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve import evaluations, resizes
from services.scheduler.evolve.accounts import supersede
from services.scheduler.evolve.admission import Refused
from services.scheduler.evolve.losses import MAX_FAILED_STARTS, lose, restart_actor
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.components import Component, role_of_instance
from tidegate.ownership.records import GpuRecord, GpuState, Part, PartKind, PartState, Transition, transition_number
from tidegate.types import Grant, Role, TransitionId, node_of


def observed(state: ClusterState, body: ev.OwnershipObserved) -> ClusterState:
    """Takes over the store's records. A component loses the grants that the store no longer counts as its own."""
    gpus = dict(state.gpus)
    for record in body.gpus:
        known = gpus.get(record.gpu)
        if known is None or record.token >= known.token or _was_lost(state, known, record):
            gpus[record.gpu] = record
    before = state.transitions
    transitions = {each.id: each for each in sorted(body.transitions, key=_index) if each.is_open}
    state = replace(
        state,
        gpus=dict(sorted(gpus.items())),
        transitions=transitions,
        num_transitions=max([state.num_transitions, *map(_index, body.transitions)]),
    )
    for transition in body.transitions:
        if transition.id in before and not transition.is_open:
            state = _closed(state, transition)
    for role in Role:
        state = _forget_closed(state, role)
        state = _given_up(state, role)
        taken = [grant for grant in state.components[role].grants if not _is_owned(state, role, grant)]
        state = lose(state, role, taken, why=f"the store counts {', '.join(each.gpu for each in taken)} as lost")
    state = resizes.forsaken(state)
    current = {Grant(record.gpu, record.token) for record in gpus.values() if record.state is not GpuState.FREE}
    if state.phase is Phase.SUBMITTED and transitions:
        state = replace(state, phase=Phase.STARTING)
    return replace(
        state,
        released=tuple(grant for grant in state.released if grant in current),
        held=tuple(grant for grant in state.held if grant in current),
    )


def _was_lost(state: ClusterState, known: GpuRecord, record: GpuRecord) -> bool:
    """Whether the store lost the known grant and nobody has it: the gate says so, and the store has the GPU as free."""
    return record.state is GpuState.FREE and Grant(known.gpu, known.token) in state.released


def _index(transition: Transition) -> int:
    return transition_number(transition.id)


def transition_id(state: ClusterState) -> TransitionId:
    """The id of the next transition."""
    return TransitionId(f"{state.job}/{state.incarnation}/t{state.num_transitions + 1}")


def _closed(state: ClusterState, transition: Transition) -> ClusterState:
    """An unfinished start or change counts against its component. A change of the actor is over, whatever came of it.
    A stop counts for nothing: the job ends."""
    for part in transition.parts:
        if part.role is Role.ACTOR and part.kind.is_change:
            state = resizes.over(state, transition)
        elif part.kind is not PartKind.STOP:
            state = _ended(state, part, transition)
    return state


def _ended(state: ClusterState, part: Part, transition: Transition) -> ClusterState:
    role, component = part.role, state.components[part.role]
    if part.state is PartState.COMMITTED:
        has_nothing = part.kind is PartKind.SUSPEND and not component.is_up
        return state.with_component(role, resizes.suspended(component, transition)) if has_nothing else state
    why = component.last_failure if transition.id in component.broken else "it was not done"
    num_failed = component.num_failed_starts + 1
    only_gives = all(move.target is None for move in transition.moves)
    component = replace(
        component,
        num_failed_starts=num_failed,
        num_failed_releases=component.num_failed_releases + only_gives,
        last_failure=why,
    )
    if role is Role.ACTOR and component.is_suspended and num_failed >= MAX_FAILED_STARTS and state.phase not in OVER:
        return restart_actor(state, why=f"the actor failed to resume {num_failed} times in a row, the last time: {why}")
    return state.with_component(role, component)


def _given_up(state: ClusterState, role: Role) -> ClusterState:
    """The component loses grants that it released in a change which was closed before its layout came into force."""
    left = [grant for grant in state.components[role].grants if grant in state.released]
    if not left or state.transition_of(role) is not None:
        return state
    return lose(state, role, left, why=f"the {role} had released {', '.join(grant.gpu for grant in left)} already")


def _forget_closed(state: ClusterState, role: Role) -> ClusterState:
    component = state.components[role]
    broken = tuple(each for each in component.broken if each in state.transitions)
    return state.with_component(role, replace(component, broken=broken)) if broken != component.broken else state


def _is_owned(state: ClusterState, role: Role, grant: Grant) -> bool:
    record = state.gpus.get(grant.gpu)
    if record is None or record.token < grant.token:
        return True
    return record.token == grant.token and record.state is GpuState.OWNED and record.owner == state.owner(role)


def released(state: ClusterState, event: ev.Event, body: ev.GpusReleased) -> ClusterState | Refused:
    role = role_of_instance(event.source)
    if role is None:
        return Refused("released by no component")
    free = tuple(grant for grant in body.grants if _is_of_role(state, role, grant))
    if not free:
        return Refused("under old tokens")
    # A lead knows the workers of its own component alone: of a GPU without a known owner, only the gate can tell.
    free = tuple(grant for grant in free if state.gpus[grant.gpu].owner is not None)
    if not free:
        return Refused("of GPUs whose last owner the store does not know")
    transition = state.transition_of(role)
    leaving = state.moving(role, transition)[0] if transition is not None else ()
    asked = tuple(grant for grant in free if grant in leaving)
    if transition is not None and asked and not transition.part(role).kind.works_after:
        # A resize takes its GPUs out of the component later, with the layout that does without them.
        state = state.with_component(role, _without(state, role, transition, asked))
    unasked = [grant for grant in free if grant not in asked]
    state = lose(
        state, role, unasked, why=f"{event.source} gave up {', '.join(grant.gpu for grant in unasked)} unasked"
    )
    return _with_released(state, free)


def _without(state: ClusterState, role: Role, transition: Transition, asked: tuple[Grant, ...]) -> Component:
    """The component without the released grants. A world of ranks that is suspended lets go of all ranks at once."""
    component = state.components[role]
    if not component.is_up:
        return component
    left = tuple(grant for grant in component.grants if grant not in asked)
    is_suspended = transition.part(role).kind is PartKind.SUSPEND and state.phase not in OVER
    if is_suspended and (role is not Role.ROLLOUT or not left):
        return resizes.suspended(component, transition)
    return component.with_grants(left)


def _is_of_role(state: ClusterState, role: Role, grant: Grant) -> bool:
    return any(grant == Grant(record.gpu, record.token) for record in state.records_of(role))


def _with_released(state: ClusterState, free: tuple[Grant, ...]) -> ClusterState:
    return replace(
        state,
        released=tuple(sorted({*state.released, *free})),
        held=tuple(grant for grant in state.held if grant not in free),
    )


def gate_reported(state: ClusterState, event: ev.Event, body: ev.GateReported) -> ClusterState | Refused:
    """A gate's report counts for suspects alone, and for those that it was asked about.

    A component speaks for its workers that start or work. A report from before a GPU became suspect knows nothing of
    its last holder. A GPU of the gate's node that the report does not list was never passed to: the holder of its grant
    died before its worker started."""
    asked = {grant for role in Role for grant in state.suspects(role)} & set(event.grants) - set(state.released)
    held_gpus = {gate.gpu for gate in body.gpus if gate.held}
    on_node = [grant for grant in sorted(asked) if node_of(grant.gpu) == body.node]
    if not on_node:
        return Refused("of GPUs that nobody asked about")
    held = {grant for grant in on_node if grant.gpu in held_gpus}
    state = replace(state, held=tuple(sorted({*state.held, *held})))
    return _with_released(state, tuple(grant for grant in on_node if grant not in held))


def committed(state: ClusterState, event: ev.Event, body: ev.LayoutCommitted) -> ClusterState | Refused:
    role = role_of_instance(event.source)
    transition = state.transition_of(role) if role else None
    if role is None or transition is None or event.transition_id != transition.id:
        return Refused("of a transition that is not open")
    component = state.components[role]
    if transition.id in component.broken or state.phase in OVER:
        return Refused("of a transition that is broken")
    if body.layout != transition.part(role).new_layout:
        return Refused("of another layout than planned")
    if role is Role.ACTOR and transition.part(role).kind is PartKind.RESIZE:
        return resizes.switched(state, transition, body)
    leaving, coming = state.moving(role, transition)
    if not set(coming) <= set(body.grants) or set(leaving) & set(body.grants):
        return Refused("of other GPUs than planned")
    if component.switched == transition.id:
        return Refused("of a transition that is in force")
    working = {*coming, *component.grants} - set(leaving)
    alive = tuple(grant for grant in body.grants if grant in working)
    state = state.with_component(role, resizes.in_force(component, transition, body, alive))
    return _lineage(state, body) if role is Role.ACTOR and not component.is_suspended else state


def _lineage(state: ClusterState, body: ev.LayoutCommitted) -> ClusterState:
    """The state from the iteration with which the actor says that it goes on."""
    next_iteration = body.next_iteration
    state = supersede(state, next_iteration=next_iteration)
    checkpoint = state.checkpoint
    known = checkpoint is not None and checkpoint.next_iteration == next_iteration
    version = checkpoint.version if checkpoint is not None and known else next_iteration
    if checkpoint is not None and next_iteration < checkpoint.next_iteration:
        cause = f"checkpoint {checkpoint.name} could not be used (the actor's log says why)"
        again = f"goes on from iteration {next_iteration} and trains again what came after it"
        # The next save is newer than what the actor goes on from. Until then a restart falls back from this one again.
        checkpoint = replace(checkpoint, next_iteration=next_iteration, version=version)
        state = replace(state, message=f"{cause}: {again}", checkpoint=checkpoint)
    state = evaluations.superseded(state, next_version=version)
    return replace(state, next_iteration=next_iteration, next_version=version, next_prompt=body.next_prompt)
