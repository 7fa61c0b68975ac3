"""Members of the components: instances that start, start again and go, leads that are elected, workers that fail.

Invariants:
- A lead's `epoch` and an instance's `boot` only grow. [test_invariants: breaks_an_invariant]
- A new boot of an instance is the death of its boot before, whichever event shows it first.
  [test_fold: shows_the_death_of_the_start_before]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve.admission import NOT_OF_LEAD, Refused, is_of_lead, is_stale, of_other_incarnation
from services.scheduler.evolve.losses import lose, lose_node, restart_actor
from services.scheduler.evolve.pictures import with_new_lead
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.components import Instance, Lead, Working, node_of_instance, role_of_instance
from tidegate.types import InstanceId, Role


def meet(state: ClusterState, event: ev.Event) -> ClusterState:
    """An event of a newer start of an instance shows that the one before is dead."""
    if role_of_instance(event.source) is None:
        return state
    return _started(state, InstanceId(event.source), boot=event.boot)


def _started(state: ClusterState, name: InstanceId, *, boot: int) -> ClusterState:
    known = state.instances.get(name)
    if known is not None and boot <= known.boot:
        return state
    role = role_of_instance(name)
    assert role is not None, f"{name} names no role"
    if known is not None:
        state = lose_node(state, role, node_of_instance(name), why=f"{name} died and started again (boot {boot})")
    return _with_instance(state, name, Instance(endpoint="", boot=boot, living=True))


def _with_instance(state: ClusterState, name: InstanceId, instance: Instance) -> ClusterState:
    return replace(state, instances=dict(sorted({**state.instances, name: instance}.items())))


def joined(state: ClusterState, body: ev.InstanceJoined) -> ClusterState | Refused:
    if role_of_instance(body.instance) is None:
        return Refused("names no instance")
    state = _started(state, body.instance, boot=body.boot)
    if body.boot < state.instances[body.instance].boot:
        return Refused("of an older start of its source")
    joining = Instance(endpoint=body.endpoint, boot=body.boot, living=True, gates=body.gates)
    return _with_instance(state, body.instance, joining)


def lost(state: ClusterState, event: ev.Event, body: ev.InstanceLost) -> ClusterState | Refused:
    known, role = state.instances.get(body.instance), role_of_instance(body.instance)
    if known is None or role is None:
        return Refused("names no instance")
    if body.boot != known.boot or not known.living:
        return Refused("of an older start of its source")
    state = _with_instance(state, body.instance, replace(known, living=False))
    how = "left" if event.source == body.instance else "did not renew its lease"
    return lose_node(state, role, node_of_instance(body.instance), why=f"{body.instance} {how}")


def elected(state: ClusterState, event: ev.Event, body: ev.LeadElected) -> ClusterState | Refused:
    role = role_of_instance(body.instance)
    if role is None:
        return Refused("names no instance")
    component = state.components[role]
    if component.lead is not None and body.epoch <= component.lead.epoch:
        return Refused("of an older lead epoch")
    known = state.instances.get(body.instance)
    boot = event.boot if event.source == body.instance else (known.boot if known else 0)
    if known is not None and boot < known.boot:
        return Refused("of an older start of its source")
    lead = Lead(instance=body.instance, endpoint=body.endpoint, epoch=body.epoch, boot=boot)
    gates = known.gates if known else ()
    leading = Instance(endpoint=body.endpoint, boot=boot, living=True, gates=gates)
    state = _with_instance(state, body.instance, leading)
    led = replace(component, lead=lead)
    if isinstance(led.state, Working):
        # A lead speaks for itself alone: the new one has confirmed no weights yet.
        led = replace(led, state=replace(led.state, loaded=None, has_reference=False))
    state = state.with_component(role, led)
    mark = (event.boot, event.sequence) if event.source == body.instance else (boot, 0)
    state = replace(state, seen=with_new_lead(state.seen, role, mark))
    if role is Role.ACTOR and (component.is_up or component.is_suspended) and state.phase not in OVER:
        return restart_actor(state, why=f"the actor's lead changed to {body.instance} (epoch {body.epoch})")
    return state


def failed(state: ClusterState, event: ev.Event, body: ev.Failed) -> ClusterState | Refused:
    """An instance reports the death of its own workers. Only the component's present lead reports that the component
    failed or that the job cannot go on."""
    role = role_of_instance(event.source)
    if role is None or body.what is ev.FailedWhat.SAMPLE:
        return Refused("failed without a component")
    if body.fatal or body.what is ev.FailedWhat.COMPONENT:
        if event.incarnation != state.incarnation:
            return of_other_incarnation(state, event)
        if not is_of_lead(state, event):
            return Refused(NOT_OF_LEAD)
    if body.fatal:
        if state.phase in OVER:
            return Refused("the job is ending")
        return state.stopping(Phase.FAILED, f"{event.source}: {body.message}")
    # A report about GPUs that are still to come names their grants. Without grants it is about those at work.
    dead = body.grants or (state.components[role].grants if body.what is ev.FailedWhat.COMPONENT else ())
    if role is Role.ACTOR and not dead and state.components[role].is_suspended and state.phase not in OVER:
        return restart_actor(state, why=f"{event.source}, which was suspended: {body.message}")
    current = tuple(grant for grant in dead if not is_stale(state, grant))
    if not current:
        return Refused("under old tokens")
    exit_text = f" (exit status {body.exit_status})" if body.exit_status else ""
    is_death = body.what is ev.FailedWhat.WORKER
    return lose(state, role, current, why=f"{event.source}: {body.message}{exit_text}", keeps_state=is_death)
