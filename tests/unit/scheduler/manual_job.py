"""A small job for manual moves, splits of it, and what its scheduler plans.

The job: actor on n0/0 and n1/0 (dp 2), rollout on n0/1, n1/1 and n1/3, inference on n0/2 and n1/2 (tp 2), n0/3 on
standby; 4 samples a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.values import Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.types import GpuId, Layout, Role

ACTOR, ROLLOUT, INFERENCE = Role.ACTOR, Role.ROLLOUT, Role.INFERENCE
SPARE = gpu("n0", 3)
HOME = spec().placement
LARGER = {
    ACTOR: Placed((gpu("n0", 0), gpu("n1", 0), gpu("n1", 3), SPARE), Layout(dp=4)),
    ROLLOUT: Placed((gpu("n0", 1), gpu("n1", 1)), Layout(dp=2)),
    INFERENCE: HOME[INFERENCE],
}
"""The actor gets an engine's GPU and the spare one."""
SMALLER = {
    ACTOR: Placed((gpu("n0", 0),), Layout()),
    ROLLOUT: Placed((*HOME[ROLLOUT].gpus, gpu("n1", 0)), Layout(dp=4)),
    INFERENCE: HOME[INFERENCE],
}
"""The rollout gets a GPU of the actor."""
FEWER_ENGINES = {**HOME, ROLLOUT: Placed(HOME[ROLLOUT].gpus[:1], Layout(dp=1))}
MOVED_ENGINE = {**HOME, ROLLOUT: Placed((gpu("n0", 1), SPARE, gpu("n1", 3)), Layout(dp=3))}


def running(**fields: int) -> Drive:
    """A job whose first iteration is open, with all events delivered."""
    drive = booted(FakeCluster(spec(standby=(SPARE,), **fields)))  # type: ignore[arg-type]  # only numbers are varied
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    while drive.cluster.outbox:
        drive.deliver(drive.cluster.outbox.pop(0))
    return drive


def say(drive: Drive, body: ev.Body) -> None:
    drive.cluster.voice.say("control", body)
    drive.deliver(drive.cluster.outbox.pop())


def split(drive: Drive, placement: dict[Role, Placed]) -> None:
    say(drive, ev.SplitRequested(placement))


def drain(drive: Drive, *gpus: GpuId, undo: bool = False) -> None:
    say(drive, ev.DrainRequested(gpus, is_undone=undo))


def at_work(state: ClusterState) -> dict[Role, set[GpuId]]:
    return {role: {grant.gpu for grant in state.components[role].grants} for role in Role}


def gpus_of(placement: dict[Role, Placed]) -> dict[Role, set[GpuId]]:
    return {role: set(placement[role].gpus) for role in Role}


def is_at(placement: dict[Role, Placed]) -> Callable[[ClusterState], bool]:
    """A condition on a state: all components are there, and nothing moves."""
    return lambda state: at_work(state) == gpus_of(placement) and not state.transitions


def planned(drive: Drive, sent: int) -> list[tuple[Role, set[GpuId], set[GpuId]]]:
    """The transitions since then: (role, GPUs that leave, GPUs that come)."""
    found = []
    for command in drive.cluster.log[sent:]:
        if isinstance(command, cmd.PlanTransition):
            moves = command.transition.moves
            leaves, comes = ({m.gpu for m in moves if m.source}, {m.gpu for m in moves if m.target})
            found.append((command.transition.parts[0].role, leaves, comes))
    return found
