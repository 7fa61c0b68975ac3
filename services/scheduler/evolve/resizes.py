"""Changes of a component that works: a person asks for them, their lead brings them into force, or they fail.

The lead reports a new layout after the store has committed it. The report names the members as they were planned, dead
or alive. It comes before or after the report of a death. A change that a policy wants is made again after a pause.

Invariants:
- Of several resizes that a person asks for during another, the last one is made next.
  [test_layout_changes: the_last_word_counts]
- No resize is for a GPU that is no slot of the actor. [test_layout_changes: impossible_layout_is_refused]
- The actor's layout in the state changes only by its lead's report. [test_layout_changes: open_until_the_lead_switched]
- A person's resize that failed is not made again by itself and leaves the actor as it was.
  [test_layout_changes: cannot_be_prepared]
- Resizes alone cost no incarnation, no sample and no failed start. [test_scheduler: resizes_alone]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve.admission import Refused
from services.scheduler.evolve.losses import MAX_DEATHS, restart_actor
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState
from services.scheduler.state.components import Component, Down, Suspended, Working, role_of_instance
from services.scheduler.state.homes import home_spec, split_in_force
from services.scheduler.state.layouts import replica_size, with_dp
from services.scheduler.state.values import JobSpec, Placed
from tidegate.config.checks.layouts import replicas_fault
from tidegate.ownership.records import GpuRecord, GpuState, PartKind, PartState, Transition
from tidegate.types import Grant, Layout, Role


def fault(spec: JobSpec, placed: Placed) -> str | None:
    """Why the actor can never be on these GPUs, with the numbers and the remedy; None when it can.

    Whether its model fits the layout is the job's to say (`Job.layout_fault`): a job's spec has no model."""
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
            f"{layout.num_ranks} ranks on {len(gpus)} GPUs; {_remedy(spec, layout)}"
        )
    return replicas_fault(layout, num_samples=spec.num_samples_per_minibatch, num_shards=spec.num_logical_shards)


def _remedy(spec: JobSpec, layout: Layout) -> str:
    """What works for a layout whose ranks are not as many as its GPUs."""
    slots, size = spec.slots(Role.ACTOR), replica_size(layout)
    if layout.num_ranks <= len(slots):
        return f"name {layout.num_ranks} of {', '.join(slots)}"
    has = f"the actor has {len(slots)} slots ({', '.join(slots)})"
    legal = [dp for dp in range(1, len(slots) // size + 1) if _is_legal(spec, layout, dp)]
    if not legal:
        return f"{has}, and a copy takes tp * pp * cp = {size} of them; give smaller ones"
    return f"{has}; legal dp with tp * pp * cp = {size}: {', '.join(map(str, legal))}"


def _is_legal(spec: JobSpec, layout: Layout, dp: int) -> bool:
    copies = with_dp(layout, dp, num_shards=spec.num_logical_shards)
    return copies is not None and dp <= spec.num_samples_per_minibatch


def target(state: ClusterState, layout: Layout) -> Placed:
    """The layout on the GPUs that the actor has. Its last GPUs are left out, or its first free slots are added."""
    assert state.spec is not None, "a job without a config has no slots"
    have = [grant.gpu for grant in state.components[Role.ACTOR].grants if grant.gpu not in state.manual.drained]
    slots = home_spec(state, state.spec).slots(Role.ACTOR)
    free = [gpu for gpu in slots if gpu not in have and gpu in state.gpus and is_free(state.gpus[gpu])]
    return Placed(tuple([*have, *free][: layout.num_ranks]), layout)


def is_in_force(state: ClusterState, placed: Placed) -> bool:
    """Whether the actor works there with all its ranks, and no change of it is open."""
    actor = state.components[Role.ACTOR]
    is_there = isinstance(actor.state, Working) and actor.state.placed == placed
    return is_there and not actor.lacks_ranks and state.changing(Role.ACTOR) is None


def open_requests(state: ClusterState) -> tuple[Placed, ...]:
    """Where persons asked for the actor, for resizes that have not ended: the one under way, and the next one."""
    transition = state.resize()
    target = state.targets.get(transition.id) if transition is not None else None
    under_way = target.placed if target is not None and target.is_asked else None
    return tuple(dict.fromkeys(each for each in (under_way, state.asked, state.asked_next) if each is not None))


def requested(state: ClusterState, body: ev.ResizeRequested) -> ClusterState | Refused:
    if state.phase in OVER:
        return Refused("the job is ending")
    if state.spec is None or fault(home_spec(state, state.spec), body.placed) is not None:
        return Refused("asks for what the actor cannot be")
    return asked_for(state, body.placed)


def asked_for(state: ClusterState, placed: Placed) -> ClusterState:
    """The state after a person asked for the actor there: now, or after the change that is under way."""
    if state.changing(Role.ACTOR) is not None:
        return replace(state, asked_next=placed)
    return _wished(state, placed)


def _wished(state: ClusterState, placed: Placed | None) -> ClusterState:
    """The state after a person asked for the actor there. An actor that is there already is at home from now on."""
    actor = state.components[Role.ACTOR].state
    if placed is not None and isinstance(actor, Working) and actor.placed == placed:
        return replace(state, asked=None, moved=placed)
    return replace(state, asked=placed)


def failed(state: ClusterState, event: ev.Event, body: ev.ResizeFailed) -> ClusterState | Refused:
    """A change that failed before it was in force. It is closed, and the component goes on as it was."""
    role = role_of_instance(event.source)
    transition = state.changing(role) if role is not None else None
    if role is None or transition is None or event.transition_id != transition.id:
        return Refused("of a transition that is not open")
    component = state.components[role]
    is_in_force = transition.id == component.switched or transition.part(role).state is PartState.COMMITTED
    if transition.id in component.broken or is_in_force:
        return Refused("of a transition that is decided")
    component = replace(component, broken=(*component.broken, transition.id))
    if role is not Role.ACTOR:
        component = replace(component, last_failure=f"{event.source}: {body.message}")
    return state.with_component(role, component)


def switched(state: ClusterState, transition: Transition, body: ev.LayoutCommitted) -> ClusterState | Refused:
    """The actor works on these members in this layout, with its state. It lacks the members that died meanwhile."""
    component = state.components[Role.ACTOR]
    if component.switched == transition.id:
        return Refused("of a transition that is in force")
    if set(body.grants) != set(members_after(state, Role.ACTOR, transition)):
        return Refused("of other GPUs than planned")
    alive = tuple(grant for grant in body.grants if grant not in component.dead_members)
    if not alive:
        return restart_actor(state, why=f"all that {transition.id} brought the actor to died")
    state = state.with_component(Role.ACTOR, in_force(component, transition, body, alive))
    target = state.targets.get(transition.id)
    if target is None or not target.is_asked:
        # A policy's move counts for the iteration, a person's move from now on.
        return state
    # Avoid homes that share GPUs: the split counts whole, also where it was replaced or dropped meanwhile.
    return split_in_force(state, target.split) if target.split else replace(state, moved=_placed(body))


def in_force(
    component: Component, transition: Transition, body: ev.LayoutCommitted, alive: tuple[Grant, ...]
) -> Component:
    """The component in the layout that its lead committed. `alive`: the grants of its living members; without any it is
    down."""
    before, placed = component.state, _placed(body)
    after: Down | Working = Down()
    match before:
        case Working() if alive:
            after = replace(before, grants=alive, placed=placed)
        case Suspended() if alive:
            after = Working(alive, placed, num_deaths=before.num_deaths)
        case Down() if alive:
            after = Working(alive, placed)
    return _moved(component, after, transition)


def _placed(body: ev.LayoutCommitted) -> Placed:
    return Placed(tuple(grant.gpu for grant in body.grants), body.layout)


def _moved(component: Component, after: Down | Working | Suspended, transition: Transition) -> Component:
    return replace(
        component,
        state=after,
        switched=transition.id,
        num_failed_starts=0,
        num_failed_releases=0,
        last_failure="",
    )


def suspended(component: Component, transition: Transition) -> Component:
    """The component without GPUs. It goes on when it gets some, an actor with its state."""
    before = component.state
    after = Suspended() if isinstance(before, Down) else Suspended(before.placed, before.num_deaths)
    return _moved(component, after, transition)


def over(state: ClusterState, transition: Transition) -> ClusterState:
    """The state after a change of the actor was closed. An actor that lacks ranks goes on to the next change, which
    brings them back, where its lead has said how this one ended. Without its report nobody knows in which layout the
    ranks are."""
    actor, target = state.components[Role.ACTOR], state.targets.get(transition.id)
    is_explained = transition.id in (*actor.broken, actor.switched)
    is_in_force = actor.switched == transition.id
    ended, num_deaths = actor, 0
    if isinstance(actor.state, Working):
        num_more = 0 if is_in_force or actor.dead_members or not actor.lacks_ranks else 1
        num_deaths = actor.state.num_deaths + num_more
        ended = replace(actor, state=replace(actor.state, dead_members=(), num_deaths=num_deaths))
    # A person asks for resizes alone. A recovered state does not know the targets of transitions from before.
    is_resize = transition.part(Role.ACTOR).kind is PartKind.RESIZE
    was_asked = is_resize and (target is None or target.is_asked)
    if not (was_asked or is_in_force or actor.lacks_ranks):
        ended = replace(ended, num_failed_starts=ended.num_failed_starts + 1, last_failure="it was not done")
    asked = state.asked_next if was_asked else state.asked_next or state.asked
    state = _wished(replace(state.with_component(Role.ACTOR, ended), asked_next=None), asked)
    if not actor.lacks_ranks or state.phase in OVER or (is_explained and num_deaths <= MAX_DEATHS):
        return state
    return restart_actor(state, why=f"{transition.id} did not bring the actor's lost ranks back")


def forsaken(state: ClusterState) -> ClusterState:
    """The actor starts again where the ranks that were to come died with their node and the store has committed the
    resize all the same."""
    transition, actor = state.resize(), state.components[Role.ACTOR]
    if transition is None or transition.id not in actor.broken or not actor.is_up or state.phase in OVER:
        return state
    if transition.part(Role.ACTOR).state is not PartState.COMMITTED or actor.switched == transition.id:
        return state
    return restart_actor(state, why=f"{transition.id} was committed with GPUs that are lost")


def members_after(state: ClusterState, role: Role, transition: Transition) -> tuple[Grant, ...]:
    """The members as planned, sorted. An actor's include those that died meanwhile."""
    component = state.components[role]
    leaving, coming = state.moving(role, transition)
    return tuple(sorted({*component.grants, *component.dead_members, *coming} - set(leaving)))


def is_free(record: GpuRecord) -> bool:
    """Whether no component owns it and no transition holds it."""
    return record.state is GpuState.FREE and record.transition is None
