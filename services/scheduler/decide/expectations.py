"""Expectations: commands that were issued and whose effect is not observed yet.

`decide` derives the needed commands from the state alone.
1. `due` selects those that were not issued yet, and those whose deadline has passed.
2. `issued` writes the selected commands into the state as expectations. It removes the expectations of commands that
   are not needed any more: their effect was observed.

How a command is repeated depends on its receiver:
- A lead gets the same id again while it does not answer, and again when its work is past the command's deadline. It
  answers a repeat from its store. After a refusal the command is a new attempt with a new id.
- The store gets the operation again until it shows the effect. It takes every step once.
- A gate gets a new question each time, with longer and longer pauses.
- A lead that took a command to clear a GPU is not held to a deadline: the gate shows the effect, and its questions have
  a limit of their own.
- An `Await` has no receiver. It only times out.

Invariants:
- A command is not issued again before its deadline. [test_expectations: not_issued_again_before_its_deadline]
- No two attempts have the same id. [test_expectations: refused_command_is_a_new_attempt]
- Every expectation has a deadline and is under its own key. [test_invariants: state_that_breaks_an_invariant]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.scheduler.evolve import absences
from services.scheduler.evolve.answers import MAX_REFUSALS, attempt_id, command_deadline_ms
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.issued import Expectation, Kind
from tidegate.types import CommandId

ANSWER_DEADLINE_MS = 15_000
"""A lead answers within milliseconds, and a call to it has a timeout of 10 s. After 15 s the answer is lost, or the
scheduler died before it sent the command."""

MAX_UNANSWERED = 8
"""Two minutes without an answer from a lead whose instance renews its lease."""

MAX_ISSUES = 3
"""Deadlines that a lead may miss before the job fails. Other events report a lead's death within seconds, so this limit
ends only a lead that hangs: after three command deadlines of the config (6 minutes by default)."""

STORE_DEADLINE_MS = 5_000
"""Store operations take milliseconds. After 5 s the shell died between its write and the operation."""

GATE_PAUSE_MS = 500
MAX_GATE_PAUSE_MS = 30_000
MAX_GATE_ASKS = 16
"""With the doubling pause, a gate may stay held for 5 minutes before a component that needs the GPU fails the job."""


@dataclass(frozen=True, slots=True)
class Due:
    """`commands` to issue now, keys of the commands that are still `waiting`, and a message for each failed command."""

    commands: tuple[cmd.Command, ...]
    waiting: tuple[str, ...]
    failures: tuple[str, ...]


def due(state: ClusterState, needed: Sequence[cmd.Command], now_ms: int) -> Due:
    """Sort the needed commands into those three groups, and keep their order."""
    commands: list[cmd.Command] = []
    waiting: list[str] = []
    failures: list[str] = []
    for command in needed:
        key = str(cmd.command_id(command))
        known = state.expectations.get(key)
        if known is None:
            commands.append(_with_id(command, f"{key}/a0"))
        elif now_ms < known.due_ms:
            waiting.append(key)
        elif _is_spent(command, known):
            failures.append(_failure(known))
        else:
            commands.append(_with_id(command, attempt_id(known)))
    return Due(tuple(commands), tuple(waiting), tuple(failures))


def issued(state: ClusterState, commands: Sequence[cmd.Command], waiting: Sequence[str], now_ms: int) -> ClusterState:
    """The state after a decision. The commands that it issued become expectations, and those in `waiting` stay."""
    kept = {key: state.expectations[key] for key in waiting}
    for command in commands:
        match command:
            case cmd.StopJob():
                state = _with_new_version(state.stopping(command.outcome, command.message), state)
            case cmd.FinishJob():
                state = _with_new_version(replace(state, phase=command.phase, message=command.message), state)
            case _:
                key = key_of(command)
                kept[key] = _expected(state, command, key, now_ms)
                state = _with_payload(state, command)
    return replace(state, expectations=dict(sorted(kept.items())))


def _with_payload(state: ClusterState, command: cmd.Command) -> ClusterState:
    """Keep the fields of a command that are needed until its effect is observed."""
    if isinstance(command, cmd.OrderGroups) and state.iteration is not None:
        steering = replace(state.iteration.steering, asked_order=command.groups)
        return replace(state, iteration=replace(state.iteration, steering=steering))
    if isinstance(command, cmd.PlanTransition):
        planned = command.transition.id
        targets = {each: target for each, target in state.targets.items() if each in state.transitions}
        if command.target is not None:
            targets[planned] = command.target
        return replace(state, targets=targets)
    return state


def next_due_ms(state: ClusterState) -> int | None:
    """The earliest time at which `decide` may decide otherwise without a new event; None when only an event can change
    the decision."""
    dues = [*(each.due_ms for each in state.expectations.values()), *absences.next_due_ms(state)]
    return min(dues if state.ask_at_ms is None else [*dues, state.ask_at_ms], default=None)


def last_noted_ms(state: ClusterState) -> int:
    """The latest time that the state has noted as past. 0: none."""
    absent = (each.since_ms for each in state.absent.values() if each.since_ms is not None)
    return max([0, *(each.issued_ms for each in state.expectations.values()), *absent])


def key_of(command: cmd.Command) -> str:
    """An issued command's id without the number of its attempt."""
    return str(cmd.command_id(command)).rpartition("/a")[0]


