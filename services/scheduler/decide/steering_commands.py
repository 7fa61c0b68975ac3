"""Gives the commands that carry out the policy's steering: whether the actor trains, and the prompts' order. Pure.

The state holds the last command that a lead took (`Steering`), so that a lead gets only changes.

Invariant: one command of each kind is under way at a time. It is repeated unchanged until the lead takes it, whatever
the policy chooses meanwhile: otherwise a lead that took the command before the last one would stay with it.
[test_steering_commands: under_way_is_repeated_unchanged]
"""

from __future__ import annotations

from services.scheduler.decide.needs import Needs, header, key_at
from services.scheduler.policy import Proposal
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Lead
from services.scheduler.state.course import Iteration
from tidegate.types import Role


def needed_steering_commands(state: ClusterState, proposal: Proposal, now_ms: int) -> Needs:
    """No command before a lead has opened the iteration, and none after it has reported its account."""
    iteration = state.iteration
    if iteration is None:
        return Needs()
    return _hold(state, iteration, proposal, now_ms) + _order(state, iteration, proposal, now_ms)


def _hold(state: ClusterState, iteration: Iteration, proposal: Proposal, now_ms: int) -> Needs:
    steering, lead = iteration.steering, _lead_at_work(state, iteration, Role.ACTOR)
    if lead is None:
        return Needs()
    step = f"{state.job}/{state.incarnation}/i{iteration.plan.iteration}/hold-{steering.num_holds}"
    if key_at(step, Role.ACTOR, lead) not in state.expectations and steering.is_held != proposal.trains:
        return Needs()
    holds = not steering.is_held
    head = header(state, Role.ACTOR, lead, step=step, now_ms=now_ms)
    command = cmd.HoldTraining(head, iteration.plan.iteration, holds)
    return Needs((command,), ("the actor begins no minibatch" if holds else "the actor may train on",))


def _order(state: ClusterState, iteration: Iteration, proposal: Proposal, now_ms: int) -> Needs:
    steering, lead = iteration.steering, _lead_at_work(state, iteration, Role.ROLLOUT)
    if lead is None:
        return Needs()
    if all(order in ((), steering.group_order) for order in (steering.asked_order, proposal.group_order)):
        return Needs()
    step = f"{state.job}/{state.incarnation}/i{iteration.plan.iteration}/order-{steering.num_orders}"
    head = header(state, Role.ROLLOUT, lead, step=step, now_ms=now_ms)
    # A policy may give its order once: a lead that has none yet gets the last one.
    chosen = proposal.group_order or (() if steering.group_order else steering.asked_order)
    groups = steering.asked_order if head.id in state.expectations else chosen
    if not groups or groups == steering.group_order:
        return Needs()
    command = cmd.OrderGroups(head, iteration.plan.iteration, groups)
    return Needs((command,), (f"orders {len(set(groups))} groups at the rollout",))


def _lead_at_work(state: ClusterState, iteration: Iteration, role: Role) -> Lead | None:
    lead = state.lead_of(role)
    has_taken = lead is not None and iteration.opened.get(role) == lead.epoch
    return lead if has_taken and role not in iteration.reports else None
