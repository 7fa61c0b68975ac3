"""The scheduler's shell on bus and store in memory: whole jobs, replicas side by side and after one another."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from services.scheduler.decide.turn import StateBroken
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state.cluster_state import TERMINAL, ClusterState, Phase
from services.scheduler.state.observed import Pictures, Training
from tests.component_bench import JOB, NODES, PATIENCE_S
from tests.unit.scheduler.wire_cluster import WatchedStore, WireCluster, running, wire_cluster
from tidegate.adapters import tables
from tidegate.moves_log import read_moves
from tidegate.ownership.records import StoreUnavailable
from tidegate.ports.bus import EventDelivery, StreamFull
from tidegate.ports.store import Identity, JobState
from tidegate.types import CommandId, Grant, JobId, Role, Token, instance_id
from tidegate.v1 import commands_pb2, events_pb2

NUM_ITERATIONS = 3


async def ended(of: WireCluster) -> Phase:
    """The phase in which the job ended, once it has ended."""
    await of.changes.until(lambda: of.written_state().phase in TERMINAL)
    return of.written_state().phase


async def assert_whole_job(of: WireCluster) -> None:
    """The job finished, every command went out once, and every role took every iteration once."""
    assert await ended(of) is Phase.FINISHED
    state = of.written_state()
    assert [(each.iteration, each.num_lost, each.num_duplicates) for each in state.summaries] == [
        (iteration, 0, 0) for iteration in range(NUM_ITERATIONS)
    ]
    ids = Counter(request.header.id for request in of.sent)
    assert {name: count for name, count in ids.items() if count != 1} == {}
    opened = [request.plan.iteration for request in of.sent if isinstance(request, commands_pb2.OpenIterationRequest)]
    assert Counter(opened) == dict.fromkeys(range(NUM_ITERATIONS), len(Role))


async def event_with(of: WireCluster, body: str) -> events_pb2.Event:
    """The first event with this body, once it comes."""
    async with asyncio.timeout(PATIENCE_S), aclosing(of.bus.events.read(JOB, follow=True)) as events:
        async for _, event in events:
            if event.WhichOneof("body") == body:
                return event
    raise AssertionError("the stream ended")


async def test_one_replica_runs_a_job_from_its_submission_to_its_end(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        service = await of.replica()
        async with running(service):
            await assert_whole_job(of)
            assert service.reason, "a decision has its reason, also the one that does nothing"
        records = await (await of.client()).gpus()
        assert {record.state for record in records.values()} == {"free"}


@pytest.mark.parametrize(
    ("passed", "want"),
    [(Token(7, 1), 8), (Token(1, 1), 2), (None, 1)],
    ids=["of a larger term", "of the same term, which the store granted nobody", "none"],
)
async def test_before_anything_is_decided_the_store_is_adopted_above_a_token_of_a_gate_that_the_store_has_lost(
    tmp_path: Path, passed: Token | None, want: int
) -> None:
    async with wire_cluster(tmp_path) as of:
        of.gates = () if passed is None else (Grant(of.config.placement(Role.ACTOR)[0], passed),)
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await assert_whole_job(of)
        assert of.server.identity.term == want
        assert (await of.bus.term.read())[0] == want
        ups = [request for request in of.sent if isinstance(request, commands_pb2.ScaleUpRequest)]
        assert {grant.token.term for request in ups for grant in request.grants} == {want}


async def test_a_job_goes_on_from_one_structural_event_to_the_next_however_seldom_progress_is_decided_on(
    tmp_path: Path,
) -> None:
    async with wire_cluster(tmp_path) as of:
        of.decide_every_s = 3600.0
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await assert_whole_job(of)


async def test_a_job_leaves_a_log_of_its_decisions_moves_and_iterations(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await assert_whole_job(of)
        lines = read_moves(of.moves)
    reported = [line["iteration"] for line in lines if line["kind"] == "reported"]
    assert reported == list(range(NUM_ITERATIONS))
    closed = [(line["parts"][0]["role"], line["parts"][0]["kind"]) for line in lines if line["kind"] == "closed"]
    assert sorted(closed) == sorted((role, kind) for role in Role for kind in ("start", "stop"))


async def test_the_results_of_an_iterations_commands_are_forgotten_with_it(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        store = await of.client()
        early = CommandId(f"{JOB}/1/i0/open/actor/e1/a0")
        await store.remember(JOB, early, b"done")
        async with running(await of.replica()):
            await assert_whole_job(of)
        assert await store.recall(JOB, early) is None


async def test_a_log_that_cannot_be_written_stops_no_job(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        of.moves.mkdir()
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await assert_whole_job(of)


async def test_progress_is_written_and_not_decided_on_before_its_time(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        of.decide_every_s = 3600.0
        of.does_iterations = False
        await of.boot()
        await of.submit()
        store = await of.client()
        async with running(await of.replica(store=store)):
            await of.changes.until(lambda: is_open(of.written_state()))
            num_reads, rollout = store.num_ownership_reads, instance_id(Role.ROLLOUT, NODES[0])
            for number in range(40):
                progress = events_pb2.Progress(phase="generate", num_done=number, num_total=40)
                await of.announcer(rollout, Role.ROLLOUT).publish(progress, incarnation=1)
            await of.changes.until(lambda: num_done(of.written_state()) == 39)
            assert store.num_ownership_reads <= num_reads + 2, "a beat may come before and after them"


async def test_whoever_waits_for_a_change_is_woken_by_the_next_structural_one_and_by_no_progress(
    tmp_path: Path,
) -> None:
    async with wire_cluster(tmp_path) as of:
        of.does_iterations = False
        await of.boot()
        await of.submit()
        service = await of.replica()
        async with running(service):
            await of.changes.until(lambda: is_open(of.written_state()))
            before = service.state
            assert before is not None
            waiting = asyncio.create_task(service.changed(PATIENCE_S))
            rollout = instance_id(Role.ROLLOUT, NODES[0])
            progress = events_pb2.Progress(phase="generate", num_done=39, num_total=40)
            await of.announcer(rollout, Role.ROLLOUT).publish(progress, incarnation=1)
            await of.changes.until(lambda: num_done(of.written_state()) == 39)
            assert not waiting.done()
            await of.announcer("control").publish(events_pb2.JobCancelRequested(reason="enough"), incarnation=1)
            await waiting
            assert service.state is not None
            assert service.state.version > before.version


async def test_whoever_waits_for_a_change_is_answered_at_the_end_of_the_replica_and_after_its_time(
    tmp_path: Path,
) -> None:
    async with wire_cluster(tmp_path) as of:
        service = await of.replica()
        await service.changed(0.0)
        waiting, stopping = asyncio.create_task(service.changed(PATIENCE_S)), asyncio.Event()
        stopping.set()
        await service.run(stopping)
        await waiting


async def test_events_that_wait_are_applied_together_and_once(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        writes: list[int] = []

        def count(delivery: EventDelivery) -> bool:
            writes.append(of.written_state().applied_seq)
            return True

        of.before_ack = count
        await of.boot()
        await of.submit()
        num_waiting = len([event async for event in of.bus.events.read(JOB)])
        async with running(await of.replica()):
            await assert_whole_job(of)
        assert writes[0] == num_waiting, "with the first delivery"
        assert not of.written_state().ignored, "their own deliveries change nothing"


async def test_figures_are_folded_before_the_event_that_comes_after_them_and_wake_nobody(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        of.decide_every_s = 3600.0
        of.does_iterations = False
        delivered: list[str | None] = []

        def note(delivery: EventDelivery) -> bool:
            delivered.append(delivery.event.WhichOneof("body"))
            return True

        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await of.changes.until(lambda: is_open(of.written_state()))
            of.before_ack = note
            rollout = instance_id(Role.ROLLOUT, NODES[0])
            for number in range(40):
                progress = events_pb2.Progress(phase="generate", num_done=number, num_total=40)
                await of.announcer(rollout, Role.ROLLOUT).publish(progress, incarnation=1)
            await of.announcer("control").publish(events_pb2.JobCancelRequested(reason="enough"), incarnation=1)
            assert await ended(of) is Phase.CANCELLED
        assert num_done(of.written_state()) == 39
        assert "progress" not in delivered
        assert "job_cancel_requested" in delivered


def is_open(state: ClusterState) -> bool:
    return state.iteration is not None and len(state.iteration.opened) == len(Role)


def num_done(state: ClusterState) -> int:
    return state.progress[Role.ROLLOUT].num_done if Role.ROLLOUT in state.progress else 0


async def test_two_replicas_side_by_side_send_every_command_once(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica()), running(await of.replica()):
            await assert_whole_job(of)


async def test_a_replica_finishes_what_another_left_in_the_middle(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        opened = commands_pb2.OpenIterationRequest
        async with running(await of.replica()):
            await of.changes.until(lambda: any(isinstance(request, opened) for request in of.sent))
        num_sent_by_the_first = len(of.sent)
        async with running(await of.replica()):
            assert await ended(of) is Phase.FINISHED
        assert len(of.sent) > num_sent_by_the_first


async def test_an_event_whose_acknowledgement_was_lost_is_applied_once(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        seen: Counter[int] = Counter()

        def lose_the_first(delivery: EventDelivery) -> bool:
            seen[delivery.sequence] += 1
            return seen[delivery.sequence] > 1

        of.before_ack = lose_the_first
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await assert_whole_job(of)
            await of.changes.until(lambda: set(seen.values()) == {2})
        assert len(seen) == len([event async for event in of.bus.events.read(JOB)])
        assert not of.written_state().ignored, "the second delivery of an event changes nothing"


async def test_an_event_is_acknowledged_after_the_state_that_holds_it_is_written(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        written: list[int] = []

        def is_written(delivery: EventDelivery) -> bool:
            written.append(of.written_state().applied_seq - delivery.sequence)
            return True

        of.before_ack = is_written
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await assert_whole_job(of)
        assert len(written) > 10
        assert min(written) >= 0


async def test_a_command_goes_out_after_the_state_says_that_it_was_issued(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:

        def is_expected(request: object) -> None:
            header = request.header  # type: ignore[attr-defined]
            assert any(header.id.startswith(key) for key in of.written_state().expectations), header.id

        of.before_send = is_expected
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await assert_whole_job(of)


async def test_a_state_that_breaks_an_invariant_is_never_written(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        broken = encode_state(replace(ClusterState(job=JOB), seen=Pictures(training=Training())))
        await (await of.client()).save(JOB, broken, expected_write=0, version=0)
        name = instance_id(Role.ACTOR, NODES[0])
        joined = events_pb2.InstanceJoined(instance=name, endpoint=f"at-{name}", boot=1)
        await of.announcer(name, Role.ACTOR).publish(joined, incarnation=0)
        service = await of.replica()
        with pytest.raises(StateBroken, match="pictures are of an open iteration"):
            await asyncio.wait_for(service.run(asyncio.Event()), PATIENCE_S)
        assert encode_state(of.written_state()) == broken


async def test_a_replica_that_can_publish_nothing_ends_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        publish = of.bus.events.publish

        async def takes_none_of_the_schedulers(event: events_pb2.Event) -> int:
            if event.source == "scheduler":
                raise StreamFull("make room")
            return await publish(event)

        monkeypatch.setattr(of.bus.events, "publish", takes_none_of_the_schedulers)
        with pytest.raises(StreamFull, match="make room"):
            await asyncio.wait_for((await of.replica()).run(asyncio.Event()), PATIENCE_S)


async def test_a_state_that_another_wrote_meanwhile_is_read_again(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        service = await of.replica()
        async with running(service):
            await of.changes.until(lambda: service.state is not None and service.state.applied_seq == 9)
            other = await of.client()
            held = await other.load(JOB)
            assert held is not None
            await other.save(JOB, held.payload, expected_write=held.write, version=held.version)
            await of.submit()
            await assert_whole_job(of)


async def test_a_lost_answer_of_the_store_costs_nothing(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        of.server.num_answers_to_lose = 2
        async with running(await of.replica()):
            assert await ended(of) is Phase.FINISHED
        assert of.server.num_answers_to_lose == 0


async def test_a_store_that_nobody_adopted_is_adopted_first(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path, adopted=False) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica(store=of.detached_client())):
            await event_with(of, "layout_committed")
            assert of.server.identity.is_open
            await assert_whole_job(of)


class _GoesAwayWhenAdopted(WatchedStore):
    """The server restarts once more between its adoption and the adopter's return to it."""

    def __init__(self, of: WireCluster) -> None:
        super().__init__(of.server, of.changes)
        self._server = of.server
        self._has_gone_away = False

    async def attach(self) -> Identity:
        if not self._has_gone_away:
            self._has_gone_away = True
            self._server.restart()
        return await super().attach()


