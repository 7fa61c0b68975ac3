"""What is known of the actor's resizes: asked by a person, in force once its lead says so, or come to nothing.

Invariants: one is made at a time, the last one asked for meanwhile is next, and none is for GPUs that are no slot of
the actor; the actor's layout in the state changes only by its lead's word, which comes after the store committed it,
names the members as they were planned, dead or alive, and comes before or after the word of a death; a resize that
failed is not asked again by itself, counts as no failed start and leaves incarnation and iteration as they are.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler import events as ev
from services.scheduler.admission import Refused
from services.scheduler.losses import MAX_DEATHS, OVER, restart_actor, with_component
from services.scheduler.state import ClusterState
from services.scheduler.values import JobSpec, Placed
from tidegate.ownership import GpuRecord, GpuState, PartState, Transition
from tidegate.types import Grant, Layout, Role


def fault(spec: JobSpec, placed: Placed) -> str | None:
    """Why the actor can never be there: what, the numbers, the remedy; None when it can."""
    slots, gpus, layout = spec.slots(Role.ACTOR), placed.gpus, placed.layout
    if strange := [gpu for gpu in gpus if gpu not in slots]:
        return (
            f"{', '.join(strange)}: no slot of the actor, whose slots are {', '.join(slots)}; "
            "actor.standby gives it more when the job is submitted"
        )
    if len(set(gpus)) != len(gpus):
        return f"{', '.join(gpus)}: a GPU is named twice; name each once, in rank order"
    if layout.num_ranks != len(gpus):
        return (
            f"layout {layout}: tp * pp * dp * cp = {layout.tp} * {layout.pp} * {layout.dp} * {layout.cp} = "
            f"{layout.num_ranks} ranks on {len(gpus)} GPUs; name {layout.num_ranks} of {', '.join(slots)}"
        )
    return None


def target(state: ClusterState, layout: Layout) -> Placed:
    """The layout on the GPUs that the actor has, the last ones left out, or on the first free slots besides."""
    assert state.spec is not None, "a job without a config has no slots"
    have = [grant.gpu for grant in state.components[Role.ACTOR].grants]
    free = [gpu for gpu in state.spec.slots(Role.ACTOR) if gpu not in have and is_free(state.gpus[gpu])]
    return Placed(tuple([*have, *free][: layout.num_ranks]), layout)


def requested(state: ClusterState, body: ev.ResizeRequested) -> ClusterState | Refused:
    if state.phase in OVER:
        return Refused("the job is ending")
    if state.spec is None or fault(state.spec, body.placed) is not None:
        return Refused("asks for what the actor cannot be")
    if state.resize() is not None:
        return replace(state, asked_next=body.placed)
    return replace(state, asked=body.placed)


def failed(state: ClusterState, event: ev.Event) -> ClusterState | Refused:
    """Before its commit: the transition is closed, and the actor goes on as it was."""
    transition = state.resize()
    if transition is None or event.transition_id != transition.id:
        return Refused("of a transition that is not open")
    component = state.components[Role.ACTOR]
    if transition.id in component.broken or transition.part(Role.ACTOR).state is PartState.COMMITTED:
        return Refused("of a transition that is decided")
    return with_component(state, Role.ACTOR, replace(component, broken=(*component.broken, transition.id)))


def switched(state: ClusterState, transition: Transition, body: ev.LayoutCommitted) -> ClusterState | Refused:
    """The actor works on these members in this layout, from where it was; it lacks those that died on the way."""
    component = state.components[Role.ACTOR]
    if component.switched == transition.id:
        return Refused("of a transition that is in force")
    if set(body.grants) != set(members_after(state, transition)):
        return Refused("of other GPUs than planned")
    placed = Placed(tuple(grant.gpu for grant in body.grants), body.layout)
    alive = tuple(grant for grant in body.grants if grant not in component.gone)
    if not alive:
        return restart_actor(state, why=f"all that {transition.id} brought the actor to died")
    component = replace(component, grants=alive, layout=body.layout, switched=transition.id)
    state = with_component(state, Role.ACTOR, component)
    # Where a policy brought it counts for the iteration, where a person did from now on.
    return state if state.asked is None else replace(state, moved=placed)


def over(state: ClusterState, transition: Transition) -> ClusterState:
    """A closed resize. An actor that lacks ranks goes on to its next one, which brings them back, where its lead has
    said how this one ended; without its word nobody knows in which layout the ranks are."""
    actor = state.components[Role.ACTOR]
    is_told = transition.id in (*actor.broken, actor.switched)
    is_committed = actor.switched == transition.id
    num_more = 0 if is_committed or actor.gone or not actor.lacks_ranks else 1
    ended = replace(actor, gone=(), num_deaths=actor.num_deaths + num_more)
    state = replace(with_component(state, Role.ACTOR, ended), asked=state.asked_next, asked_next=None)
    if not actor.lacks_ranks or state.phase in OVER or (is_told and ended.num_deaths <= MAX_DEATHS):
        return state
    return restart_actor(state, why=f"{transition.id} did not bring the actor's lost ranks back")


def forsaken(state: ClusterState) -> ClusterState:
    """Whoever was to come is gone with its node, and the store has committed the resize all the same."""
    transition, actor = state.resize(), state.components[Role.ACTOR]
    if transition is None or transition.id not in actor.broken or not actor.is_up or state.phase in OVER:
        return state
    if transition.part(Role.ACTOR).state is not PartState.COMMITTED or actor.switched == transition.id:
        return state
    return restart_actor(state, why=f"{transition.id} was committed with GPUs that are lost")


def members_after(state: ClusterState, transition: Transition) -> tuple[Grant, ...]:
    """As planned, whoever of them has died meanwhile; sorted."""
    component = state.components[Role.ACTOR]
    leaving, coming = moving(state, transition)
    return tuple(sorted({*component.grants, *component.gone, *coming} - set(leaving)))


def moving(state: ClusterState, transition: Transition) -> tuple[tuple[Grant, ...], tuple[Grant, ...]]:
    """The grants that leave the actor, and those that come to it, in the transition's order."""
    owner = state.owner(Role.ACTOR)
    leaving = tuple(Grant(move.gpu, move.token) for move in transition.moves if move.source == owner)
    coming = tuple(Grant(move.gpu, move.token) for move in transition.moves if move.target == owner)
    return leaving, coming


def is_free(record: GpuRecord) -> bool:
    """Nobody's, and no transition's."""
    return record.state is GpuState.FREE and record.transition is None
