"""Histories of a job: deaths, resizes, late and repeated events, and the run that a history makes."""

from __future__ import annotations

from hypothesis import strategies as st

from services.scheduler.evolve.losses import MAX_DEATHS
from services.scheduler.policy import Policy
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import Phase
from services.scheduler.state.values import Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.types import GpuId, Grant, Layout, Role

NUM_ITERATIONS = 2
MAX_BLOWS = 5
MAX_STEPS_ON = 40
"""An undisturbed job takes about twice as many."""
ordinary = st.tuples(
    st.sampled_from(["deliver"] * 6 + ["repeat", "lose commands", "work", "beat", "show"]), st.integers(0, 7)
)
blow = st.tuples(
    st.sampled_from(
        [
            "kill worker",
            "kill instance",
            "kill instance unseen",
            "fail iteration",
            "lapse",
            "move lead",
            "fail late",
            "fail late, fatally",
        ]
    ),
    st.integers(0, 40),
)
SLOTS = (gpu("n0", 0), gpu("n1", 0), gpu("n0", 3), gpu("n1", 4))
PLACES = (
    Placed(SLOTS, Layout(tp=2, dp=2)),
    Placed(SLOTS[1:2], Layout()),
    Placed(SLOTS[2:], Layout(pp=2)),
    Placed(SLOTS[:2], Layout(tp=2)),
    Placed(SLOTS[1::-1], Layout(dp=2)),
    Placed((SLOTS[3], SLOTS[0], SLOTS[1]), Layout(dp=3)),
)
resize = st.tuples(st.sampled_from(["resize"] * 4 + ["fail resize"]), st.integers(0, len(PLACES) - 1))
MAX_RESIZES = 4
on = st.tuples(st.just("run on"), st.integers(0, MAX_STEPS_ON))
rank_death = st.tuples(st.sampled_from(["kill rank", "kill rank, reported later"]), st.integers(0, 7))
MAX_RANK_DEATHS = (MAX_DEATHS + 1) // 2
"""A job outlives so many at any time. A death that is reported after a resize failed of it may count twice."""
recovery = st.tuples(st.sampled_from(["restart", "renew"]), st.just(0))


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Events, lost commands and resizes, but no deaths."""
    steps = draw(st.lists(ordinary, max_size=90))
    for _ in range(draw(st.integers(0, MAX_RESIZES))):
        where = draw(st.integers(0, len(steps)))
        steps[where:where] = [draw(on), draw(resize)]
    return steps


@st.composite
def schedules_with_rank_deaths(draw: st.DrawFn) -> list[tuple[str, int]]:
    """A schedule with deaths of actor ranks, in a resize or outside one. The lead waits for each rank that died."""
    steps = draw(schedules())
    for _ in range(draw(st.integers(1, MAX_RANK_DEATHS))):
        where = draw(st.integers(0, len(steps)))
        steps[where:where] = [draw(on), draw(rank_death)]
    return steps


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Steps in order: mostly events, with resizes and up to `MAX_BLOWS` blows among them."""
    steps = draw(schedules())
    for _ in range(draw(st.integers(0, MAX_BLOWS))):
        where = draw(st.integers(0, len(steps)))
        steps[where:where] = [draw(on), draw(blow)]
        steps.insert(draw(st.integers(where + 2, len(steps))), draw(recovery))
    return steps


def repeatable(drive: Drive) -> list[ev.Event]:
    """The delivered events that change nothing when they are delivered again, whatever the stream says.

    A loss is not among them. One start of an instance may be lost several times, with returns between the losses, and
    only the stream's sequence distinguishes a repeat from the next loss.
    """
    return [event for event in drive.delivered if not isinstance(event.body, ev.InstanceLost)]


def happen(drive: Drive, what: str, number: int) -> None:
    cluster = drive.cluster
    match what:
        case "deliver":
            drive.step(number)
        case "run on":
            # Without this step few examples come as far as an open iteration.
            for _ in range(number):
                drive.step()
        case "repeat" if events := repeatable(drive):
            drive.deliver(events[-1 - number % len(events)])
        case "lose commands":
            drive.num_losses, drive.num_done_before = 1, number % 4
        case "work":
            cluster.work()
        case "beat":
            drive.decide()
        case "show":
            cluster.show(list(Role)[number % len(Role)], eighths=number)
        case "kill worker":
            slots = sorted(cluster.store.gpus)
            cluster.kill_worker(slots[number % len(slots)])
        case "kill rank" | "kill rank, reported later" if slots := ranks_waited_for(drive):
            cluster.kill_worker(slots[number % len(slots)])
            if what == "kill rank":
                drive.deliver(cluster.outbox.pop())
        case "kill instance" | "kill instance unseen":
            names = sorted(cluster.instances)
            cluster.kill_instance(names[number % len(names)], tells=what == "kill instance")
        case "fail iteration":
            cluster.fail_iteration(list(Role)[number % len(Role)])
        case "lapse":
            cluster.lapse(sorted(cluster.instances)[number % len(cluster.instances)])
        case "move lead":
            cluster.move_lead(list(Role)[number % len(Role)])
        case "fail late" | "fail late, fatally":
            name = sorted(cluster.instances)[number % len(cluster.instances)]
            cluster.fail_late(name, fatal=what == "fail late, fatally")
        case "resize":
            cluster.voice.say("control", ev.ResizeRequested(PLACES[number]))
        case "fail resize":
            cluster.num_failing_resizes = 1
        case "restart":
            cluster.restart_dead()
        case "renew":
            cluster.renew()
        case _:
            pass


def ranks_waited_for(drive: Drive) -> list[GpuId]:
    """The GPUs of an actor that is past its start, each of which may die alone.

    Without it, one GPU remains of those that the actor has and one of those that it will have.
    """
    state = drive.state
    component, transition = state.components[Role.ACTOR], state.resize()
    if state.phase is not Phase.RUNNING or state.transition_of(Role.ACTOR) != transition:
        return []
    leaving, coming = state.moving(Role.ACTOR, transition) if transition is not None else ((), ())
    has = {grant for grant in component.grants if works(drive.cluster, grant)}
    will_have = {grant for grant in {*has, *coming} - set(leaving) if works(drive.cluster, grant)}
    return sorted(grant.gpu for grant in has | will_have if has - {grant} and will_have - {grant})


def works(cluster: FakeCluster, grant: Grant) -> bool:
    gate = cluster.gates[grant.gpu]
    return gate.is_held and gate.highest == grant.token


def finished(
    steps: list[tuple[str, int]],
    *,
    keeps_state: bool = True,
    policy: Policy | None = None,
    evaluate_every: int = NUM_ITERATIONS,
    has_supervisor: bool = True,
) -> Drive:
    """The job at its end, by the static policy unless `policy` is set. A job that stands still, with no event to
    come and no timer set, fails here."""
    job = spec(
        num_iterations=NUM_ITERATIONS,
        max_actor_restarts=3 * MAX_BLOWS,
        standby=SLOTS[2:],
        evaluate_every=evaluate_every,
    )
    drive = booted(FakeCluster(job, keeps_state=keeps_state, has_supervisor=has_supervisor))
    drive.policy = policy or drive.policy
    for what, number in steps:
        happen(drive, what, number)
    drive.run()
    return drive
