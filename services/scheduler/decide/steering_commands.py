"""How the open iteration is to go on, as the policy has it: whether the actor trains, and the prompts' order. Pure.

What a lead took last is in the state (`Steering`), so that it is told a change and nothing else. Invariant: one word of
each kind is under way at a time, and it is asked again as it was until it is taken, whatever the policy says meanwhile:
else a lead that took the one before the last would be left with it.
"""

from __future__ import annotations

from services.scheduler.decide.wanted import Wanted, header
from services.scheduler.policy import Proposal
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Lead
from services.scheduler.state.course import Iteration
from tidegate.types import Role


def wanted_steering(state: ClusterState, proposal: Proposal, now_ms: int) -> Wanted:
    """Nothing before a lead took the iteration, nor once its account is in."""
    iteration = state.iteration
    if iteration is None:
        return Wanted()
    return _held(state, iteration, proposal, now_ms) + _ordered(state, iteration, proposal, now_ms)


def _held(state: ClusterState, iteration: Iteration, proposal: Proposal, now_ms: int) -> Wanted:
    steering, lead = iteration.steering, _at_work(state, iteration, Role.ACTOR)
    if lead is None:
        return Wanted()
    step = f"{state.job}/{state.incarnation}/i{iteration.plan.iteration}/hold-{steering.num_holds}"
    head = header(state, Role.ACTOR, lead, step=step, now_ms=now_ms)
    if head.id not in state.expectations and steering.is_held != proposal.trains:
        return Wanted()
    holds = not steering.is_held
    command = cmd.HoldTraining(head, iteration.plan.iteration, holds)
    return Wanted((command,), ("the actor begins no minibatch" if holds else "the actor may train on",))


def _ordered(state: ClusterState, iteration: Iteration, proposal: Proposal, now_ms: int) -> Wanted:
    steering, lead = iteration.steering, _at_work(state, iteration, Role.ROLLOUT)
    if lead is None:
        return Wanted()
    if all(order in ((), steering.group_order) for order in (steering.asked_order, proposal.group_order)):
        return Wanted()
    step = f"{state.job}/{state.incarnation}/i{iteration.plan.iteration}/order-{steering.num_orders}"
    head = header(state, Role.ROLLOUT, lead, step=step, now_ms=now_ms)
    groups = steering.asked_order if head.id in state.expectations else proposal.group_order
    if not groups or groups == steering.group_order:
        return Wanted()
    command = cmd.OrderGroups(head, iteration.plan.iteration, groups)
    return Wanted((command,), (f"orders {len(groups)} groups at the rollout",))


def _at_work(state: ClusterState, iteration: Iteration, role: Role) -> Lead | None:
    lead = state.lead_of(role)
    has_taken = lead is not None and iteration.opened.get(role) == lead.epoch
    return lead if has_taken and role not in iteration.reports else None
