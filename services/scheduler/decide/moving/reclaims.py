"""How the job takes back GPUs that a component lost: it counts them as lost, asks their gate, clears them and reclaims
them. Pure.

Invariants:
- A GPU becomes free only when its holder or its gate has said that nobody holds it.
  [test_lost_gpus: not_taken_back_while_its_gate]
- A GPU whose last owner the store does not know is cleared by every component that is down, and becomes free only when
  its gate has said so. [test_lost_gpus: last_owner_the_store_has_lost]
"""

from __future__ import annotations

from services.scheduler.decide.needs import Needs, header, waiting
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from tidegate.ownership.records import GpuState, PartKind
from tidegate.types import CommandId, GpuId, Grant, Role, node_of


def reclaimed(state: ClusterState, role: Role, now_ms: int, *, gone: frozenset[GpuId] = frozenset()) -> Needs:
    """The next step of each suspect on its way back to the free pool. Within a transition that empties the component,
    it needs only its release; else the store counts it as lost first. `gone`: GPUs that the job goes on without."""
    needs = Needs()
    for grant in state.suspects(role):
        record = state.gpus[grant.gpu]
        key = f"{state.job}/{grant.gpu}/{grant.token}"
        if record.state is GpuState.OWNED and record.transition is None:
            lost = cmd.MarkLost(CommandId(f"{key}/lost"), grant.gpu, grant.token)
            needs += Needs((lost,), (f"counts {grant.gpu} of the {role} as lost",))
        elif grant not in state.released:
            # A job that goes on without the GPU asks its worker no more.
            is_asked = grant in state.held and grant.gpu not in gone and not _is_leaving(state, role, grant)
            holders = _possible_holders(state, role, grant) if is_asked else ()
            clears = sum((_cleared(state, holder, grant, now_ms) for holder in holders), Needs())
            is_needed = bool(clears.commands) or (grant.gpu not in gone and _lacks(state, role))
            needs += _asked_gate(state, role, grant, is_gone=grant.gpu in gone, is_needed=is_needed) + clears
        elif record.state is GpuState.LOST and record.transition is None:
            reclaim = cmd.Reclaim(CommandId(f"{key}/reclaim"), grant.gpu, grant.token)
            needs += Needs((reclaim,), (f"takes {grant.gpu} back, which nobody holds",))
    return needs


def _is_leaving(state: ClusterState, role: Role, grant: Grant) -> bool:
    """Whether an open resize takes the GPU away: the component's lead then has the worker stand down."""
    transition = state.transition_of(role)
    if transition is None or transition.part(role).kind is not PartKind.RESIZE:
        return False
    return grant in state.moving(role, transition)[0]


def _possible_holders(state: ClusterState, role: Role, grant: Grant) -> tuple[Role, ...]:
    """The component that counts the GPU as its own. Where the store has lost the owner, the worker may be of any
    component whose members are not known."""
    if state.gpus[grant.gpu].owner is not None:
        return (role,)
    return tuple(each for each in Role if each is role or not state.components[each].is_up)


def _cleared(state: ClusterState, role: Role, grant: Grant, now_ms: int) -> Needs:
    """One command for each GPU. Its id names the grant: the stored answer of an earlier grant must not answer it."""
    lead, component = state.lead_of(role), state.components[role]
    if lead is None:
        return Needs((), (f"{grant.gpu} is held by a living worker of the {role}, which has no lead to stop it",))
    node = node_of(grant.gpu)
    if not state.living(role=role, node=node):
        # The lead could not reach the worker: it knows only the instances that the command names.
        held = f"{grant.gpu} is held by a living worker of the {role}"
        return Needs((), (f"{held}, whose instance on {node} is not known to live",))
    step = f"{state.job}/{grant.gpu}/{grant.token}/clear"
    down = cmd.ScaleDown(
        header=header(state, role, lead, step=step, now_ms=now_ms),
        grants=(grant,),
        members=component.grants,
        layout=component.layout,
    )
    return Needs((down,), (f"clears {grant.gpu}, which a living worker of the {role} holds",))


def _lacks(state: ClusterState, role: Role) -> bool:
    """Whether the component cannot work without the GPUs that it lost."""
    component = state.components[role]
    return not component.is_up or (role is Role.ACTOR and component.lacks_ranks)


def _asked_gate(state: ClusterState, role: Role, grant: Grant, *, is_gone: bool, is_needed: bool) -> Needs:
    """A question that comes to be needed is a new one: its limit begins anew."""
    node = node_of(grant.gpu)
    endpoints = tuple(state.instances[name].endpoint for name in state.living(node=node))
    note = f"{grant.gpu} waits for its gate" + (", and the job goes on without it" if is_gone else "")
    if endpoints:
        key = CommandId(f"{state.job}/{grant.gpu}/{grant.token}/{'gate' if is_needed else 'look'}")
        return Needs((cmd.AskGate(key, node, grant, endpoints, is_needed),), (note,))
    if not is_gone and _lacks(state, role):
        what = f"an instance on {node}, whose gate must tell of lost GPUs"
        return waiting(state, role, f"gate-{node}", what=what, is_of_gpus=True)
    return Needs((), (f"{note}, which no living instance on {node} can ask",))
