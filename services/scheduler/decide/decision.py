"""`decide(state, now_ms)`: what to ask for now, and why. Pure: no clock, no I/O, no memory but the state.

Order: where GPUs should be (the policy), what moving them needs, what the iteration needs; of all that, what was not
asked already. The shell then writes `after_decision(...)` by compare-and-set, and issues the commands in order.

Invariants:
- the same state and time give the same decision, byte for byte;
- every decision has a reason with its numbers, to do nothing included; the time is not in it, so that it changes only
  when what it tells of changes;
- what is given up ends the job with the words of what was given up; while the job ends already, it ends it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.scheduler.decide.expectations import due, issued
from services.scheduler.decide.iterating import wanted_iteration
from services.scheduler.decide.moving.moves import wanted_moves
from services.scheduler.decide.proposing import proposal_of
from services.scheduler.decide.steering import wanted_steering
from services.scheduler.decide.wanted import Wanted
from services.scheduler.evolve.absences import noted
from services.scheduler.policy import Policy, Proposal
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import TERMINAL, ClusterState, Phase
from services.scheduler.state.remembered import Remembered
from tidegate.types import CommandId, Role


@dataclass(frozen=True, slots=True)
class Decision:
    """Commands in the order to issue them; `waiting` are keys of what was asked before and is still wanted;
    `remembered` is the policy's, `ask_at_ms` when it wants to be asked again, should nothing happen before."""

    commands: tuple[cmd.Command, ...]
    waiting: tuple[str, ...]
    reason: str
    remembered: Remembered
    ask_at_ms: int | None = None


def decide(state: ClusterState, now_ms: int, *, policy: Policy) -> Decision:
    state = noted(state, now_ms)
    proposed = proposal_of(state, policy, now_ms)
    decision = decided(state, proposed.proposal, now_ms)
    return replace(decision, remembered=proposed.remembered, ask_at_ms=proposed.ask_at_ms)


def after_decision(state: ClusterState, decision: Decision, now_ms: int) -> ClusterState:
    """The state that says what was decided, and what GPUs it found absent; structural changes are none but the job's
    own end."""
    after = issued(state, decision.commands, decision.waiting, now_ms)
    return noted(replace(after, remembered=decision.remembered, ask_at_ms=decision.ask_at_ms), now_ms)


def decided(state: ClusterState, proposal: Proposal, now_ms: int) -> Decision:
    """What a proposal leads to."""
    if state.phase in TERMINAL:
        return Decision((), (), f"{state.phase}: {state.message}", state.remembered)
    if state.phase is Phase.STOPPING and _is_all_given_back(state):
        return _finished(state, state.message)
    if state.spec is None:
        waits = f"waits for the job to be submitted ({len(state.instances)} instances joined)"
        return Decision((), (), waits, state.remembered)
    wanted = wanted_moves(state, proposal, now_ms)
    if state.phase is not Phase.STOPPING:
        wanted += wanted_iteration(state, now_ms) + wanted_steering(state, proposal, now_ms)
    now_due = due(state, wanted.commands, now_ms)
    failures = (*((wanted.failure,) if wanted.failure else ()), *now_due.given_up)
    if failures:
        return _given_up(state, "; ".join(failures))
    reason = _reason(state, proposal.reason, wanted, now_due.waiting)
    return Decision(now_due.commands, now_due.waiting, reason, state.remembered)


def _is_all_given_back(state: ClusterState) -> bool:
    return not state.transitions and not any(state.records_of(role) for role in Role)


def _finished(state: ClusterState, message: str) -> Decision:
    phase = state.outcome or Phase.FAILED
    finish = cmd.FinishJob(CommandId(f"{state.job}/{state.incarnation}/finish"), phase, message)
    return Decision((finish,), (), f"{phase}: {message}", state.remembered)


def _given_up(state: ClusterState, failure: str) -> Decision:
    if state.phase is not Phase.STOPPING:
        stop = cmd.StopJob(CommandId(f"{state.job}/{state.incarnation}/stop"), Phase.FAILED, failure)
        return Decision((stop,), (), f"the job fails: {failure}", state.remembered)
    kept = sorted(record.gpu for role in Role for record in state.records_of(role))
    left = f"; {len(kept)} GPUs were not given back ({', '.join(kept)})" if kept else ""
    return _finished(state, f"{state.message}; {failure}{left}")


def _reason(state: ClusterState, proposed: str, wanted: Wanted, waiting: tuple[str, ...]) -> str:
    num_iterations = state.spec.num_iterations if state.spec else 0
    head = (
        f"{state.phase}, incarnation {state.incarnation}, iteration {state.next_iteration} of {num_iterations}, "
        f"version {state.target_version}; {proposed}"
    )
    notes = "; ".join(dict.fromkeys(wanted.notes)) or "nothing to do"
    return f"{head}; {notes}; {len(waiting)} commands not yet observed"
