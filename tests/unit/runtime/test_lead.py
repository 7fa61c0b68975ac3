"""The common part of every lead: commands in order and once, iterations that a newer one ends, failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.component_bench import JOB, NODES, Bench, bench, snapshot
from tests.unit.runtime.diary import Diary, DiaryLead, Idle
from tidegate.codec import decode_grants, encode_grants
from tidegate.runtime.crew import WorkerGone, WorkerRefused, WorkerUnreachable
from tidegate.runtime.lead import CommandRefused
from tidegate.runtime.worker import CallRefused
from tidegate.types import Role
from tidegate.v1 import commands_pb2, events_pb2


class Leading:
    def __init__(self, opened: Bench[DiaryLead, Idle]) -> None:
        self.bench = opened
        self.lead = opened.new_lead()

    def load(self, version: int, *, incarnation: int = 1) -> commands_pb2.LoadWeightsRequest:
        header = self.bench.header(incarnation=incarnation)
        return commands_pb2.LoadWeightsRequest(header=header, weights=snapshot(version))

    def close(self, iteration: int) -> commands_pb2.CloseIterationRequest:
        return commands_pb2.CloseIterationRequest(header=self.bench.header(), iteration=iteration)

    async def until(self, *lines: str) -> None:
        await self.bench.changes.until(lambda: self.lead.diary[-len(lines) :] == list(lines))

    async def failed(self) -> events_pb2.Event:
        return (await self.bench.published("failed"))[-1]


@asynccontextmanager
async def leading(tmp_path: Path) -> AsyncIterator[Leading]:
    diary = Diary()
    async with bench(tmp_path, Role.INFERENCE, diary.make_lead, diary.make_worker) as opened:
        diary.changes = opened.changes
        yield Leading(opened)


async def test_commands_are_worked_on_in_the_order_in_which_they_were_taken(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        for version in range(4):
            of.lead.take(of.load(version))
        await of.until("load 0", "load 1", "load 2", "load 3")


async def test_a_command_that_comes_again_is_worked_on_once(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        command = of.load(1)
        of.lead.take(command)
        of.lead.take(command)
        of.lead.take(of.load(2))
        await of.until("load 1", "load 2")
        of.lead.take(command)
        of.lead.take(of.load(3))
        await of.until("load 1", "load 2", "load 3")


async def test_work_that_an_earlier_lead_left_running_is_ended_before_the_first_command(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.scale_up())
        await of.bench.published("layout_committed")
        await of.lead.aclose()
        heir = of.bench.new_lead()
        heir.take(of.load(1))
        await of.bench.changes.until(lambda: heir.diary == ["supersede", "supersede", "load 1"])
        assert set(heir.crew.members) == set(of.bench.grants())


async def test_a_command_of_an_older_incarnation_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.load(1, incarnation=3))
        await of.until("load 1")
        old = of.load(2, incarnation=2)
        with pytest.raises(CommandRefused, match=f"{old.header.id} is of incarnation 2, the component is at 3"):
            of.lead.check(old)
        of.lead.check(of.load(2, incarnation=3))


async def test_a_newer_incarnation_ends_the_iteration_that_was_running(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.open_iteration())
        await of.until("begin 0")
        of.lead.take(of.load(1, incarnation=2))
        await of.until("cancel 0", "supersede", "load 1")
        assert of.lead.incarnation == 2


async def test_an_iteration_that_opens_ends_the_one_before(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.open_iteration(0))
        await of.until("begin 0")
        of.lead.take(of.bench.open_iteration(1))
        await of.until("cancel 0", "supersede", "begin 1")
        assert of.lead.iteration == 1


async def test_an_iteration_that_ended_by_itself_is_not_superseded(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.may_end.set()
        of.lead.take(of.bench.open_iteration(0))
        of.lead.take(of.close(0))
        of.lead.take(of.bench.open_iteration(1))
        await of.until("begin 0", "end 0", "close 0", "begin 1", "end 1")


async def test_other_commands_are_worked_on_while_an_iteration_runs(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.open_iteration())
        of.lead.take(of.load(1))
        await of.bench.changes.until(lambda: {"begin 0", "load 1"} <= set(of.lead.diary))
        assert "end 0" not in of.lead.diary


async def test_closing_waits_until_the_iteration_is_done(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.open_iteration())
        of.lead.take(of.close(0))
        await of.until("begin 0")
        of.lead.may_end.set()
        await of.until("begin 0", "end 0", "close 0")


async def test_a_layout_is_published_as_acquired_then_committed_in_its_transition(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        request = of.bench.scale_up(of.bench.grants()[1:], members=of.bench.grants())
        of.lead.take(request)
        (committed,) = await of.bench.published("layout_committed")
        (acquired,) = await of.bench.published("gpus_acquired")
        assert await of.bench.kinds() == ["gpus_acquired", "layout_committed"]
        assert (acquired.transition_id, committed.transition_id) == ("start", "start")
        assert list(acquired.gpus_acquired.grants) == list(request.grants)
        assert list(committed.layout_committed.grants) == list(request.members)
        assert committed.layout_committed.next_iteration == 5


@pytest.mark.parametrize(
    ("failure", "want_fatal"),
    [
        (ValueError("a value that will be wrong again"), True),
        (ArithmeticError("not a number"), True),
        (TimeoutError("no answer in time"), False),
        (RuntimeError("a machine said no"), False),
        (WorkerRefused("the engine is started already"), False),
        (CallRefused("the engine is started already"), False),
        (CommandRefused("another leads"), False),
    ],
    ids=[
        "a wrong value",
        "an arithmetic",
        "a timeout",
        "a machine's refusal",
        "a worker's refusal",
        "a call's refusal",
        "a command's refusal",
    ],
)
async def test_work_that_fails_is_reported_and_ends_the_job_only_when_it_would_fail_again(
    tmp_path: Path, failure: Exception, want_fatal: bool
) -> None:
    async with leading(tmp_path) as of:
        of.lead.failure = failure
        command = of.load(1)
        of.lead.take(command)
        failed = (await of.failed()).failed
        assert failed.fatal is want_fatal
        assert failed.what == events_pb2.Failed.WHAT_COMPONENT
        assert failed.message == f"LoadWeights {command.header.id}: {failure}"
        of.lead.failure = None
        of.lead.take(of.load(2))
        await of.until("load 1", "load 2")


async def test_a_start_that_fails_names_its_gpus_also_when_a_worker_died(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.failure = WorkerGone("the worker of n1/3 died")
        request = of.bench.scale_up()
        of.lead.take(request)
        failed = (await of.failed()).failed
        assert list(failed.grants) == list(request.grants)
        assert not failed.fatal
        assert "the worker of n1/3 died" in failed.message


async def test_an_iteration_that_fails_is_reported_with_its_number(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.failure = ValueError("no such thing")
        of.lead.may_end.set()
        of.lead.take(of.bench.open_iteration(2))
        failed = await of.failed()
        assert failed.failed.message == "iteration 2: no such thing"
        assert (failed.incarnation, failed.iteration) == (1, 2)


async def test_an_interrupted_iteration_starts_again_once_the_component_has_its_weights(
    tmp_path: Path,
) -> None:
    async with leading(tmp_path) as of:
        of.lead.failure = TimeoutError("no answer")
        of.lead.may_end.set()
        of.lead.take(of.bench.open_iteration(2))
        assert not (await of.failed()).failed.fatal
        of.lead.failure = None
        of.lead.take(of.bench.scale_up())
        of.lead.take(of.load(2))
        await of.until("load 2", "supersede", "begin 2", "end 2")
        of.lead.take(of.load(3))
        await of.until("load 3")


async def test_an_iteration_that_fails_again_and_again_without_a_death_is_given_up(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.iteration_failure = TimeoutError("no answer")
        of.lead.may_end.set()
        of.lead.take(of.bench.open_iteration(2))
        for number in range(1, 3):
            await of.bench.published("failed", count=number)
            of.lead.take(of.load(2))
        with pytest.raises(AssertionError, match=r"iteration 2 \(3 times in a row\): no answer"):
            await of.bench.published("iteration_reported")


@pytest.mark.parametrize("where", ["a command", "an iteration"])
async def test_an_instance_without_an_answer_is_reported_with_the_grants_of_its_workers(
    tmp_path: Path, where: str
) -> None:
    async with leading(tmp_path) as of:
        (silent,) = of.bench.grants()[1:]
        of.lead.failure = WorkerUnreachable("n1 gave no answer", grants=[silent])
        of.lead.may_end.set()
        of.lead.take(of.load(1) if where == "a command" else of.bench.open_iteration())
        failed = (await of.failed()).failed
        assert (decode_grants(failed.grants), failed.fatal) == ((silent,), False)
        assert failed.message == "no answer: n1 gave no answer"


async def test_workers_on_a_node_that_gives_no_answer_are_stopped_once_it_does(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.scale_up())
        await of.bench.published("layout_committed")
        away = of.bench.instances[NODES[1]]
        away.is_silent = True
        clear = commands_pb2.ScaleDownRequest(header=of.bench.header(), grants=encode_grants(of.bench.grants()[1:]))
        of.lead.take(clear)
        of.lead.take(of.load(1))
        await of.until("load 1")
        away.is_silent = False
        (released,) = await of.bench.published("gpus_released")
        assert list(released.gpus_released.grants) == list(clear.grants)
        assert await away.workers(JOB) == ()
        assert "failed" not in await of.bench.kinds()


async def test_a_node_that_gives_no_answer_keeps_no_gpu_of_another_node_from_its_release(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.scale_up())
        await of.bench.published("layout_committed")
        first, second = of.bench.instances.values()
        first.is_silent = True
        here, there = of.bench.grants()
        of.lead.take(commands_pb2.ScaleDownRequest(header=of.bench.header(), grants=encode_grants([here, there])))
        (released,) = await of.bench.published("gpus_released")
        assert decode_grants(released.gpus_released.grants) == (there,)
        assert await second.workers(JOB) == ()
        first.is_silent = False
        _, released = await of.bench.published("gpus_released", count=2)
        assert decode_grants(released.gpus_released.grants) == (here,)


async def test_members_on_a_node_that_gives_a_new_lead_no_answer_are_reported(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.scale_up())
        await of.bench.published("layout_committed")
        await of.lead.aclose()
        of.bench.instances[NODES[1]].is_silent = True
        command = of.load(1)
        command.header.members.extend(encode_grants(of.bench.grants()))
        of.bench.new_lead().take(command)
        failed = (await of.failed()).failed
        assert decode_grants(failed.grants) == of.bench.grants()[1:]


async def test_workers_that_an_earlier_lead_started_and_did_not_announce_are_started_again(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        first, second = of.bench.grants()
        await of.bench.instances[NODES[0]].start_workers(JOB, "start", [first])
        of.lead.take(of.bench.scale_up())
        await of.bench.published("layout_committed")
        assert of.bench.instances[NODES[0]].started == [first, first], "its state is unknown: a start may be refused"
        assert of.bench.instances[NODES[1]].started == [second]


@pytest.mark.parametrize("where", ["a command", "an iteration"])
async def test_a_lead_leaves_the_report_of_a_death_to_its_instance(tmp_path: Path, where: str) -> None:
    async with leading(tmp_path) as of:
        of.lead.failure = WorkerGone("the worker of n1/3 died")
        of.lead.may_end.set()
        interrupted: Callable[[], object] = {
            "a command": lambda: of.lead.take(of.load(1)),
            "an iteration": lambda: of.lead.take(of.bench.open_iteration()),
        }[where]
        interrupted()
        of.lead.take(of.close(0))
        await of.bench.changes.until(lambda: "close 0" in of.lead.diary)
        assert await of.bench.kinds() == []


async def test_a_lead_that_ended_takes_no_command_any_more(tmp_path: Path) -> None:
    async with leading(tmp_path) as of:
        of.lead.take(of.bench.open_iteration())
        await of.until("begin 0")
        await of.lead.aclose()
        assert of.lead.diary[-1] == "cancel 0"
        untouched = of.bench.new_lead()
        await untouched.aclose()
        for lead in (of.lead, untouched):
            before = list(lead.diary)
            lead.take(of.load(1))
            heir = of.bench.new_lead()
            heir.take(of.load(2))
            await of.bench.changes.until(lambda heir=heir: "load 2" in heir.diary)  # type: ignore[misc]
            assert lead.diary == before
