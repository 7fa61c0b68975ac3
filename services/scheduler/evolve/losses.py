"""What a death changes: a component goes on with less, starts its world again, or the job takes a new incarnation.

- rollout: an engine lives and dies whole; the others go on, the component is down only when none is left;
- inference: one world of ranks; losing one loses all, and they are started again under the same lead;
- actor: one world that holds the training state. From the first iteration on a rank's death leaves it impaired: its
  other ranks keep the state, what its lead was at (an update, a save, a publish) waits, and `resizing` brings it back
  to where it was, in the same incarnation, after at most MAX_DEATHS deaths an iteration. Whatever else it loses, or
  where that fails, supersedes the incarnation, and the next one starts from the last checkpoint, at most
  `max_actor_restarts` times.

In a resize nobody knows yet, when a death is told, whether the store has committed it: its lead's word, which comes
before or after, says in which layout the actor lacks the rank. Until then who died is kept as `gone`.
Nothing here moves a GPU. A grant that leaves a component's `grants` is a suspect: `decide` has the store count its GPU
as lost, the node's gate asked, and the GPU taken back when nobody holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.evolve import evaluations
from services.scheduler.evolve.accounts import supersede
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.components import Component, Down, Suspended, Working
from services.scheduler.state.layouts import whole
from services.scheduler.state.values import Placed
from tidegate.ownership.records import Transition
from tidegate.types import Grant, NodeId, Role, node_of

MAX_FAILED_STARTS = 4
"""Starts of a component that may fail in a row; with the pauses between them 42 s, twice the default lease. Fewer, and
an instance that is dead but still has its lease ends the job."""

MAX_DEATHS = 3
"""Of the actor's ranks from the opening of one iteration to that of the next; a resize that did not bring them back,
with nobody known to have died in it, counts as one. A minibatch that kills whoever trains it must not be tried for
ever."""


def stop(state: ClusterState, outcome: Phase, message: str) -> ClusterState:
    """Begin to end the job; nothing happens when it is ending already."""
    if state.phase in OVER:
        return state
    return replace(state, phase=Phase.STOPPING, outcome=outcome, message=message)


def with_component(state: ClusterState, role: Role, component: Component) -> ClusterState:
    return replace(state, components={**state.components, role: component})


def lose(
    state: ClusterState, role: Role, gone: Iterable[Grant], *, why: str, keeps_state: bool = False
) -> ClusterState:
    """The holders of these grants are gone. Grants that the role does not work under, nor acquires, change nothing.

    `keeps_state`: nothing but these processes is gone, their node's memory is there."""
    component = state.components[role]
    gone = set(gone)
    if role is Role.ACTOR and keeps_state and waits_for_ranks(state):
        return impaired(state, gone, why=why)
    transition = state.transition_of(role)
    if transition is not None and transition.id not in component.broken and _breaks(state, role, transition, gone):
        component = replace(component, broken=(*component.broken, transition.id), last_failure=why)
        state = with_component(state, role, component)
    if role is Role.ROLLOUT and state.phase not in OVER:
        left = whole(component, gone)
    else:
        left = tuple(grant for grant in component.grants if grant not in gone)
    if len(left) == len(component.grants):
        return state
    if state.phase in OVER or (role is Role.ROLLOUT and left):
        return with_component(state, role, shrunk(component, left))
    if role is Role.ACTOR:
        return restart_actor(state, why=why)
    return with_component(state, role, shrunk(component, ()))


def _breaks(state: ClusterState, role: Role, transition: Transition, gone: set[Grant]) -> bool:
    """Whoever was to come is gone, or the world that was to change is, or nobody of a rollout is left to stay."""
    had = set(state.components[role].grants)
    is_to_work = transition.part(role).kind.works_after
    if gone & set(_coming(state, role)) or (is_to_work and role is Role.INFERENCE and gone & had):
        return True
    leaving, coming = state.moving(role, transition)
    return is_to_work and role is Role.ROLLOUT and bool(gone & had) and not had - gone - set(leaving) and not coming


def waits_for_ranks(state: ClusterState) -> bool:
    """Whether the actor goes on after another death: its lead asks again what a death breaks off. While it starts,
    which ends as the first iteration opens, it does not."""
    actor, transition = state.components[Role.ACTOR].state, state.transition_of(Role.ACTOR)
    is_started = state.phase is Phase.RUNNING and transition in (None, state.changing(Role.ACTOR))
    return is_started and isinstance(actor, Working) and actor.num_deaths < MAX_DEATHS