def _with_id(command: cmd.Command, attempt_id: str) -> cmd.Command:
    if isinstance(command, cmd.LeadCommand):
        return replace(command, header=replace(command.header, id=CommandId(attempt_id)))
    return replace(command, id=CommandId(attempt_id))


def _is_spent(command: cmd.Command, known: Expectation) -> bool:
    match known.kind:
        case Kind.WAIT:
            return True
        case Kind.STORE:
            return False
        case Kind.GATE:
            return known.num_issued >= MAX_GATE_ASKS and isinstance(command, cmd.AskGate) and command.is_needed
        case _ if known.is_accepted and _is_shown_by_gate(command):
            return False
        case _:
            num_missed = known.num_issued - known.num_refused
            most = MAX_ISSUES if known.is_accepted else MAX_UNANSWERED
            return known.num_refused >= MAX_REFUSALS or num_missed >= most


def _is_shown_by_gate(command: cmd.Command) -> bool:
    """Whether it clears a GPU outside every transition. Where the store has lost the owner, several components are
    asked, and the words of those that never had the GPU prove nothing."""
    return isinstance(command, cmd.ScaleDown) and not command.header.transition_id


def _failure(known: Expectation) -> str:
    if known.kind is Kind.WAIT:
        return f"waited {(known.due_ms - known.issued_ms) / 1000:g} s for {known.what}"
    refusals = f", refused {known.num_refused} times: {known.refusal}" if known.num_refused else ""
    return f"{known.what} was asked {known.num_issued} times without effect{refusals}"


def _with_new_version(after: ClusterState, before: ClusterState) -> ClusterState:
    return after if after == before else replace(after, version=before.version + 1)


def _kind(command: cmd.Command) -> Kind:
    match command:
        case cmd.OpenIteration():
            return Kind.OPEN
        case cmd.CloseIteration():
            return Kind.CLOSE
        case cmd.Evaluate():
            return Kind.EVALUATE
        case cmd.HoldTraining():
            return Kind.HOLD
        case cmd.OrderGroups():
            return Kind.ORDER
        case _ if isinstance(command, cmd.LeadCommand):
            return Kind.LEAD
        case cmd.AskGate():
            return Kind.GATE
        case cmd.Await():
            return Kind.WAIT
        case _:
            return Kind.STORE


def _expected(state: ClusterState, command: cmd.Command, key: str, now_ms: int) -> Expectation:
    known, kind = state.expectations.get(key), _kind(command)
    num_issued = (known.num_issued if known else 0) + 1
    match kind:
        case Kind.STORE:
            wait_ms = STORE_DEADLINE_MS
        case Kind.GATE:
            wait_ms = min(MAX_GATE_PAUSE_MS, GATE_PAUSE_MS * 2 ** min(num_issued - 1, 10))
        case Kind.WAIT:
            assert isinstance(command, cmd.Await)
            wait_ms = command.wait_ms
        case _:
            wait_ms = min(ANSWER_DEADLINE_MS, command_deadline_ms(state))
    header = command.header if isinstance(command, cmd.LeadCommand) else None
    return Expectation(
        key=key,
        kind=kind,
        what=_described(command),
        role=header.role if header else None,
        epoch=header.lead_epoch if header else 0,
        num_issued=num_issued,
        num_refused=known.num_refused if known else 0,
        issued_ms=now_ms,
        due_ms=now_ms + wait_ms,
        refusal=known.refusal if known else "",
    )


def _described(command: cmd.Command) -> str:
    match command:
        case cmd.Await():
            return command.what
        case cmd.AskGate():
            return f"the gate of {command.grant.gpu}, which a worker still holds,"
        case _ if isinstance(command, cmd.LeadCommand):
            return f"{type(command).__name__} of the {command.header.role}"
        case _:
            return f"{type(command).__name__} of the store"
