"""A command is repeated at its deadline, is a new attempt after a refusal, and fails the job in the end."""

from __future__ import annotations

import pytest

from services.scheduler.decide.expectations import (
    ANSWER_DEADLINE_MS,
    MAX_ISSUES,
    MAX_UNANSWERED,
    next_due_ms,
)
from services.scheduler.decide.turn import turn
from services.scheduler.evolve.answers import MAX_REFUSALS
from services.scheduler.evolve.fold import evolve
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.issued import Expectation
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, spec
from tests.unit.scheduler.lost_store import lose_store
from tests.unit.scheduler.open_iteration import iterating
from tidegate.types import Role


def silent(*, deadline_ms: int = 1000) -> Drive:
    """A job whose leads were asked to scale up and whose answers are lost."""
    drive = booted(FakeCluster(spec(deadline_ms=deadline_ms)))
    drive.run_until(lambda state: any(each.kind == "lead" for each in state.expectations.values()))
    drive.cluster.outbox.clear()
    return drive


def decided(state: ClusterState, now_ms: int) -> tuple[ClusterState, list[cmd.Command]]:
    made = turn(state, now_ms, StaticPolicy())
    return made.after, list(made.decided.commands)


def lead_commands(commands: list[cmd.Command]) -> list[cmd.LeadCommand]:
    return [command for command in commands if isinstance(command, cmd.LeadCommand)]


def accepted(state: ClusterState, *, sequence: int) -> ClusterState:
    """The leads have taken all commands."""
    for key in sorted(key for key, each in state.expectations.items() if each.role is not None):
        answer = ev.CommandAnswered(f"{key}/a0", True, "")
        state = evolve(state, ev.Event(job=JOB, source="scheduler", boot=1, sequence=sequence, body=answer))
    return state


def test_a_command_is_not_issued_again_before_its_deadline_and_then_under_the_same_id() -> None:
    drive = silent()
    (first,) = (each for each in lead_commands(drive.cluster.log) if each.header.role is Role.ACTOR)

    state, early = decided(drive.state, drive.now_ms + 999)
    _, late = decided(state, drive.now_ms + 1000)

    assert lead_commands(early) == []
    again = [each for each in lead_commands(late) if each.header.role is Role.ACTOR]
    assert [each.header.id for each in again] == [first.header.id]
    assert again[0].header.deadline_ms > first.header.deadline_ms


NEVER_DONE = {
    "a lead that never answers": (False, MAX_UNANSWERED),
    "a lead that answers and never does it": (True, MAX_ISSUES),
}


@pytest.mark.parametrize("case", NEVER_DONE)
def test_a_command_that_is_never_done_fails_the_job_with_its_name_and_attempts(case: str) -> None:
    answers, want_issues = NEVER_DONE[case]
    state = silent(deadline_ms=60_000).state
    for number in range(1, want_issues + 1):
        if answers:
            state = accepted(state, sequence=number)
        due_ms = next_due_ms(state)
        assert due_ms is not None
        state, commands = decided(state, due_ms)

    assert isinstance(commands[-1], cmd.StopJob)
    assert f"ScaleUp of the actor was asked {want_issues} times without effect" in state.message
    assert (state.phase, state.outcome) == (Phase.STOPPING, Phase.FAILED)


def test_no_clear_that_a_lead_took_fails_the_job_before_the_gate_tells() -> None:
    drive = iterating()
    lose_store(drive, None)
    state = drive.run_until(lambda state: bool(_clears(state)))
    while max(each.num_issued for each in _clears(state)) <= MAX_ISSUES:
        state = accepted(state, sequence=len(state.expectations))
        due_ms = next_due_ms(state)
        assert due_ms is not None
        state, commands = decided(state, due_ms)

        assert not any(isinstance(each, cmd.StopJob) for each in commands)


def _clears(state: ClusterState) -> list[Expectation]:
    return [each for each in state.expectations.values() if "/clear/" in each.key]


def test_a_command_that_a_lead_took_has_until_its_own_deadline() -> None:
    drive = silent(deadline_ms=1_000_000)
    state = accepted(drive.state, sequence=1)

    assert lead_commands(decided(state, drive.now_ms + 999_000)[1]) == []
    assert lead_commands(decided(drive.state, drive.now_ms + ANSWER_DEADLINE_MS)[1]) != []


def test_a_refused_command_is_a_new_attempt_after_a_pause_and_given_up_after_enough_with_the_leads_words() -> None:
    drive = silent(deadline_ms=1_000_000)
    state, now_ms = drive.state, drive.now_ms
    key = next(key for key, each in state.expectations.items() if each.role is Role.ACTOR)
    for number in range(MAX_REFUSALS):
        refusal = ev.CommandAnswered(f"{key}/a{number}", False, "not ready: 1 of 2 instances joined")
        state = evolve(state, ev.Event(job=JOB, source="scheduler", boot=1, sequence=number, body=refusal))
        early = [each for each in lead_commands(decided(state, now_ms + 500)[1]) if each.header.role is Role.ACTOR]
        assert early == [], "it waits before it asks again"
        now_ms = state.expectations[key].due_ms
        state, commands = decided(state, now_ms)
        got = [each.header.id for each in lead_commands(commands) if each.header.role is Role.ACTOR]
        assert got == ([f"{key}/a{number + 1}"] if number + 1 < MAX_REFUSALS else [])

    assert state.phase is Phase.STOPPING
    assert "refused 5 times: not ready: 1 of 2 instances joined" in state.message


def test_the_next_deadline_is_the_earliest_of_all_and_none_when_nothing_is_waited_for() -> None:
    drive = silent()

    due_ms = next_due_ms(drive.state)

    assert due_ms == min(each.due_ms for each in drive.state.expectations.values())
    assert next_due_ms(ClusterState(job=JOB)) is None


def test_an_expectation_ends_once_its_command_is_not_needed_any_more() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    while drive.cluster.outbox:
        drive.step()

    assert drive.state.expectations == {}
