"""What a lead's answer to a command changes in what is expected: taken, refused, or done with. Pure.

Invariant: an answer to an attempt that is not waited for changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.course import Evaluating
from services.scheduler.state.issued import Expectation, Kind
from tidegate.types import Role

MAX_REFUSALS = 5
"""A lead refuses while it is not ready (its own election, an instance that joins); with the doubling pause below, five
refusals are half a minute."""

REFUSED_PAUSE_MS = 1_000
FALLBACK_DEADLINE_MS = 120_000
"""When the job ends before its config was read; the config's own default."""


def answered(state: ClusterState, body: ev.CommandAnswered) -> ClusterState | None:
    """An accepted open, close, evaluation, hold or order is done with; an accepted scale or load shows by its events; a
    refused command is tried again after a pause. None when the command is not waited for."""
    for known in state.expectations.values():
        if attempt_id(known) != body.command_id:
            continue
        if not body.accepted:
            pause_ms = REFUSED_PAUSE_MS * 2 ** min(known.num_refused, MAX_REFUSALS)
            refused = replace(
                known, num_refused=known.num_refused + 1, refusal=body.message, due_ms=known.issued_ms + pause_ms
            )
            return _expecting(state, refused)
        return _accepted(state, known)
    return None


def _expecting(state: ClusterState, expectation: Expectation) -> ClusterState:
    return replace(state, expectations={**state.expectations, expectation.key: expectation})


def attempt_id(known: Expectation) -> str:
    """Of the attempt that was issued last, or is to come after a refusal."""
    return f"{known.key}/a{known.num_issued if known.kind is Kind.GATE else known.num_refused}"


def _accepted(state: ClusterState, known: Expectation) -> ClusterState:
    if known.kind is Kind.LEAD:
        due_ms = known.issued_ms + command_deadline_ms(state)
        return _expecting(state, replace(known, is_accepted=True, due_ms=due_ms))
    if known.kind is Kind.EVALUATE:
        is_still = f"/v{state.target_version}/" in known.key
        taken = Evaluating(state.target_version, state.incarnation, known.epoch)
        return replace(state, evaluating=taken) if is_still else state
    iteration = state.iteration
    if iteration is None or known.role is None or f"/i{iteration.plan.iteration}/" not in known.key:
        return state
    steering = iteration.steering
    if known.kind is Kind.OPEN:
        opened = {**iteration.opened, known.role: known.epoch}
        if known.role is Role.ROLLOUT:
            # A new lead knows no order.
            steering = replace(steering, group_order=())
        iteration = replace(iteration, opened={role: opened[role] for role in Role if role in opened})
    elif known.kind is Kind.HOLD:
        steering = replace(steering, is_held=not steering.is_held, num_holds=steering.num_holds + 1)
    elif known.kind is Kind.ORDER:
        steering = replace(steering, group_order=steering.asked_order, num_orders=steering.num_orders + 1)
    elif known.kind is Kind.CLOSE and known.role not in iteration.closed:
        closed = {*iteration.closed, known.role}
        iteration = replace(iteration, closed=tuple(role for role in Role if role in closed))
    return replace(state, iteration=replace(iteration, steering=steering))


def command_deadline_ms(state: ClusterState) -> int:
    return state.spec.command_deadline_ms if state.spec else FALLBACK_DEADLINE_MS
