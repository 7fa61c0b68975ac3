"""Recorded histories lead to the commands that they led to: a decision that changed shows here, with the event before
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.decide.turn import turn
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.observed import Generation
from simulator.cluster import JOB as SIMULATED
from tests.replay.recorded import FAULTS, HISTORIES, LIVED, POLICIES, lines_of, read, recorded
from tests.unit.scheduler.fake_parts import JOB
from tidegate.types import Role

ANEW = "if that is meant, record the histories anew (python -m tests.replay) and look at what changed"


@pytest.mark.parametrize("name", HISTORIES)
def test_a_recorded_history_replays_to_the_same_commands(name: str) -> None:
    state, last = ClusterState(job=JOB if name in LIVED else SIMULATED), "nothing"
    events: list[ev.Event] = []
    for number, step in enumerate(read(HISTORIES[name]), start=1):
        if step.event is not None:
            events.append(step.event)
            last = f"{type(step.event.body).__name__} of {step.event.source}"
            continue
        made = turn(state, step.at_ms, POLICIES[name], events=events)
        got = [repr(command) for command in made.decided.commands]
        assert got == list(step.commands), f"line {number}, after {last}: {ANEW}"
        # Another replica goes on from here.
        state, events = decode_state(encode_state(made.after)), []
    assert state.phase is (Phase.FINISHED if name in LIVED else Phase.RUNNING), "a simulated job has one iteration"
    assert len(state.summaries) > 0
    assert all(summary.num_lost == 0 for summary in state.summaries)
    assert state.learned.lengths is not None, "what was lines_of of iterations was learned from"


@pytest.mark.parametrize("name", ["moves", *FAULTS])
def test_a_recorded_history_of_a_policy_moves_gpus_while_its_iterations_run(name: str) -> None:
    commands = [command for step in read(HISTORIES[name]) for command in step.commands]
    reasons = [each for each in commands if each.startswith("PlanTransition(")]
    assert len(reasons) > 2 * len(Role), "more than what starts and ends the three components"


@pytest.mark.parametrize("name", FAULTS)
def test_a_simulated_history_has_its_fault_in_it(name: str) -> None:
    bodies = [step.event.body for step in read(HISTORIES[name]) if step.event is not None]
    assert any(isinstance(body, ev.Failed) for body in bodies)


def test_a_recorded_history_reads_back_as_it_was_written(tmp_path: Path) -> None:
    steps = recorded("deaths")
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(lines_of(steps)))

    again = list(read(path))

    assert again == steps
    assert any(isinstance(step.event.body, Generation) for step in steps if step.event)
