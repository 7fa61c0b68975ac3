"""The next commands that move GPUs: they begin, continue and end transitions, and take lost GPUs back. Pure.

A transition moves GPUs of one component: from the free pool to it, from it to the free pool, or both, for an actor that
changes while it works. A GPU goes from one component to another by two transitions. The second one is planned as soon
as the store says that the GPU is free.

Each step follows from the store's record and the components' reports, never from earlier commands. The `kind` of a
transition's part says which steps it takes: those in `starts`, `releases` or `layout_changes`. An open transition goes
where it was planned to go, whatever the policy proposes meanwhile. Past its deadline it goes no further; the same
three modules say when that ends the job and when it leaves the component as it was.

Steps that follow in the store alone are commanded together, as if those before were done: a GPU is released, its
transition is committed and closed in one turn. The store refuses a step whose predecessor did not happen. A component
is asked in a later turn, which has seen the store's record.

A component gets lost GPUs back in these steps:
1. The store counts them as lost.
2. The scheduler asks the node's gate.
3. The component's lead stops a worker that still holds one.
4. A GPU that nobody holds is reclaimed.
5. A new start takes it again.
A start of a component takes these steps with all its GPUs. A rollout or an inference that works on, and an actor past
its start, take them with the lost GPUs alone.

Invariants:
- A component has at most one open transition; several components may have one each.
  [test_moving: one_of_each_role]
- Whatever goes wrong, each GPU comes to the component that it is proposed for. [test_moves: whatever_goes_wrong]
- The same history and proposals give the same commands. [test_moves: the_same_history_and_proposals]
- Steps are commanded together only where the rules of the store allow each after the one before.
  [test_moving: only_steps_that_the_store_allows]
"""

from __future__ import annotations

from services.scheduler.decide.moving.layout_changes import changed, planned_resize
from services.scheduler.decide.moving.reclaims import reclaimed
from services.scheduler.decide.moving.releases import emptied, planned_release, planned_stop
from services.scheduler.decide.moving.starts import planned_start, started
from services.scheduler.decide.moving.steps import close, foreseen
from services.scheduler.decide.needs import Needs
from services.scheduler.policy import Proposal
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState, Phase
from tidegate.ownership.records import GpuState, PartKind, PartState, Transition
from tidegate.types import Role


def needed_moves(state: ClusterState, proposal: Proposal, now_ms: int) -> Needs:
    """Commands for all components, in role order. At most one of them plans a transition."""
    needs = Needs()
    for role in Role:
        transition = state.transition_of(role)
        if transition is not None:
            needs += _followed(state, role, _continued(state, role, transition, now_ms), now_ms)
        needs += reclaimed(state, role, now_ms, gone=proposal.gone)
    plans = [(role, plan) for role in Role if (plan := _planned(state, role, proposal, now_ms)) is not None]
    begun = False
    for role, plan in plans:
        # The next id depends on the store's last transition, so the others wait until this one is observed.
        is_plan = any(isinstance(command, cmd.PlanTransition) for command in plan.commands)
        if not (is_plan and begun):
            needs += _followed(state, role, plan, now_ms)
        begun = begun or is_plan
    return needs


def _followed(state: ClusterState, role: Role, needs: Needs, now_ms: int) -> Needs:
    """The steps with those after them that need nobody but the store."""
    after = foreseen(state, needs.commands)
    transition = None if after is None else after.transition_of(role)
    if after is None or transition is None:
        return needs
    following = _continued(after, role, transition, now_ms)
    is_of_store = following.commands and all(isinstance(each, cmd.StoreCommand) for each in following.commands)
    return needs + _followed(after, role, following, now_ms) if is_of_store else needs


def _continued(state: ClusterState, role: Role, transition: Transition, now_ms: int) -> Needs:
    if _is_hopeless(state, role, transition):
        return close(transition)
    part = transition.part(role)
    if part.kind is PartKind.RESIZE:
        return changed(state, role, transition, now_ms)
    if part.state is PartState.COMMITTED:
        return close(transition)
    if part.kind.works_after:
        return started(state, role, transition, now_ms)
    return emptied(state, role, transition, now_ms)


def _is_hopeless(state: ClusterState, role: Role, transition: Transition) -> bool:
    part = transition.part(role)
    lost = any(state.gpus[move.gpu].state is GpuState.LOST for move in transition.moves if move.gpu in state.gpus)
    return (
        lost
        or transition.id in state.components[role].broken
        or (part.kind.works_after and state.phase is Phase.STOPPING)
    )


def _planned(state: ClusterState, role: Role, proposal: Proposal, now_ms: int) -> Needs | None:
    """The plan of the role's next transition; None when it has an open one or needs none."""
    if state.transition_of(role) is not None:
        return None
    if state.phase is Phase.STOPPING:
        return planned_stop(state, role, now_ms)
    if role not in proposal.placement:
        return None
    placed, component = proposal.placement[role], state.components[role]
    if not component.is_up:
        return planned_start(state, role, placed, now_ms) if placed is not None else None
    if placed is None:
        return planned_release(state, role, None, now_ms)
    if role is Role.ACTOR:
        return planned_resize(state, placed, now_ms, gone=proposal.gone)
    return planned_release(state, role, placed, now_ms) or planned_start(state, role, placed, now_ms)