def impaired(state: ClusterState, gone: Iterable[Grant], *, why: str) -> ClusterState:
    """The actor's other ranks hold the state; incarnation and iteration stay, and so does its layout, but for a resize
    that the store has committed: then it is to be impaired in the new one."""
    component, transition = state.components[Role.ACTOR], state.changing(Role.ACTOR)
    actor = component.state
    assert isinstance(actor, Working), f"an actor that is {actor.CASE} has no ranks"
    is_switching = transition is not None and component.switched != transition.id
    members = {*actor.grants, *(_coming(state, Role.ACTOR) if is_switching else ())}
    dead = members.intersection(gone).difference(actor.gone)
    if not dead:
        return state
    left = tuple(grant for grant in actor.grants if grant not in dead)
    if not left:
        return restart_actor(state, why=why)
    known = tuple(sorted({*actor.gone, *dead})) if is_switching else actor.gone
    actor = replace(actor, grants=left, gone=known, num_deaths=actor.num_deaths + len(dead))
    return with_component(state, Role.ACTOR, replace(component, state=actor))


def counted_anew(component: Component) -> Component:
    """The actor as an iteration opens. Ranks that it still lacks, or may come to lack, stay counted as deaths."""
    actor = component.state
    assert isinstance(actor, Working), f"an iteration opens while the actor is {actor.CASE}"
    num_lacking = actor.placed.layout.num_ranks - len(actor.grants)
    return replace(component, state=replace(actor, num_deaths=num_lacking + len(actor.gone)))


def _coming(state: ClusterState, role: Role) -> tuple[Grant, ...]:
    """Whom the open transition brings to the role."""
    transition = state.transition_of(role)
    moves = transition.moves if transition is not None else ()
    return tuple(Grant(move.gpu, move.token) for move in moves if move.target == state.owner(role))


def shrunk(component: Component, left: tuple[Grant, ...]) -> Component:
    """The component with only these of its grants. With none left, it is down."""
    if left and isinstance(component.state, Working):
        return replace(component, state=replace(component.state, grants=left))
    return replace(component, state=Down())


def lose_node(state: ClusterState, role: Role, node: NodeId, *, why: str) -> ClusterState:
    """The role's instance on the node is gone, and its workers with it."""
    if role is Role.ACTOR and state.phase not in OVER and node in _waited_for_on(state):
        # What its dead ranks left may be gone with it, and nobody could start them there.
        return restart_actor(state, why=why)
    transition = state.transition_of(role)
    coming = [Grant(move.gpu, move.token) for move in transition.moves if move.target] if transition else []
    held = [Grant(record.gpu, record.token) for record in state.records_of(role)]
    return lose(state, role, [grant for grant in (*held, *coming) if node_of(grant.gpu) == node], why=why)


def _waited_for_on(state: ClusterState) -> set[NodeId]:
    """The nodes that an actor needs which is suspended, lacks ranks, or has lost some in the open change."""
    component = state.components[Role.ACTOR]
    match component.state:
        case Working(placed=placed, gone=gone):
            gpus = [*(grant.gpu for grant in gone), *(placed.gpus if component.lacks_ranks else ())]
        case Suspended(placed=Placed(gpus=kept_on)):
            gpus = [*kept_on]
        case _:
            gpus = []
    return {node_of(gpu) for gpu in gpus}


def restart_actor(state: ClusterState, *, why: str) -> ClusterState:
    """A new incarnation from the last checkpoint, or the job's end when it had as many as it may."""
    allowed = state.spec.max_actor_restarts if state.spec else 0
    if state.num_restarts >= allowed:
        message = (
            f"{why}; the actor was restarted {state.num_restarts} times and runtime.max_actor_restarts={allowed}: "
            "see its logs, then resume"
        )
        stopping = stop(state, Phase.FAILED, message)
        return with_component(stopping, Role.ACTOR, shrunk(state.components[Role.ACTOR], ()))
    state = next_incarnation(state, incarnation=state.incarnation + 1)
    state = replace(state, num_restarts=state.num_restarts + 1)
    if state.phase is Phase.PAUSED:
        # Its message says what a person has to do before the job goes on.
        return state
    where = f"checkpoint {state.checkpoint.name}" if state.checkpoint else "the beginning: there is no checkpoint yet"
    message = f"{why}; restart {state.num_restarts} of {allowed}, from {where}"
    return replace(state, phase=Phase.STARTING, message=message)


def all_down(state: ClusterState) -> dict[Role, Component]:
    """Whoever holds a GPU from before works for no one: its grants are suspects, its transitions end."""
    return {
        role: Component(lead=component.lead, broken=tuple(each.id for each in (state.transition_of(role),) if each))
        for role, component in state.components.items()
    }


def next_incarnation(state: ClusterState, *, incarnation: int) -> ClusterState:
    """All unfinished work is superseded, the actor is down, and the next iteration is the checkpoint's."""
    checkpoint = state.checkpoint
    next_iteration = checkpoint.next_iteration if checkpoint else 0
    next_version = checkpoint.version if checkpoint else 0
    state = evaluations.superseded(supersede(state, next_iteration=next_iteration), next_version=next_version)
    actor = state.components[Role.ACTOR]
    transition = state.transition_of(Role.ACTOR)
    broken = (transition.id,) if transition else ()
    return replace(
        with_component(state, Role.ACTOR, Component(lead=actor.lead, broken=broken)),
        incarnation=incarnation,
        snapshots={},
        reference=None,
        next_iteration=next_iteration,
        next_version=next_version,
    )
