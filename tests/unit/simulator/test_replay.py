"""A replay of a recorded job gives the same commands, and shows the choices of another policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.values import Placed
from simulator.replay import Recorded, replayed, section_of
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.types import InstanceId, Layout, Role

LEAD_COMMANDS = tuple(get_args(cmd.LeadCommand))


def with_deaths(drive: Drive) -> None:
    drive.run_until(lambda state: state.iteration is not None)
    drive.cluster.kill_worker(gpu("n1", 2))
    drive.run_until(lambda state: state.next_iteration == 1)
    drive.cluster.voice.say("control", ev.ResizeRequested(Placed((gpu("n0", 0), gpu("n0", 3)), Layout(tp=2))))
    drive.cluster.kill_instance(InstanceId("rollout@n0"), tells=True)
    drive.run()


def with_moves(drive: Drive) -> None:
    """Responses of an iteration end while time passes, and no command's deadline passes."""
    drive.run_until(lambda state: state.iteration is not None)
    for eighths in (2, 4, 6):
        drive.run_until(lambda _: not drive.cluster.outbox)
        drive.cluster.show(Role.ROLLOUT, eighths=eighths)
        drive.cluster.show(Role.INFERENCE, eighths=eighths - 2)
        drive.now_ms += 5000
    drive.run()


LIVES: dict[str, tuple[Policy, Callable[[Drive], None]]] = {
    "static": (StaticPolicy(), with_deaths),
    "dynarl": (DynaRLPolicy(DynaRLRules()), with_moves),
}


def lived(policy: str) -> Drive:
    """A job under the policy, from its first event to its last."""
    job = spec(num_iterations=2, standby=(gpu("n0", 3),), deadline_ms=600_000)
    drive = booted(FakeCluster(job))
    drive.policy, life = LIVES[policy]
    life(drive)
    return drive


def stream(drive: Drive, policy: str) -> list[Recorded]:
    """The part of a life that is in a job's record: the events, and the policy in its config."""
    events = []
    for event, at_ms, _ in drive.seen:
        if event is None or isinstance(event.body, ev.OwnershipObserved):
            continue
        if isinstance(event.body, ev.JobSubmitted):
            config = json.dumps({"scheduler": {"policy": policy}})
            event = replace(event, body=replace(event.body, config_json=config))
        events.append(Recorded(at_ms, event))
    return events


@pytest.mark.parametrize("policy", LIVES)
def test_the_jobs_own_policy_commands_the_same_byte_for_byte(policy: str) -> None:
    drive = lived(policy)
    want = [command for command in drive.cluster.log if isinstance(command, LEAD_COMMANDS)]
    events = stream(drive, policy)
    got = replayed(events, StaticPolicy(), name="static")
    assert list(map(repr, got.commands)) == list(map(repr, want))
    assert (got.num_events, got.strange) == (len(events), ())
    assert got.num_answered == sum(isinstance(each.event.body, ev.CommandAnswered) for each in events) > 0


def test_the_replay_shows_the_choices_of_another_policy_without_carrying_them_out() -> None:
    events = stream(lived("static"), "static")
    got = replayed(events, DynaRLPolicy(DynaRLRules()), name="dynarl")
    assert got.decisions
    assert all(each.reason.startswith("dynarl: ") and each.at_s >= 0 for each in got.decisions)
    assert got.decisions[0].assignment.trainer is None, "an iteration begins with every GPU in the rollout"
    assert got.commands == replayed(events, StaticPolicy(), name="static").commands


def test_a_record_that_submits_no_job_is_refused() -> None:
    events = [each for each in stream(lived("static"), "static") if not isinstance(each.event.body, ev.JobSubmitted)]
    with pytest.raises(ValueError, match="submits a job"):
        section_of(events)
