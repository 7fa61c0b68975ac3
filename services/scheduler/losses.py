"""What a death changes: a component goes on with less, starts its world again, or the job takes a new incarnation.

- rollout: an engine is a GPU of its own; the others go on, the component is down only when none is left;
- inference: one world of ranks; losing one loses all, and they are started again under the same lead;
- actor: one world that holds the training state. While an iteration trains, a rank's death leaves it impaired: its
  other ranks keep the state, and `resizing` brings it back to where it was, in the same incarnation, at most
  MAX_DEATHS times an iteration. Whatever else it loses, or where that fails, supersedes the incarnation, and the next
  one starts from the last checkpoint, at most `max_actor_restarts` times.

Nothing here moves a GPU. A grant that leaves a component's `grants` is a suspect: `decide` has the store count its GPU
as lost, the node's gate asked, and the GPU taken back when nobody holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.accounts import supersede
from services.scheduler.state import TERMINAL, ClusterState, Component, Phase
from tidegate.types import Grant, NodeId, Role, node_of

OVER = TERMINAL | {Phase.STOPPING}
MAX_DEATHS = 3
"""Of the actor's ranks in one iteration: a minibatch that kills whoever trains it must not be tried for ever."""


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
    transition = state.transition_of(role)
    if transition is not None and transition.id not in component.broken:
        coming = {Grant(move.gpu, move.token) for move in transition.moves if move.target == state.owner(role)}
        if coming & gone:
            component = replace(component, broken=(*component.broken, transition.id))
            state = with_component(state, role, component)
    left = tuple(grant for grant in component.grants if grant not in gone)
    if len(left) == len(component.grants):
        return state
    if state.phase in OVER or (role is Role.ROLLOUT and left):
        return with_component(state, role, shrunk(component, left))
    if role is Role.ACTOR:
        return impaired(state, left) if keeps_state and left and _waits(state) else restart_actor(state, why=why)
    return with_component(state, role, shrunk(component, ()))


def _waits(state: ClusterState) -> bool:
    """Whether the actor's lead waits for its ranks: it is in an iteration, and in no resize, which a death breaks."""
    iteration = state.iteration
    if state.phase is not Phase.RUNNING or iteration is None or iteration.is_accounted:
        return False
    return iteration.num_deaths < MAX_DEATHS and state.transition_of(Role.ACTOR) is None


def impaired(state: ClusterState, left: tuple[Grant, ...]) -> ClusterState:
    """The actor's other ranks hold the state; its layout, its incarnation and the iteration stay."""
    assert state.iteration is not None, "an actor waits for its ranks in an iteration"
    component = state.components[Role.ACTOR]
    num_deaths = state.iteration.num_deaths + len(component.grants) - len(left)
    iteration = replace(state.iteration, num_deaths=num_deaths)
    state = with_component(state, Role.ACTOR, replace(component, grants=left))
    return replace(state, iteration=iteration)


def shrunk(component: Component, left: tuple[Grant, ...]) -> Component:
    """With nothing left, it is down and holds no weights."""
    if left:
        return replace(component, grants=left)
    return replace(component, grants=(), layout=None, loaded=None, has_reference=False)


def lose_node(state: ClusterState, role: Role, node: NodeId, *, why: str) -> ClusterState:
    """The role's instance on the node is gone, and its workers with it."""
    transition = state.transition_of(role)
    coming = [Grant(move.gpu, move.token) for move in transition.moves if move.target] if transition else []
    held = [Grant(record.gpu, record.token) for record in state.records_of(role)]
    home = state.home(role)
    if (
        role is Role.ACTOR
        and state.phase not in OVER
        and state.components[role].lacks_ranks
        and home is not None
        and node in {node_of(gpu) for gpu in home.gpus}
    ):
        # What its dead ranks left may be gone with it, and nobody could start them there.
        return restart_actor(state, why=why)
    return lose(state, role, [grant for grant in (*held, *coming) if node_of(grant.gpu) == node], why=why)


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
    state = supersede(state, next_iteration=next_iteration)
    actor = state.components[Role.ACTOR]
    transition = state.transition_of(Role.ACTOR)
    broken = (transition.id,) if transition else ()
    return replace(
        with_component(state, Role.ACTOR, Component(lead=actor.lead, broken=broken)),
        incarnation=incarnation,
        snapshots={},
        reference=None,
        next_iteration=next_iteration,
        next_version=checkpoint.version if checkpoint else 0,
    )
