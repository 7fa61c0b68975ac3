"""What the turns of recorded histories leave for people."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from services.scheduler.decide.chronicle import Chronicle, Line, chronicle
from services.scheduler.decide.turn import Turn, turn
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from simulator.cluster import JOB as SIMULATED
from tests.replay.recorded import HISTORIES, LIVED, POLICIES, read
from tests.unit.scheduler.fake_parts import JOB
from tidegate.ownership.records import Outcome, Part, PartKind, PartState, Transition
from tidegate.types import Layout, Role, TransitionId


def lines_of(name: str) -> list[Line]:
    """The lines of a recorded history."""
    state, before, lines = ClusterState(job=JOB if name in LIVED else SIMULATED), Chronicle(), list[Line]()
    events: list[ev.Event] = []
    for step in read(HISTORIES[name]):
        if step.event is not None:
            events.append(step.event)
            continue
        made = turn(state, step.at_ms, POLICIES[name], events=events)
        seen = [event.body for event in events if isinstance(event.body, ev.OwnershipObserved)]
        before = chronicle(made, step.at_ms, before=before, observed=seen[-1] if seen else None)
        lines += before.lines
        state, events = made.after, []
    return lines


@pytest.mark.parametrize("name", ["tide", "moves"])
def test_the_same_turns_leave_the_same_lines(name: str) -> None:
    lines = lines_of(name)
    assert lines == lines_of(name)
    assert json.loads(json.dumps(lines)) == lines


@pytest.mark.parametrize("name", ["tide", "rlinf", "moves"])
def test_each_transition_is_planned_by_a_decision_goes_its_steps_and_is_closed_once(name: str) -> None:
    lines = lines_of(name)
    planned = [each["transition"] for line in lines if line["kind"] == "decision" for each in line["planned"]]
    closed = [line["transition"] for line in lines if line["kind"] == "closed"]
    assert len(planned) == len(set(planned)) > 6
    assert len(closed) == len(set(closed))
    assert set(closed) <= set(planned)
    assert len(closed) >= len(planned) - 3, "a history may end with open ones"
    for each in closed:
        steps = [line for line in lines if line["kind"] == "step" and line["transition"] == each]
        assert steps[0]["at_ms"] <= steps[-1]["at_ms"]
        assert {"draining", "acquiring"} & steps[0]["states"].keys(), "the plan and its first step are one look"


def test_a_change_of_layout_alone_has_the_states_of_its_part() -> None:
    part = Part(Role.ACTOR, PartKind.RESIZE, Layout(dp=2), Layout(tp=2))
    name = TransitionId("small/1/t4")
    planned = Transition(name, JOB, 1, moves=(), parts=(part,), planned_version=0, deadline_unix_ms=9, reason="by hand")
    committed = replace(planned, parts=(replace(part, state=PartState.COMMITTED),))
    states = [ClusterState(job=JOB, transitions={name: each} if each else {}) for each in (None, planned, committed)]
    lines = [chronicle(Turn(pair), 5, before=Chronicle(), observed=None).lines for pair in pairwise(states)]
    assert [line["states"] for (line,) in lines] == [{"planned": []}, {"committed": []}]


def test_a_transition_that_ends_with_the_job_says_so() -> None:
    closed = [line for line in lines_of("moves") if line["kind"] == "closed"]
    ends = {kind: {line["job_ends"] for line in closed if line["parts"][0]["kind"] == kind} for kind in PartKind}
    assert ends[PartKind.STOP] == {True}
    assert ends[PartKind.SUSPEND] == ends[PartKind.RESUME] == {False}
    cut = [line for line in closed if line["job_ends"] and line["parts"][0]["kind"] != PartKind.STOP]
    assert len(cut) == 1, "the actor is on its way home when the job ends"
    assert cut[0]["outcome"] in (Outcome.ABORTED, Outcome.PARTIAL)


def test_a_decision_of_tide_has_its_inputs_and_the_alternatives_with_the_chosen_one_among_them() -> None:
    decisions = [line for line in lines_of("tide") if line["kind"] == "decision"]
    weighed = [line for line in decisions if line.get("alternatives")]
    assert weighed
    for line in weighed:
        assert [each["is_chosen"] for each in line["alternatives"]].count(True) == 1
        assert line["situation"]["sequences"] > 0
        chosen = next(each["end_s"] for each in line["alternatives"] if each["is_chosen"])
        assert line["forecast_end_ms"] == pytest.approx(line["at_ms"] + 1000 * chosen, abs=2)
    compared = [line for line in weighed if len(line["alternatives"]) > 1]
    whats = [each["what"] for line in compared for each in line["alternatives"]]
    assert any(what.startswith("every component stays at home, and saves the way back of") for what in whats)


def test_a_decision_like_the_one_before_leaves_no_line() -> None:
    decisions = [line for line in lines_of("tide") if line["kind"] == "decision"]
    num_asked = sum(step.event is None for step in read(HISTORIES["tide"]))
    assert len(decisions) < num_asked / 3


def test_an_iteration_opens_and_is_reported_once() -> None:
    lines = [line for line in lines_of("deaths") if line["kind"] in ("opened", "reported")]
    found = [(line["kind"], line["incarnation"], line["iteration"]) for line in lines]
    assert len(found) == len(set(found))
    assert {each[2] for each in found if each[0] == "reported"} == {0, 1, 2}
