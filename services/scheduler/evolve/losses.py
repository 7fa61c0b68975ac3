"""Deaths: a component goes on with less, starts its world again, or the job takes a new incarnation.

- Rollout and inference: an engine or a copy lives and dies whole. The others go on. The component is down only when
  none is left; then it starts again under the same lead.
- Actor: it is one world that holds the training state. From the first iteration on, a rank's death leaves it impaired:
  its other ranks keep the state, and the lead's work (an update, a save, a publish) waits. `layout_changes` brings the
  rank back in the same incarnation. An iteration allows MAX_DEATHS deaths. Any other loss, or a failure of that,
  supersedes the incarnation. The next incarnation starts from the last checkpoint, at most `max_actor_restarts` times.

When a rank dies in a resize, nobody knows yet whether the store has committed the resize. The lead's report comes
before or after the report of the death and says in which layout the actor lacks the rank. Until then the dead ranks are
kept as `dead_members`.

Nothing here moves a GPU. A grant that leaves a component's `grants` is a suspect: `decide` has the store count its GPU
as lost, has the node's gate asked, and takes the GPU back when nobody holds it.

Invariants:
- The death of an engine leaves the others at work. [test_losses: a_rollout_engine_that_dies]
- The death of a rank of the inference costs its copy and no other. [test_losses: copy_of_the_inference_that_loses]
- The death of an actor's rank in an iteration costs no incarnation. [test_losses: dies_in_an_iteration_is_replaced]
- An iteration outlives MAX_DEATHS deaths and no more. [test_losses: an_iteration_outlives_max_deaths]
- A job restarts its actor at most `max_actor_restarts` times. [test_losses: dies_more_often_than_allowed]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.evolve import evaluations
from services.scheduler.evolve.accounts import supersede
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.components import Component, Suspended, Working
from services.scheduler.state.layouts import whole
from services.scheduler.state.values import Placed
from tidegate.ownership.records import Transition
from tidegate.types import Grant, NodeId, Role, node_of

MAX_FAILED_STARTS = 4
"""Starts of a component that may fail in a row. With the pauses between them they take 42 s, twice the default lease.
With fewer, an instance that is dead but still has its lease ends the job."""

MAX_FAILED_RELEASES = 4
"""Times that a component may fail in a row to give GPUs back. Its lead hangs then: each try has twice the deadline of a
command, 4 minutes by default. Without the limit a plan that needs the GPUs would be tried for ever."""

MAX_DEATHS = 3
"""Deaths of the actor's ranks from the opening of one iteration to the opening of the next. A resize that did not bring
lost ranks back counts as one where nobody is known to have died in it. A minibatch that kills its ranks must not be
tried for ever."""


def lose(
    state: ClusterState, role: Role, dead: Iterable[Grant], *, why: str, keeps_state: bool = False
) -> ClusterState:
    """The state after the holders of these grants died. Grants that the role neither works under nor acquires change
    nothing.

    `keeps_state`: only these processes died, and the memory of their node is there."""
    component = state.components[role]
    dead = set(dead)
    if role is Role.ACTOR and keeps_state and waits_for_ranks(state):
        return impaired(state, dead, why=why)
    transition = state.transition_of(role)
    if transition is not None and transition.id not in component.broken and _breaks(state, role, transition, dead):
        component = replace(component, broken=(*component.broken, transition.id), last_failure=why)
        state = state.with_component(role, component)
    if role is not Role.ACTOR and state.phase not in OVER:
        left = whole(component, dead)
    else:
        left = tuple(grant for grant in component.grants if grant not in dead)
    if len(left) == len(component.grants):
        return state
    if role is Role.ACTOR and state.phase not in OVER:
        return restart_actor(state, why=why)
    return state.with_component(role, component.with_grants(left))


def _breaks(state: ClusterState, role: Role, transition: Transition, dead: set[Grant]) -> bool:
    """Whether the transition cannot succeed any more: a rank that was to come died, or all engines or copies that were
    to stay."""
    component = state.components[role]
    if dead & set(_coming(state, role)):
        return True
    if role is Role.ACTOR or not transition.part(role).kind.works_after or not dead.intersection(component.grants):
        return False
    leaving, coming = state.moving(role, transition)
    return not set(whole(component, dead)) - set(leaving) and not coming


def waits_for_ranks(state: ClusterState) -> bool:
    """Whether the actor goes on after another death: its lead asks again for the work that a death breaks off. An actor
    that starts does not; its start ends when the first iteration opens."""
    actor, transition = state.components[Role.ACTOR].state, state.transition_of(Role.ACTOR)
    is_started = state.phase is Phase.RUNNING and transition in (None, state.changing(Role.ACTOR))
    return is_started and isinstance(actor, Working) and actor.num_deaths < MAX_DEATHS


def impaired(state: ClusterState, dead: Iterable[Grant], *, why: str) -> ClusterState:
    """The actor's other ranks hold the state. Incarnation and iteration stay. Its layout stays too, unless the store
    has committed a resize: then the actor becomes impaired in the new layout."""
    component, transition = state.components[Role.ACTOR], state.changing(Role.ACTOR)
    actor = component.state
    assert isinstance(actor, Working), f"an actor that is {actor.CASE} has no ranks"
    is_switching = transition is not None and component.switched != transition.id
    members = {*actor.grants, *(_coming(state, Role.ACTOR) if is_switching else ())}
    newly_dead = members.intersection(dead).difference(actor.dead_members)
    if not newly_dead:
        return state
    left = tuple(grant for grant in actor.grants if grant not in newly_dead)
    if not left:
        return restart_actor(state, why=why)
    known = tuple(sorted({*actor.dead_members, *newly_dead})) if is_switching else actor.dead_members
    actor = replace(actor, grants=left, dead_members=known, num_deaths=actor.num_deaths + len(newly_dead))
    return state.with_component(Role.ACTOR, replace(component, state=actor))


def _coming(state: ClusterState, role: Role) -> tuple[Grant, ...]:
    """The grants that the open transition brings to the role."""
    transition = state.transition_of(role)
    moves = transition.moves if transition is not None else ()
    return tuple(Grant(move.gpu, move.token) for move in moves if move.target == state.owner(role))


def lose_node(state: ClusterState, role: Role, node: NodeId, *, why: str) -> ClusterState:
    """The state after the role's instance on the node died, and its workers with it."""
    if role is Role.ACTOR and state.phase not in OVER and node in _waited_for_on(state):
        # The state of its dead ranks may be lost with the node, and no instance could start them there.
        return restart_actor(state, why=why)
    transition = state.transition_of(role)
    coming = [Grant(move.gpu, move.token) for move in transition.moves if move.target] if transition else []
    held = [Grant(record.gpu, record.token) for record in state.records_of(role)]
    return lose(state, role, [grant for grant in (*held, *coming) if node_of(grant.gpu) == node], why=why)


