"""`decide(state, now_ms)`: what to ask for now, and why. Pure: no clock, no I/O, no memory but the state.

1. The policy proposes where GPUs should be.
2. `moving` says what that needs, `iteration_commands` and `steering_commands` what the open iteration needs.
3. `expectations` lets through what was not issued already.

`turn` calls it, and then `after_decision`, which notes the decision in the state.

Invariants:
- The same state and time give the same decision, byte for byte. [test_scheduler: decides_the_same_byte_for_byte]
- Every decision has a reason with its numbers, also one that does nothing. The time is not in it, so that it changes
  only with what it describes. [test_lifecycle: every_decision_of_a_job_has_a_reason]
- A command that is given up ends the job with its own words. [test_expectations: never_done_fails_the_job]
- While the job is already ending, a command that is given up ends it at once.
  [test_losses: a_stop_that_is_not_done_by_its_deadline]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.scheduler.decide.expectations import due, issued
from services.scheduler.decide.iteration_commands import wanted_iteration
from services.scheduler.decide.moving.moves import wanted_moves
from services.scheduler.decide.proposals import Proposed, proposal_of
from services.scheduler.decide.steering_commands import wanted_steering
from services.scheduler.decide.wanted import Wanted
from services.scheduler.evolve.absences import noted
from services.scheduler.policy import Policy, Proposal
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import TERMINAL, ClusterState, Phase
from services.scheduler.state.remembered import Remembered
from tidegate.types import CommandId, Role

Propose = Callable[[ClusterState, Policy, int], Proposed]


@dataclass(frozen=True, slots=True)
class Decision:
    """`commands` are in the order to issue them. `waiting` are the keys of commands that were issued before and are
    still needed. `ask_at_ms`: when the policy wants to be asked again, should nothing happen before."""

    commands: tuple[cmd.Command, ...]
    waiting: tuple[str, ...]
    reason: str
    remembered: Remembered
    ask_at_ms: int | None = None


def decide(state: ClusterState, now_ms: int, *, policy: Policy, propose: Propose = proposal_of) -> Decision:
    state = noted(state, now_ms)
    proposed = propose(state, policy, now_ms)
    decision = decided(state, proposed.proposal, now_ms)
    return replace(decision, remembered=proposed.remembered, ask_at_ms=proposed.ask_at_ms)


def after_decision(state: ClusterState, decision: Decision, now_ms: int) -> ClusterState:
    """The state that says what was decided, and which GPUs the decision found absent. Of a decision, only the job's own
    end changes the structure."""
    after = issued(state, decision.commands, decision.waiting, now_ms)
    return noted(replace(after, remembered=decision.remembered, ask_at_ms=decision.ask_at_ms), now_ms)


def decided(state: ClusterState, proposal: Proposal, now_ms: int) -> Decision:
    """The decision that a proposal leads to."""
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
