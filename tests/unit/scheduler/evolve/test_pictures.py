"""The state has the latest picture of each component, and only pictures of the open iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.evolve.fold import evolve
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.observed import ENDED, Generation, Inferring, Pictures, Training
from tests.unit.scheduler import fake_pictures
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.types import InstanceId, Role, instance_id, node_of

GPUS = (gpu("n0", 1), gpu("n1", 1), gpu("n1", 3))


def iterating() -> Drive:
    drive = booted(FakeCluster(spec()))
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    while drive.cluster.outbox:
        drive.step()
    return drive


@pytest.fixture
def drive() -> Drive:
    return iterating()


def lead(state: ClusterState, role: Role) -> InstanceId:
    found = state.components[role].lead
    assert found is not None
    return found.instance


def event_of_lead(drive: Drive, role: Role, body: ev.Body, *, later: int = 1, **fields: Any) -> ev.Event:
    """An event of the role's lead, `later` sequences after its last event."""
    name = lead(drive.state, role)
    event = ev.Event(
        job=drive.state.job,
        source=name,
        boot=drive.cluster.voice.boots[name],
        sequence=drive.cluster.voice.sequences[name] + later,
        body=body,
        incarnation=drive.state.incarnation,
        iteration=0,
        role=role,
    )
    return replace(event, **fields)


def generating(drive: Drive, *, eighths: int) -> Generation:
    assert drive.state.iteration is not None
    return fake_pictures.generation(drive.state.iteration.plan, GPUS, num_prompts=4, eighths=eighths)


def test_the_state_has_each_components_last_picture_and_the_version_stays(drive: Drive) -> None:
    assert drive.state.spec is not None
    pictures: dict[Role, ev.Body] = {
        Role.ROLLOUT: generating(drive, eighths=3),
        Role.INFERENCE: Inferring((0,)),
        Role.ACTOR: Training(1, 1),
    }
    state = drive.state
    for role, body in pictures.items():
        state = evolve(state, event_of_lead(drive, role, body))

    assert state.seen.generation == pictures[Role.ROLLOUT]
    assert state.seen.inferring == pictures[Role.INFERENCE]
    assert state.seen.training == pictures[Role.ACTOR]
    assert state.version == drive.state.version
    assert state.ignored == drive.state.ignored


def test_a_later_picture_replaces_an_earlier_one_whatever_the_order_in_which_they_arrive(drive: Drive) -> None:
    early = event_of_lead(drive, Role.ACTOR, Training(1, 2), later=1)
    late = event_of_lead(drive, Role.ACTOR, Training(2, 4), later=2)

    in_order = evolve(evolve(drive.state, early), late)
    reordered = evolve(evolve(drive.state, late), early)

    assert in_order.seen.training == reordered.seen.training == Training(2, 4)
    assert reordered.ignored["of an older picture"] == 1
    assert evolve(reordered, late).seen == reordered.seen


REFUSED: dict[str, tuple[Role, ev.Body, dict[str, Any], str]] = {
    "from another component": (Role.ACTOR, Inferring(), {}, "a picture of another component"),
    "from a later iteration": (Role.ACTOR, Training(), {"iteration": 1}, "of an iteration that is not open"),
    "from an older incarnation": (Role.ACTOR, Training(), {"incarnation": 0}, "of an older incarnation"),
    "from an instance that does not lead": (
        Role.ACTOR,
        Training(),
        {"source": "actor@n1"},
        "not of the component's lead",
    ),
    "with groups of another size": (
        Role.ROLLOUT,
        Generation((), 1, (5,) * 8, (ENDED,) * 8),
        {},
        "a picture of other groups than the iteration's",
    ),
    "with fewer groups": (
        Role.ROLLOUT,
        Generation((), 2, (5,) * 6, (ENDED,) * 6),
        {},
        "a picture of other groups than the iteration's",
    ),
    "with more groups": (
        Role.ROLLOUT,
        Generation((), 2, (5,) * 10, (ENDED,) * 10),
        {},
        "a picture of other groups than the iteration's",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_picture_that_does_not_count_changes_nothing(drive: Drive, case: str) -> None:
    role, body, fields, want = REFUSED[case]

    state = evolve(drive.state, event_of_lead(drive, role, body, **fields))

    assert (state.seen, state.learned) == (drive.state.seen, drive.state.learned)
    assert state.ignored.get(want, 0) == drive.state.ignored.get(want, 0) + 1


def test_a_picture_of_a_start_of_the_lead_that_was_not_elected_does_not_count(drive: Drive) -> None:
    name = lead(drive.state, Role.INFERENCE)
    state = evolve(drive.state, event_of_lead(drive, Role.INFERENCE, Inferring((0,)), boot=2, sequence=1))

    assert state.instances[name].boot == 2
    assert state.seen.inferring != Inferring((0,))


def test_a_replaced_leads_picture_is_forgotten_and_its_late_picture_does_not_count(drive: Drive) -> None:
    late = event_of_lead(drive, Role.ROLLOUT, generating(drive, eighths=2), later=1)
    name = lead(drive.state, Role.ROLLOUT)
    election = ev.LeadElected(name, f"at-{name}", drive.cluster.epochs[Role.ROLLOUT] + 1)
    elected = event_of_lead(drive, Role.ROLLOUT, election, later=2)
    current = event_of_lead(drive, Role.ROLLOUT, generating(drive, eighths=1), later=3)

    state = evolve(drive.state, elected)
    assert state.seen.generation is None
    assert evolve(state, late).seen.generation is None
    assert evolve(evolve(state, current), late).seen.generation == current.body


def test_pictures_are_forgotten_with_their_iteration_and_what_was_learned_stays(drive: Drive) -> None:
    drive.run_until(lambda state: state.next_iteration == 1)

    assert drive.state.seen.generation is None
    assert drive.state.seen.training is None
    learned = drive.state.learned
    assert learned.lengths is not None
    assert [each.layout.dp for each in learned.rates] == [2]


def test_pictures_are_forgotten_with_their_incarnation(drive: Drive) -> None:
    name = lead(drive.state, Role.ACTOR)
    node = node_of(gpu(name.partition("@")[2], 0))
    drive.cluster.kill_instance(instance_id(Role.ACTOR, node), tells=True)
    drive.run_until(lambda state: state.incarnation == 2)

    assert drive.state.seen == Pictures(marks=drive.state.seen.marks)
