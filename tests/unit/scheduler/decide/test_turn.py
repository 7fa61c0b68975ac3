"""A turn folds events, folds ownership, decides and writes the decision; in two halves it does the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.decision import after_decision, decide
from services.scheduler.decide.pacing import Pace
from services.scheduler.decide.turn import StateBroken, begin, checked, finish, turn
from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.recovering import recovered
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.shell.codecs.state_codec import encode_state
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.observed import Pictures, Training
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, spec

NOW_MS = 1_000_000
POLICY = StaticPolicy()
PROGRESS = ev.Progress((), num_done=1, num_total=8, phase="generate")


def iterating() -> Drive:
    drive = booted(FakeCluster(spec()))
    drive.run_until(lambda state: state.iteration is not None and not state.expectations)
    return drive


def ownership(drive: Drive) -> ev.OwnershipObserved:
    body = drive.cluster.observed().body
    assert isinstance(body, ev.OwnershipObserved)
    return body


def cancelled(drive: Drive) -> ev.Event:
    return ev.Event(job=JOB, source="control", boot=1, sequence=1, body=ev.JobCancelRequested("enough"))


def test_a_turn_folds_its_events_then_decides_then_notes_the_decision() -> None:
    drive = iterating()
    event = cancelled(drive)

    made = turn(drive.state, NOW_MS, POLICY, events=[event])

    folded = evolve(drive.state, event)
    decision = decide(folded, NOW_MS, policy=POLICY)
    assert made.states == (drive.state, folded, after_decision(folded, decision, NOW_MS))
    assert (made.before, made.folded, made.decision) == (drive.state, folded, decision)
    assert made.after.expectations, "what it issued is expected"


def test_a_turn_in_two_halves_with_ownership_read_in_between_comes_to_the_same_state() -> None:
    drive = iterating()
    event, observed = cancelled(drive), ownership(drive)

    begun = begin(drive.state, [event])
    made = finish(begun, NOW_MS, POLICY, observed=observed)

    looked = ev.Event(job=JOB, source="scheduler", boot=0, sequence=0, body=observed)
    whole = turn(drive.state, NOW_MS, POLICY, events=[event, looked])
    assert encode_state(made.after) == encode_state(whole.after)
    assert repr(made.decision) == repr(whole.decision)


def test_a_turn_that_is_not_due_only_folds() -> None:
    drive = iterating()
    source = sorted(drive.state.instances)[0]
    event = ev.Event(JOB, source, boot=1, sequence=900, body=PROGRESS, incarnation=1)

    made = turn(drive.state, NOW_MS, POLICY, events=[event], pace=Pace(5000, decided_ms=NOW_MS))

    assert made.decision is None
    assert made.after == made.folded == evolve(drive.state, event)


def test_events_that_a_lost_state_had_seen_are_folded_before_the_others() -> None:
    drive = iterating()
    missed = [replace(each, stream_sequence=at) for at, each in enumerate(drive.delivered, start=1)]
    empty, event = ClusterState(job=JOB), cancelled(drive)

    begun = begin(empty, [event], missed=missed)

    assert begun.after == evolve(recovered(empty, missed), event)
    assert begun.before == empty


def test_a_state_that_breaks_an_invariant_is_refused_with_its_numbers() -> None:
    whole = ClusterState(job=JOB)
    broken = replace(whole, seen=Pictures(training=Training()), version=1)
    assert checked(whole) is whole
    with pytest.raises(StateBroken, match="pictures are of an open iteration: training seen, and none is open"):
        checked(whole, broken, replace(whole, version=2))