async def test_a_store_that_goes_away_again_while_it_is_adopted_is_adopted_anew(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path, adopted=False) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica(store=_GoesAwayWhenAdopted(of))):
            assert await ended(of) is Phase.FINISHED


class _RestartsWhenSaved(WatchedStore):
    """The server gives no answer to the first state with a submitted job, and is there again as another start."""

    def __init__(self, of: WireCluster) -> None:
        super().__init__(of.server, of.changes)
        self._server = of.server
        self._has_restarted = False

    async def save(self, job: JobId, payload: bytes, *, expected_write: int, version: int) -> JobState:
        if not self._has_restarted and decode_state(payload).spec is not None:
            self._has_restarted = True
            self._server.restart()
            raise StoreUnavailable("the server went away")
        return await super().save(job, payload, expected_write=expected_write, version=version)


async def test_a_store_that_restarts_after_it_gave_no_answer_is_adopted_by_what_the_gates_say(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        store = _RestartsWhenSaved(of)
        await store.attach()
        service = await of.replica(store=store)
        async with running(service):
            await of.changes.until(lambda: service.state is not None and service.state.applied_seq == 9)
            await of.submit()
            assert await ended(of) is Phase.FINISHED
    assert [len(instances) for instances in of.gates_asked_of] == [len(Role) * len(NODES)]


async def test_an_instance_whose_lease_expired_is_reported_lost_once(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        store, name = await of.client(), instance_id(Role.ACTOR, NODES[0])
        await store.renew(JOB, name, ttl_ms=10)
        of.server.pass_ms(11)
        await of.boot()
        async with running(await of.replica()):
            lost = await event_with(of, "instance_lost")
            assert lost.instance_lost == events_pb2.InstanceLost(instance=name, boot=1)
            assert lost.source == "scheduler"
            await of.changes.until(lambda: not of.written_state().instances[name].living)
        assert await store.expired(JOB, longest_ms=60_000) == ()


async def test_the_lease_of_an_instance_that_is_counted_as_lost_is_cleared_so_that_it_learns_of_it(
    tmp_path: Path,
) -> None:
    async with wire_cluster(tmp_path) as of:
        store, name = await of.client(), instance_id(Role.ACTOR, NODES[0])
        await of.boot()
        await store.renew(JOB, name, ttl_ms=60_000)
        lost = events_pb2.InstanceLost(instance=name, boot=1)
        await of.announcer("scheduler").publish(lost, incarnation=0)
        async with running(await of.replica()):
            lease = tables.lease_cell(JOB, name)
            await of.changes.until(lambda: of.server.read_cell(lease) is None)


async def test_an_event_that_cannot_be_understood_is_dead_lettered_and_the_job_goes_on(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        wrong = events_pb2.JobSubmitted(config_json='{"job": "bench", "colour": 3}')
        await of.announcer("launcher").publish(wrong, incarnation=1)
        async with running(await of.replica()):
            letter = (await event_with(of, "dead_lettered")).dead_lettered
            assert "JobSubmitted.config_json" in letter.reason
            assert "unknown key 'colour'" in letter.reason
            kept = await of.bus.dead_letters.list(JOB)
            assert [each.id for each in kept] == [letter.dead_letter]
            await of.bus.dead_letters.drop(JOB, letter.dead_letter)
            await of.changes.until(lambda: of.written_state().phase is Phase.PAUSED)
            await of.announcer("control").publish(events_pb2.JobResumeRequested(), incarnation=1)
            await of.submit()
            assert await ended(of) is Phase.FINISHED


async def test_a_job_whose_state_the_store_lost_goes_on_from_the_stream_in_a_new_incarnation(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await of.changes.until(lambda: len(of.written_state().summaries) >= 1)
        of.server.lose_data()
        async with running(await of.replica(store=of.detached_client())):
            name = instance_id(Role.ACTOR, NODES[0])
            elected = events_pb2.LeadElected(instance=name, endpoint=f"at-{name}", epoch=2)
            await of.announcer(name, Role.ACTOR).publish(elected, incarnation=0)
            assert await ended(of) is Phase.FINISHED
        state = of.written_state()
        assert state.incarnation == 2
        lineage = [each.iteration for each in state.summaries if not each.is_superseded]
        assert lineage == list(range(NUM_ITERATIONS))
        assert [each.incarnation for each in state.summaries if each.is_superseded][:1] == [1]


async def test_a_state_that_the_store_lost_is_made_again_though_no_event_comes(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        of.does_iterations = False
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await of.changes.until(lambda: is_open(of.written_state()))
        of.server.lose_data()
        async with running(await of.replica(store=of.detached_client())):
            await of.changes.until(lambda: of.written_state().incarnation == 2)


async def test_a_resume_after_a_stop_counts_no_restart(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        of.does_iterations = False
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await of.changes.until(lambda: is_open(of.written_state()))
        name = instance_id(Role.ACTOR, NODES[0])
        await of.announcer(name, Role.ACTOR).publish(events_pb2.InstanceLost(instance=name, boot=1), incarnation=1)
        of.start_again()
        of.does_iterations = True
        store = of.detached_client()
        num_events = len([event async for event in of.bus.events.read(JOB)])
        async with running(await of.replica(store=store)):
            await of.changes.until(lambda: of.written_state().applied_seq == num_events)
            assert (store.num_ownership_reads, of.sent) == (0, [])
            await of.boot()
            await of.submit(resume=True)
            await of.changes.until(lambda: not of.written_state().is_of_start_before(of.start))
            state = of.written_state()
            assert (state.num_restarts, state.message) == (0, "resumes from the beginning: there is no checkpoint yet")
            assert await ended(of) is Phase.FINISHED
            assert of.written_state().num_restarts == 0


async def test_a_replica_stops_when_asked_to_and_waits_for_nobody(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        service = await of.replica()
        stopping = asyncio.Event()
        task = asyncio.create_task(service.run(stopping))
        await of.changes.until(lambda: service.state is not None and service.state.applied_seq >= 1)
        stopping.set()
        await asyncio.wait_for(task, PATIENCE_S)
        assert task.done()