def _waited_for_on(state: ClusterState) -> set[NodeId]:
    """The nodes that the actor needs while it is suspended, lacks ranks, or has lost some in the open change."""
    component = state.components[Role.ACTOR]
    match component.state:
        case Working(placed=placed, dead_members=dead):
            gpus = [*(grant.gpu for grant in dead), *(placed.gpus if component.lacks_ranks else ())]
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
        stopping = state.stopping(Phase.FAILED, message)
        return stopping.with_component(Role.ACTOR, state.components[Role.ACTOR].with_grants(()))
    state = next_incarnation(state, incarnation=state.incarnation + 1)
    state = replace(state, num_restarts=state.num_restarts + 1)
    if state.phase is Phase.PAUSED:
        # The job's message says what a person has to do before it goes on.
        return state
    message = f"{why}; restart {state.num_restarts} of {allowed}, from {restart_point(state)}"
    return replace(state, phase=Phase.STARTING, message=message)


def restart_point(state: ClusterState) -> str:
    """Where the next incarnation begins, for people."""
    return f"checkpoint {state.checkpoint.name}" if state.checkpoint else "the beginning: there is no checkpoint yet"


def all_down(state: ClusterState) -> dict[Role, Component]:
    """All components, down. A worker that holds a GPU from before works for none of them: its grant is a suspect, and
    open transitions end."""
    return {
        role: Component(lead=component.lead, broken=tuple(each.id for each in (state.transition_of(role),) if each))
        for role, component in state.components.items()
    }


def next_incarnation(state: ClusterState, *, incarnation: int) -> ClusterState:
    """Supersede all unfinished work. The actor is down, and the next iteration is the checkpoint's."""
    checkpoint = state.checkpoint
    next_iteration = checkpoint.next_iteration if checkpoint else 0
    next_version = checkpoint.version if checkpoint else 0
    known_until = next_iteration if checkpoint is None or checkpoint.known_until is None else checkpoint.known_until
    state = supersede(state, next_iteration=min(known_until, next_iteration))
    state = evaluations.superseded(state, next_version=next_version)
    actor = state.components[Role.ACTOR]
    transition = state.transition_of(Role.ACTOR)
    broken = (transition.id,) if transition else ()
    return replace(
        state.with_component(Role.ACTOR, Component(lead=actor.lead, broken=broken)),
        incarnation=incarnation,
        snapshots={},
        reference=None,
        next_iteration=next_iteration,
        next_version=next_version,
    )
