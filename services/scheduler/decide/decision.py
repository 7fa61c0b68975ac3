"""`decide(state, now_ms)` gives the next commands and the reason for them.

Pure: no clock, no I/O, no memory but the state.

1. The policy proposes where GPUs should be (`proposals`).
2. `moving` gives the commands that bring the GPUs there.
3. `iteration_commands` and `steering_commands` give the commands for the open iteration.
4. `expectations` removes the commands that were issued already.

`turn` calls `decide`, and then `after_decision`, which writes the decision into the state.

Invariants:
- The same state and time give the same decision, byte for byte. [test_scheduler: decides_the_same_byte_for_byte]
- Every decision has a reason with its numbers, also one that does nothing. The reason does not contain the time, so
  that it changes only when the decision changes. [test_lifecycle: every_decision_of_a_job_has_a_reason]
- A command that never takes effect ends the job with a message that names the command.
  [test_expectations: never_done_fails_the_job]
- While the job is already ending, a command that never takes effect ends it at once.
  [test_failed_changes: a_stop_that_is_not_done_by_its_deadline]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.scheduler.decide.expectations import due, issued
from services.scheduler.decide.iteration_commands import needed_iteration_commands
from services.scheduler.decide.moving.moves import needed_moves
from services.scheduler.decide.needs import Needs
from services.scheduler.decide.proposals import PolicyAnswer, proposal_of
from services.scheduler.decide.steering_commands import needed_steering_commands
from services.scheduler.evolve.absences import noted
from services.scheduler.policy import Policy, Proposal
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import TERMINAL, ClusterState, Phase
from services.scheduler.state.remembered import Remembered
from tidegate.short_lists import counted
from tidegate.types import CommandId, Role

Propose = Callable[[ClusterState, Policy, int], PolicyAnswer]


@dataclass(frozen=True, slots=True)
class Decision:
    """`commands` are in the order in which to issue them. `waiting` are the keys of commands that were issued before
    and are still needed. `ask_at_ms` is the time at which to ask the policy again if no event comes before. `answer` is
    what the decision rests on, for the job's log of decisions."""

    commands: tuple[cmd.Command, ...]
    waiting: tuple[str, ...]
    reason: str
    remembered: Remembered
    ask_at_ms: int | None = None
    answer: PolicyAnswer | None = field(default=None, compare=False, repr=False)


def decide(state: ClusterState, now_ms: int, *, policy: Policy, propose: Propose = proposal_of) -> Decision:
    state = noted(state, now_ms)
    answer = propose(state, policy, now_ms)
    decision = decision_on(state, answer.proposal, now_ms)
    return replace(decision, remembered=answer.remembered, ask_at_ms=answer.ask_at_ms, answer=answer)


def after_decision(state: ClusterState, decision: Decision, now_ms: int) -> ClusterState:
    """The state with the decision in it, and with the GPUs that the decision found absent. Only a decision that ends
    the job raises the state's `version`."""
    after = issued(state, decision.commands, decision.waiting, now_ms)
    return noted(replace(after, remembered=decision.remembered, ask_at_ms=decision.ask_at_ms), now_ms)


def decision_on(state: ClusterState, proposal: Proposal, now_ms: int) -> Decision:
    if state.phase in TERMINAL:
        return Decision((), (), f"{state.phase}: {state.message}", state.remembered)
    if state.phase is Phase.STOPPING and _has_no_gpus(state):
        return _finished(state, state.message)
    if state.spec is None:
        waits = f"waits for the job to be submitted ({len(state.instances)} instances joined)"
        return Decision((), (), waits, state.remembered)
    needs = needed_moves(state, proposal, now_ms)
    if state.phase is not Phase.STOPPING:
        needs += needed_iteration_commands(state, now_ms) + needed_steering_commands(state, proposal, now_ms)
    now_due = due(state, needs.commands, now_ms)
    failures = (*((needs.failure,) if needs.failure else ()), *now_due.failures)
    if failures:
        return _failed(state, "; ".join(failures))
    reason = _reason(state, proposal.reason, needs, now_due.waiting)
    return Decision(now_due.commands, now_due.waiting, reason, state.remembered)


def _has_no_gpus(state: ClusterState) -> bool:
    return not state.transitions and not any(state.records_of(role) for role in Role)


def _finished(state: ClusterState, message: str) -> Decision:
    phase = state.outcome or Phase.FAILED
    finish = cmd.FinishJob(CommandId(f"{state.job}/{state.incarnation}/finish"), phase, message)
    return Decision((finish,), (), f"{phase}: {message}", state.remembered)


def _failed(state: ClusterState, failure: str) -> Decision:
    if state.phase is not Phase.STOPPING:
        stop = cmd.StopJob(CommandId(f"{state.job}/{state.incarnation}/stop"), Phase.FAILED, failure)
        return Decision((stop,), (), f"the job fails: {failure}", state.remembered)
    kept = sorted(record.gpu for role in Role for record in state.records_of(role))
    left = f"; {counted(len(kept), 'GPU')} not given back ({', '.join(kept)})" if kept else ""
    return _finished(state, f"{state.message}; {failure}{left}")


def _reason(state: ClusterState, proposed: str, needs: Needs, waiting: tuple[str, ...]) -> str:
    num_iterations = state.spec.num_iterations if state.spec else 0
    head = (
        f"{state.phase}, incarnation {state.incarnation}, iteration {state.next_iteration} of {num_iterations}, "
        f"version {state.target_version}; {proposed}"
    )
    notes = "; ".join(dict.fromkeys(needs.notes)) or "nothing to do"
    return f"{head}; {notes}; {len(waiting)} commands not yet observed"
