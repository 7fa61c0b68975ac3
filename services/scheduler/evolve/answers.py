"""Folds a lead's answer to a command into the expectations: the lead accepted the command or refused it. Pure.

Invariant: an answer to an attempt that the scheduler does not wait for changes nothing.
[test_fold: refused_changes_only_the_count]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.course import AcceptedEvaluation
from services.scheduler.state.issued import Expectation, Kind
from tidegate.types import Role

MAX_REFUSALS = 5
"""A lead refuses while it is not ready, as in its own election or while an instance joins. The pause below doubles, so
five refusals take half a minute."""

REFUSED_PAUSE_MS = 1_000
FALLBACK_DEADLINE_MS = 120_000
"""The deadline for a job that ends before its config was read. It is the config's own default."""


def answered(state: ClusterState, body: ev.CommandAnswered) -> ClusterState | None:
    """The state after the answer. None if the scheduler does not wait for the command.

    - Open, close, evaluation, hold, order: the acceptance is the effect.
    - Scale and load: the acceptance extends the deadline, and events show the effect.
    - A refused command is issued again after a pause.
    """
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
    """The id of the last attempt, or of the next one after a refusal."""
    return f"{known.key}/a{known.num_issued if known.kind is Kind.GATE else known.num_refused}"


def _accepted(state: ClusterState, known: Expectation) -> ClusterState:
    if known.kind is Kind.LEAD:
        due_ms = known.issued_ms + command_deadline_ms(state)
        return _expecting(state, replace(known, is_accepted=True, due_ms=due_ms))
    if known.kind is Kind.EVALUATE:
        is_current = f"/v{state.target_version}/" in known.key
        accepted = AcceptedEvaluation(state.target_version, state.incarnation, known.epoch)
        return replace(state, evaluating=accepted) if is_current else state
    iteration = state.iteration
    if iteration is None or known.role is None or f"/i{iteration.plan.iteration}/" not in known.key:
        return state
    steering = iteration.steering
    if known.kind is Kind.OPEN:
        opened = {**iteration.opened, known.role: known.epoch}
        if known.role is Role.ROLLOUT:
            # A new lead has no order yet.
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
