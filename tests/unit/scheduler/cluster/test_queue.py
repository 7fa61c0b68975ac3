"""The queue of a cluster: who is placed, who waits, who goes on, who has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cluster.queue import KEPT, MAX_INTERRUPTIONS, Cluster, Ran, in_turn, next_step, why_never
from tests.unit.cluster_jobs import NODES, submitted
from tidegate.cluster.placement import HostMemory, cluster_gpus
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.launcher.outcome import End
from tidegate.types import Drain, JobId, NodeId

QUEUED, PLACED, RUNNING, ENDED = SubmissionState
ALL = cluster_gpus(NODES)


def cluster(free: int = 8, **ran: Ran) -> Cluster:
    return Cluster(NODES, ALL[:free], {JobId(job): each for job, each in ran.items()})


def after(records: Iterable[Submission], there: Cluster) -> dict[str, Submission]:
    every: dict[str, Submission] = {each.job: each for each in records}
    return every | {each.job: each for each in next_step(every.values(), there).changed}


def running(job: str, starts: int = 1, num_gpus: int = 4) -> Submission:
    return replace(submitted(job, num_gpus), state=RUNNING, gpus=ALL[:num_gpus], starts=starts)


def test_two_jobs_that_fit_are_placed_on_different_gpus_and_the_third_waits() -> None:
    jobs = [submitted(name, at_ms=at) for at, name in enumerate(("a", "b", "c"))]
    step = next_step(jobs, cluster())
    found = {each.job: each for each in step.changed}
    assert [found[JobId(name)].gpus for name in "ab"] == [ALL[:4], ALL[4:]]
    assert [each.job for each in step.starts] == ["a", "b"]
    assert JobId("c") not in found, "a job that waits is not written again"


def test_a_higher_priority_goes_first_and_then_the_older() -> None:
    jobs = [submitted("old", 8, at_ms=1), submitted("high", 8, priority=2, at_ms=3), submitted("new", 8, at_ms=2)]
    found = after(jobs, cluster())
    assert found["high"].state is PLACED
    assert [each.job for each in in_turn(found.values())] == ["old", "new"]


def test_nobody_passes_the_head_of_the_queue() -> None:
    found = after([submitted("large", 8, at_ms=1), submitted("small", 3, at_ms=2)], cluster(free=7))
    assert {each.state for each in found.values()} == {QUEUED}


def test_a_job_keeps_its_gpus_until_no_process_of_it_lives() -> None:
    waiting = submitted("b", 8)
    cancelled = replace(running("a"), is_cancelled=True)
    step = next_step([cancelled, waiting], cluster(a=Ran(1)))
    assert [each.job for each in step.cancels] == ["a"]
    assert not step.starts
    assert not step.stops
    gone = next_step([cancelled, waiting], cluster(a=Ran(1, End.CANCELLED, "by hand")))
    found = {each.job: each for each in gone.changed}
    assert (found[JobId("a")].end, found[JobId("a")].gpus) == ("cancelled", ())
    assert found[JobId("b")].state is PLACED


def test_gpus_that_the_ownership_map_does_not_give_free_are_not_placed() -> None:
    assert after([submitted("a", 4)], cluster(free=3))["a"].state is QUEUED


def test_an_interrupted_job_goes_back_and_goes_on_from_its_checkpoint() -> None:
    busy = Cluster(NODES, (), {JobId("a"): Ran(1, End.INTERRUPTED, "the machine was switched off")})
    waiting = after([running("a")], busy)["a"]
    assert (waiting.state, waiting.treatment, waiting.starts) == (QUEUED, Treatment.RESUME, 1)
    again = after([waiting], cluster(a=Ran(1, End.INTERRUPTED)))["a"]
    assert (again.state, again.starts) == (PLACED, 2)
    assert next_step([again], cluster(a=Ran(1, End.INTERRUPTED))).starts == (again,)


def test_a_job_whose_agent_knows_nothing_of_it_any_more_goes_on_too() -> None:
    found = after([running("a", starts=2)], cluster())["a"]
    assert (found.state, found.treatment, found.starts) == (PLACED, Treatment.RESUME, 3)


def test_a_job_that_is_interrupted_again_and_again_ends_but_the_end_of_an_agent_is_no_interruption() -> None:
    last = replace(running("a", starts=9), interruptions=MAX_INTERRUPTIONS - 1)
    found = after([last], cluster(a=Ran(9, End.INTERRUPTED, "power")))["a"]
    over = f"power; not started again after 5 interruptions: go on with it by {last.command} --resume"
    assert (found.end, found.message) == ("interrupted", over)
    assert after([last], cluster())["a"].state is PLACED


@pytest.mark.parametrize(
    ("treatment", "option"), [(Treatment.FRESH, ""), (Treatment.FORCE, " --force"), (Treatment.RESUME, " --resume")]
)
def test_a_job_that_never_began_is_told_to_start_as_it_was_submitted(treatment: Treatment, option: str) -> None:
    """With --resume it would go on with the run that --force is to remove."""
    job = replace(running("a"), interruptions=MAX_INTERRUPTIONS - 2, treatment=treatment)
    ran = cluster(a=Ran(1, End.INTERRUPTED, "no Redis", has_begun=False))
    goes_on = treatment is Treatment.RESUME
    waits = after([job], ran)["a"]
    how = "goes on from its checkpoint" if goes_on else "is started again"
    assert waits.message == f"it was interrupted (no Redis), and {how}"
    over = after([replace(job, interruptions=waits.interruptions)], ran)["a"]
    remedy = f"{'go on with it' if goes_on else 'start it'} by {job.command}{option}"
    assert over.message == f"no Redis; not started again after 5 interruptions: {remedy}"


def test_a_job_that_ends_at_once_is_started_later_each_time() -> None:
    job, now_ms, waits_s = submitted("a"), 0, []
    while job.state is not ENDED:
        asked_ms = now_ms
        job = after([job], Cluster(NODES, ALL, {}, now_unix_ms=now_ms))["a"]
        while job.state is QUEUED:
            now_ms += 1000
            job = after([job], Cluster(NODES, ALL, {}, now_unix_ms=now_ms))["a"]
        waits_s.append((now_ms - asked_ms) / 1000)
        ran = {job.job: Ran(job.starts, End.INTERRUPTED, "power")}
        job = after([job], Cluster(NODES, (), ran, now_unix_ms=now_ms))["a"]
    assert waits_s == [0, 0, 2, 4, 8]
    assert len(waits_s) == MAX_INTERRUPTIONS


def test_a_start_that_brought_the_job_further_ends_the_row_of_its_interruptions() -> None:
    last = replace(running("a", starts=9), interruptions=MAX_INTERRUPTIONS - 1, iteration=7)
    for iteration, want in ((7, ("ended", MAX_INTERRUPTIONS - 1)), (8, ("queued", 1))):
        ran = {last.job: Ran(9, End.INTERRUPTED, "power", iteration=iteration)}
        found = after([last], Cluster(NODES, (), ran))["a"]
        assert (found.state, found.interruptions) == want
    assert found.iteration == 8


def test_a_checkpoint_counts_whatever_ended_the_start_that_made_it() -> None:
    last = replace(running("a", starts=9), interruptions=MAX_INTERRUPTIONS - 1, iteration=3)
    ran = {last.job: Ran(9, End.INTERRUPTED, "power", iteration=10)}
    moved = after([last], Cluster(NODES, (), ran, drained={NodeId("n0"): Drain.LEAVE}, now_unix_ms=5))["a"]
    assert (moved.interruptions, moved.iteration, moved.resumes_unix_ms) == (0, 10, 5)
    not_begun = {last.job: Ran(9, End.INTERRUPTED, "power", has_begun=False, iteration=10)}
    assert after([last], Cluster(NODES, (), not_begun, drained={NodeId("n0"): Drain.LEAVE}))["a"].iteration == 3


def test_a_cancelled_job_whose_launcher_died_has_the_persons_reason() -> None:
    alive = replace(running("a"), is_cancelled=True, reason="too dear")
    found = after([alive], cluster(a=Ran(1, End.INTERRUPTED, "its launcher was killed")))["a"]
    assert (found.end, found.message) == ("cancelled", "cancelled while it ran: too dear")


def test_a_clock_that_was_set_holds_nobody_up() -> None:
    for now_ms in (0, 10**12):
        waits = replace(submitted("a"), resumes_unix_ms=10**11, interruptions=2)
        assert after([waits], Cluster(NODES, ALL, {}, now_unix_ms=now_ms))["a"].state is PLACED


def test_a_job_that_has_no_room_in_a_cluster_that_came_back_waits_for_a_larger_one_and_holds_nobody_up() -> None:
    large = submitted("large", 9, priority=1)
    found = after([large, submitted("small", 3)], cluster())
    assert (found["large"], found["small"].state) == (large, PLACED)
    told = "this cluster has no room for it: it needs 9 GPUs on a node; n0 has 8"
    assert why_never(large.needs, NODES) == told
    larger = {NodeId("n0"): 9}
    assert after([large], Cluster(larger, cluster_gpus(larger), {}))["large"].state is PLACED


def test_a_job_that_only_nodes_that_are_out_have_room_for_is_told_so() -> None:
    nodes = {NodeId("n0"): 4, NodeId("n1"): 4, NodeId("n2"): 2}
    n0, n1 = {NodeId("n0")}, {NodeId("n1")}
    assert why_never((3,), nodes, drained=n0, away=n1) == "n0 is drained (tidegate drain NODE --undo); n1 is away"
    assert why_never((3,), nodes, drained={*n0, NodeId("n2")}, away=n1).startswith("n0 is drained"), "n2 has no room"
    assert why_never((3, 3), nodes, drained=n0, away={NodeId("n2")}) == "n0 is drained (tidegate drain NODE --undo)"
    assert why_never((3,), nodes, drained=n0 | n1) == "n0, n1 are drained (tidegate drain NODE --undo)"
    assert not why_never((2,), nodes, drained=n0, away=n1)


def test_a_job_whose_machine_is_away_for_long_goes_on_elsewhere_and_that_counts_as_no_interruption() -> None:
    nodes = {NodeId("n0"): 4, NodeId("n1"): 4}
    free, n0 = cluster_gpus({NodeId("n1"): 4}), frozenset([NodeId("n0")])
    step = next_step([running("a")], Cluster(nodes, free, {JobId("a"): Ran(1)}, lost=n0))
    assert step.stops == ("a",)
    (leaving,) = step.changed
    assert (leaving.state, leaving.message) == (RUNNING, "is interrupted: the machine of its node n0 is away")
    # The machine is back before the launcher has ended.
    assert next_step([leaving], Cluster(nodes, free, {JobId("a"): Ran(1)})).stops == ("a",)
    late = after([leaving], Cluster(nodes, free, {JobId("a"): Ran(1, End.INTERRUPTED)}))["a"]
    assert (late.state, late.interruptions, late.leaves) == (PLACED, 0, "")
    there = Cluster(nodes, free, {JobId("a"): Ran(1, End.INTERRUPTED)}, lost=n0)
    moved = after([running("a")], there)["a"]
    assert (moved.state, moved.gpus, moved.interruptions) == (PLACED, free, 0)
    assert moved.treatment is Treatment.RESUME
    none_free = replace(there, free=cluster_gpus({NodeId("n0"): 4}))
    waits = after([running("a")], none_free)["a"]
    assert (waits.state, waits.message) == (
        QUEUED,
        "it was interrupted (the machine of its node n0 is away), and goes on from its checkpoint",
    )


def test_a_cancelled_job_whose_machine_is_away_for_long_is_stopped_as_well() -> None:
    """Its scheduler would wait there for processes to end."""
    cancelled = replace(running("a"), is_cancelled=True)
    step = next_step([cancelled], Cluster(NODES, (), {JobId("a"): Ran(1)}, lost={NodeId("n0")}))
    assert ([each.job for each in step.cancels], step.stops) == (["a"], ("a",))
    assert not next_step([cancelled], cluster(a=Ran(1))).stops


def test_a_start_that_has_not_begun_is_repeated_as_it_was_asked_for() -> None:
    """One with --force, which has removed nothing yet, may not go on with what it should remove."""
    before = replace(running("a"), treatment=Treatment.FORCE)
    for has_begun, treatment in ((False, Treatment.FORCE), (True, Treatment.RESUME)):
        found = after([before], cluster(a=Ran(1, End.INTERRUPTED, "away", has_begun=has_begun)))["a"]
        assert (found.state, found.starts, found.treatment) == (PLACED, 2, treatment)


def test_a_drained_node_gets_no_job_and_what_runs_on_it_goes_on_elsewhere() -> None:
    nodes = {NodeId("n0"): 4, NodeId("n1"): 4}
    free = cluster_gpus(nodes)
    before = replace(running("a"), interruptions=MAX_INTERRUPTIONS - 1)
    waits = submitted("b", 4)

    def there(end: End | None = None, *, is_drained: bool = True) -> Cluster:
        drained = {NodeId("n0"): Drain.LEAVE} if is_drained else {}
        return Cluster(nodes, free, {JobId("a"): Ran(1, end)}, drained)

    step = next_step([before, waits], there())
    assert step.stops == ("a",)
    assert not step.cancels
    assert [(each.job, each.gpus) for each in step.changed] == [("a", before.gpus), ("b", free[4:])]
    before, waits = step.changed
    gone = after([before, waits], there(End.INTERRUPTED))["a"]
    assert (gone.state, gone.treatment, gone.gpus) == (QUEUED, Treatment.RESUME, ())
    assert gone.interruptions == before.interruptions, "a drain is none"
    assert after([gone], there(End.INTERRUPTED))["a"].gpus == free[4:]
    back = after([gone, waits], there(End.INTERRUPTED, is_drained=False))["a"]
    assert back.gpus == free[:4]


def test_a_job_of_a_node_that_keeps_its_jobs_stays_until_it_ends() -> None:
    nodes = {NodeId("n0"): 4}
    free, drained = cluster_gpus(nodes), {NodeId("n0"): Drain.STAY}
    stays, waits = running("a"), submitted("b")

    def there(end: End | None = None) -> Cluster:
        return Cluster(nodes, free, {JobId("a"): Ran(1, end)}, drained)

    step = next_step([stays, waits], there())
    assert (step.changed, step.stops, step.starts) == ((), (), ())
    fell = after([stays, waits], there(End.INTERRUPTED))["a"]
    assert (fell.state, fell.interruptions) == (QUEUED, 1)
    assert after([stays, waits], there(End.FINISHED))["a"].state == ENDED
    assert after([fell, waits], there(End.INTERRUPTED)) == {"a": fell, "b": waits}, "nothing starts there"


def test_while_the_queue_is_paused_no_job_starts_and_what_runs_goes_on() -> None:
    nodes = {NodeId("n0"): 8}
    free, ran = cluster_gpus(nodes), {JobId("a"): Ran(1)}
    runs, waits = running("a"), submitted("b", 1)
    paused = Cluster(nodes, free, ran, is_paused=True)
    step = next_step([runs, waits], paused)
    assert (step.changed, step.stops, step.starts) == ((), (), ())
    placed = after([runs, waits], replace(paused, is_paused=False))["b"]
    assert placed.state is PLACED
    assert next_step([runs, placed], paused).starts == (placed,), "it was placed before"


def test_an_ended_job_stays_and_what_still_runs_of_it_is_stopped() -> None:
    over = replace(submitted("a"), state=ENDED, end="cancelled", starts=1)
    step = next_step([over], cluster(a=Ran(1), stranger=Ran(3)))
    assert not step.changed
    assert step.stops == ("a", "stranger")


def test_an_ended_job_is_cleared_once_no_process_of_it_lives_and_the_oldest_records_go() -> None:
    over = replace(submitted("a"), state=ENDED, end="failed", starts=1)
    assert not next_step([over], cluster(a=Ran(1))).clears
    assert next_step([over], cluster(a=Ran(1, End.FAILED))).clears == (over,)
    many = [
        replace(submitted(f"j{at}", at_ms=at), state=ENDED, end="failed", is_cleared=True) for at in range(KEPT + 2)
    ]
    step = next_step(many, cluster())
    assert step.dropped == ("j0", "j1")
    assert not step.clears
    step = next_step(many, cluster(j0=Ran(1, End.FINISHED)))
    assert step.dropped == ("j1",), "the agent knows its start 1, which a new record of it would have too"


def test_a_cancelled_job_that_waits_ends_at_once() -> None:
    found = after([replace(submitted("a"), is_cancelled=True)], cluster())["a"]
    assert (found.state, found.end) == (ENDED, "cancelled")


def test_a_cancelled_job_ends_with_the_persons_reason() -> None:
    waits = replace(submitted("a"), is_cancelled=True, reason="too dear")
    assert after([waits], cluster())["a"].message == "cancelled while it waited: too dear"
    alive = replace(running("a"), is_cancelled=True, reason="too dear")
    assert [each.reason for each in next_step([alive], cluster(a=Ran(1))).cancels] == ["too dear"]


def test_an_old_start_that_still_runs_is_stopped_before_the_new_one_counts() -> None:
    placed = replace(submitted("a"), state=PLACED, gpus=ALL[:4], starts=2)
    step = next_step([placed], cluster(a=Ran(1)))
    assert step.stops == ("a",)
    assert not step.changed


@given(st.data())
def test_no_gpu_has_two_jobs_and_deciding_again_changes_nothing(data: st.DataObject) -> None:
    names = "abcde"
    records: Mapping[str, Submission] = {
        name: replace(
            submitted(name, data.draw(st.integers(3, 8)), priority=data.draw(st.integers(0, 1)), at_ms=at),
            node_bytes=data.draw(st.integers(0, 6)),
        )
        for at, name in enumerate(names)
    }
    ran: dict[JobId, Ran] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        free = [gpu for gpu in ALL if data.draw(st.booleans())]
        there = Cluster(NODES, free, ran, memory=(HostMemory(tuple(NODES), 10),))
        records = after(records.values(), there)
        held = [gpu for each in records.values() for gpu in each.gpus]
        assert len(held) == len({*held})
        assert sum(each.node_bytes for each in records.values() if each.gpus) <= 10
        step = next_step(records.values(), there)
        assert not step.changed
        for each in step.starts:
            if data.draw(st.booleans()):
                ran[each.job] = Ran(each.starts)
        for job in [*ran]:
            if data.draw(st.booleans()):
                ran[job] = replace(ran[job], end=data.draw(st.sampled_from(End)))
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(names))
            records = {**records, name: replace(records[name], is_cancelled=True)}


def test_a_submission_with_force_stays_one_where_nobody_knows_whether_it_has_begun() -> None:
    lost = after([replace(running("a"), treatment=Treatment.FORCE)], cluster(free=0))["a"]
    assert (lost.state, lost.treatment) == (QUEUED, Treatment.FORCE)
    begun = after(
        [replace(running("a"), treatment=Treatment.FORCE)],
        replace(cluster(free=0), ran={JobId("a"): Ran(1, End.INTERRUPTED)}),
    )["a"]
    assert begun.treatment is Treatment.RESUME


def test_a_job_waits_for_host_memory_as_for_gpus() -> None:
    """`a` and `b` fit side by side by their GPUs, and not by their memory."""
    jobs = [replace(submitted(name, at_ms=at), node_bytes=6) for at, name in enumerate(("a", "b"))]
    there = replace(cluster(), memory=(HostMemory(tuple(NODES), 10),))
    found = after(jobs, there)
    assert [found[name].state for name in "ab"] == [PLACED, QUEUED]
    ran = {JobId("a"): Ran(1, End.FINISHED)}
    over = after(after([replace(found["a"], state=RUNNING), found["b"]], replace(there, ran=ran)).values(), there)
    assert (over["a"].state, over["b"].state) == (ENDED, PLACED)


def test_a_job_that_needs_more_host_memory_than_there_is_any_more_waits_and_the_numbers_are_told() -> None:
    there = replace(cluster(), memory=(HostMemory(tuple(NODES), 2 << 30),))
    waits = replace(submitted("a"), node_bytes=3 << 30)
    assert after([waits], there)["a"] == waits
    assert why_never(waits.needs, NODES, there.memory, node_bytes=waits.node_bytes) == (
        "this cluster has no room for it: it needs 4 GPUs on a node, each with 3.0 GiB of host memory; n0 has 8; "
        "n0 has 2.0 GiB"
    )
