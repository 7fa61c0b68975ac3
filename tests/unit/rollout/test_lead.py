"""The rollout's lead over fake engines publishes whole groups once, despite lost and new engines and new leads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.rollout.lead import RolloutLead
from services.scheduler.shell.codecs.observed_codec import generation_of
from tests.component_bench import JOB, NODES, PATIENCE_S, Changes, snapshot, task_of
from tests.unit.rollout.fake_engines import (
    FIRST,
    PLENTY,
    SECOND,
    Engines,
    RolloutBench,
    engine_at_work,
    give,
    rollout,
)
from tests.unit.rollout.outcomes import all_ids, assert_whole_iteration, groups_on_stream
from tidegate.candidates import has_spread
from tidegate.codec import decode_sample_id, fate_of
from tidegate.config.sections.data import DataSection, RewardName, RewardSection
from tidegate.ports.bus import SampleConsumer, SampleStream, Stage
from tidegate.runtime.lead import rewards_of
from tidegate.tasks import Demonstration, Prompt, Task
from tidegate.types import JobId
from tidegate.v1 import commands_pb2, samples_pb2


class HeldPublishing:
    """The sample stream. It delays the publishing of one prompt's group until `let_go`."""

    def __init__(self, samples: SampleStream, changes: Changes, *, prompt: int) -> None:
        self.let_go = asyncio.Event()
        self.is_holding = False
        self.group: samples_pb2.SampleGroup | None = None
        self._samples = samples
        self._changes = changes
        self._prompt = prompt

    async def publish(self, stage: Stage, group: samples_pb2.SampleGroup) -> bool:
        if group.prompt == self._prompt:
            self.is_holding, self.group = True, group
            self._changes.notify()
            await self.let_go.wait()
        return await self._samples.publish(stage, group)

    async def consumer(self, job: JobId, stage: Stage, name: str, *, on_dead_letter: Any) -> SampleConsumer:
        return await self._samples.consumer(job, stage, name, on_dead_letter=on_dead_letter)

    async def published(self, job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> frozenset[int]:
        return await self._samples.published(job, stage, incarnation=incarnation, iteration=iteration)

    async def stored_group(self, job: JobId, stage: Stage, **place: int) -> samples_pb2.SampleGroup | None:
        return await self._samples.stored_group(job, stage, **place)

    async def tell_response(self, response: samples_pb2.SampleGroup) -> None:
        await self._samples.tell_response(response)

    def responses(self, job: JobId) -> AbstractAsyncContextManager[AsyncIterator[samples_pb2.SampleGroup]]:
        return self._samples.responses(job)

    async def purge(self, job: JobId, *, incarnation: int, iteration: int) -> None:
        await self._samples.purge(job, incarnation=incarnation, iteration=iteration)


async def test_every_group_is_published_whole_and_once_by_all_engines_together(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await assert_whole_iteration(of)
        assert sorted(engines.of[FIRST].made + engines.of[SECOND].made) == all_ids(of)
        assert len(engines.of[FIRST].made) == len(engines.of[SECOND].made)
        progress = await of.published("progress", count=4)
        assert [(each.progress.num_done, each.progress.num_total) for each in progress] == [
            (n, 4) for n in (1, 2, 3, 4)
        ]


async def test_pictures_show_every_sequence_from_the_first_picture_to_the_last(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 0}
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        give(of, of.open_iteration())
        await engine_at_work(of, engines, FIRST, num_made=1)
        for engine in (engines.of[FIRST], engines.of[SECOND]):
            for _ in range(len(all_ids(of))):
                engine.permits.release()
        await of.published("iteration_reported")

        pictures = [generation_of(each.generation) for each in await of.published("generation", count=2)]
        kinds = await of.kinds()

    assert {each.num_groups for each in pictures} == {of.config.algorithm.prompts_per_iteration}
    assert pictures[0].num_unfinished > 0
    assert [engine.gpus for engine in pictures[0].engines] == [(FIRST,), (SECOND,)]
    assert (pictures[-1].num_unfinished, pictures[-1].num_submitted) == (0, 0)
    assert min(pictures[-1].lengths) > 0
    assert kinds.index("iteration_reported") > max(index for index, kind in enumerate(kinds) if kind == "generation")


async def test_the_layout_is_announced_with_its_transition_and_every_member(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        request = of.scale_up(weights=snapshot(0))
        give(of, request)
        (committed,) = await of.published("layout_committed")
        assert await of.kinds() == ["gpus_acquired", "layout_committed"]
        assert committed.transition_id == "start"
        assert list(committed.layout_committed.grants) == list(request.members)
        assert list(committed.grants) == list(request.members)


async def test_an_engine_lost_in_the_middle_of_a_call_has_its_requests_made_by_the_others(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[FIRST] = 1
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        lost = await engine_at_work(of, engines, FIRST, num_made=1)
        of.instances[NODES[0]].kill(FIRST)
        await assert_whole_iteration(of)
        assert set(engines.of[SECOND].made) >= set(lost.asked) - set(lost.made)
        assert not set(engines.of[SECOND].made) & set(lost.made), (
            "responses that arrived before the loss are not made again"
        )


async def test_with_every_engine_lost_the_iteration_waits_for_a_new_engine(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 0, SECOND: 0}
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        for gpu, node in ((FIRST, NODES[0]), (SECOND, NODES[1])):
            await engine_at_work(of, engines, gpu, num_made=0)
            of.instances[node].kill(gpu)
        engines.num_permits[SECOND] = PLENTY
        newcomer = of.grants(term=2)[1:]
        give(of, of.scale_up(newcomer, weights=snapshot(0)))
        await assert_whole_iteration(of)


async def test_a_new_engine_takes_part_in_the_running_iteration(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[FIRST] = 0
    async with rollout(tmp_path, engines, rollout={"max_running_requests": 2}) as of:
        first, second = of.grants()
        give(of, of.scale_up([first], weights=snapshot(0)), of.open_iteration())
        held = await engine_at_work(of, engines, FIRST, num_made=0)
        give(of, of.scale_up([second], members=[first, second], weights=snapshot(0)))
        await of.changes.until(lambda: SECOND in engines.of and len(engines.of[SECOND].made) == 6)
        assert len(held.asked) == 2, "an engine holds only a few requests more than it can run"
        engines.open(FIRST)
        await assert_whole_iteration(of)


async def test_a_response_that_an_engine_aborted_is_made_again(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[FIRST] = 0
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        engine = await engine_at_work(of, engines, FIRST, num_made=0)
        engine.aborts_first = True
        engines.open(FIRST)
        await assert_whole_iteration(of)


async def test_a_new_lead_makes_only_what_the_stream_lacks(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 1}
    async with rollout(tmp_path, engines) as of:
        old = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress")
        await old.aclose()
        asked_before = {gpu: len(engine.asked) for gpu, engine in engines.of.items()}
        new = of.new_lead()
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        new.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        new.take(of.open_iteration())
        await assert_whole_iteration(of)
        again = [sample for gpu, engine in engines.of.items() for sample in engine.asked[asked_before[gpu] :]]
        assert sorted(again) == [sample for sample in all_ids(of) if sample.prompt != 0]
        assert all(engine.num_aborts for engine in engines.of.values()), "the old lead's requests were aborted"
        assert of.instances[NODES[0]].started == [of.grants()[0]], "workers outlive their lead"


async def test_a_new_lead_that_finds_all_groups_on_the_stream_reports_at_once(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        old = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        await old.aclose()
        of.new_lead().take(of.open_iteration())
        first, second = await of.published("iteration_reported", count=2)
        assert first.iteration_reported == second.iteration_reported
        assert len(engines.of[FIRST].asked) + len(engines.of[SECOND].asked) == 8


async def test_the_iteration_does_not_end_while_a_group_is_being_published(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits[SECOND] = 3
    held: list[HeldPublishing] = []

    def wrap(samples: SampleStream, changes: Changes) -> SampleStream:
        held.append(HeldPublishing(samples, changes, prompt=2))
        return held[0]

    async with rollout(tmp_path, engines, wrap=wrap) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.changes.until(lambda: held[0].is_holding)
        engines.open(SECOND)
        await of.published("progress", count=3)
        assert "iteration_reported" not in await of.kinds()
        held[0].let_go.set()
        await assert_whole_iteration(of)


class LongIsRight:
    """The task, except that every answer of several words is right."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def words(self) -> tuple[str, ...]:
        return self._task.words()

    def prompt(self, index: int) -> Prompt:
        return self._task.prompt(index)

    def held_out(self, index: int) -> Prompt:
        return self._task.held_out(index)

    def demonstration(self, index: int) -> Demonstration:
        return self._task.demonstration(index)

    def reward(self, prompt: Prompt, response_text: str) -> float:
        return float(" " in response_text)


class HeldRewards(LongIsRight):
    """The task, except that rewards wait for `let_go`."""

    def __init__(self, task: Task, changes: Changes) -> None:
        super().__init__(task)
        self.let_go = threading.Event()
        self.is_asked = False
        self._changes = changes
        self._loop = asyncio.get_running_loop()

    def reward(self, prompt: Prompt, response_text: str) -> float:
        self.is_asked = True
        self._loop.call_soon_threadsafe(self._changes.notify)
        assert self.let_go.wait(timeout=PATIENCE_S), "the event loop waits for the reward"
        return self._task.reward(prompt, response_text)


async def test_a_slow_reward_delays_nothing_else_of_the_lead(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        lead = of.new_lead()
        rewards = HeldRewards(task_of(lead.job), of.changes)
        lead.job = replace(lead.job, task=rewards)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.changes.until(lambda: rewards.is_asked)
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        await of.published("weights_loaded")
        rewards.let_go.set()
        await assert_whole_iteration(of)


def on_data(of: RolloutBench, folder: Path, answers: str) -> RolloutLead:
    """A new lead of a job on four records, whose reward raises where a letter of `answers` is an x."""
    (folder / "grading.py").write_text(
        "def score(answer):\n    if answer == 'x':\n        raise KeyError('units')\n    return 1.0\n"
    )
    rows = [{"prompt": "count from 4 :", "answer": letter} for letter in answers]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = RewardSection(name=RewardName.FUNCTION, path="grading.py:score", import_from=str(folder), timeout_s=60)
    data = DataSection(train=str(folder / "train.jsonl"), answer_key="answer", shuffle=False)
    config = of.config.model_copy(update={"task": None, "data": data, "rewards": (reward,)})
    lead = of.new_lead()
    lead.job = replace(lead.job, task=None, config=config)
    return lead


async def test_a_reward_that_fails_on_too_many_samples_ends_the_job_with_its_first_traceback(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        on_data(of, tmp_path, "axxx")
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        (event,) = await of.published("failed")
        assert event.failed.fatal
        first, *lines = event.failed.message.splitlines()
        want = (
            "reward grading.py:score failed on 6 of the iteration's 8 samples, more than rewards.0.max_failed=0.5 all"
        )
        assert first.startswith(f"iteration 0: {want}ows; the first: reward grading.py:score on sample 1.0.1.0 (")
        assert f"raised KeyError: 'units' at {tmp_path}/grading.py:3 in score" in first
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == "KeyError: 'units'"
        assert "iteration_reported" not in await of.kinds()


async def test_failures_within_the_limit_are_on_the_stream_with_their_samples(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        on_data(of, tmp_path, "axax")
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        assert [[len(sample.failures) for sample in group.samples] for group in groups] == [[0, 0], [1, 1]] * 2
        failure = groups[1].samples[1].failures[0]
        assert failure.reward == "grading.py:score"
        assert failure.message.startswith(
            f"reward grading.py:score on sample 1.0.1.1 ({tmp_path}/train.jsonl:2) raised"
        )
        assert groups[1].samples[1].reward == 0.0
        assert (await of.published("progress", count=4))[-1].progress.metrics["num_failed_rewards"] == 4.0


async def test_a_new_lead_counts_the_failures_that_an_earlier_lead_published(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 1}
    async with rollout(tmp_path, engines) as of:
        old = on_data(of, tmp_path, "xxxa")
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress")
        await old.aclose()
        new = on_data(of, tmp_path, "xxxa")
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        new.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        new.take(of.open_iteration())
        (event,) = await of.published("failed")
        assert "the first: reward grading.py:score on sample 1.0.0.0" in event.failed.message


def replacing(of: RolloutBench) -> RolloutLead:
    """The lead of a job in which many groups have no spread."""
    lead = of.new_lead()
    lead.job = replace(lead.job, task=LongIsRight(task_of(lead.job)))
    return lead


REPLACED = {"filter_zero_std": True, "max_extra_prompts": 40}


async def assert_enough_with_spread(of: RolloutBench, groups: list[Any]) -> None:
    """Check that the groups are the shortest run with enough groups with spread, and that all are reported."""
    report = (await of.published("iteration_reported"))[-1].iteration_reported
    assert report.generated == fate_of([decode_sample_id(sample.id) for group in groups for sample in group.samples])
    assert [group.prompt for group in groups] == list(range(len(groups)))
    spread = [has_spread(rewards_of(group)) for group in groups]
    assert (sum(spread), spread[-1]) == (4, True)
    assert len(groups) > 4, "some were replaced"


async def test_groups_without_spread_are_replaced_by_the_prompts_that_follow(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines(), algorithm=REPLACED) as of:
        replacing(of)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        await assert_enough_with_spread(of, groups)
        progress = [each.progress for each in await of.published("progress", count=len(groups))]
        assert [each.num_done for each in progress] == list(range(1, len(groups) + 1))
        assert progress[-1].num_total == len(groups)


async def test_no_more_groups_are_replaced_than_there_are_extra_prompts(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines(), algorithm=REPLACED | {"max_extra_prompts": 1}) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        assert [group.prompt for group in groups] == [0, 1, 2, 3, 4]
        assert not any(has_spread(rewards_of(group)) for group in groups)


async def test_a_new_lead_replaces_the_same_groups(tmp_path: Path) -> None:
    async with rollout(tmp_path / "whole", Engines(), algorithm=REPLACED) as of:
        replacing(of)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("iteration_reported")
        want = await groups_on_stream(of)
    engines = Engines()
    engines.num_permits = {FIRST: 4, SECOND: 3}
    async with rollout(tmp_path / "broken", engines, algorithm=REPLACED) as of:
        old = replacing(of)
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress", count=2)
        await old.aclose()
        new = replacing(of)
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        new.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        new.take(of.open_iteration())
        await of.published("iteration_reported")
        got = await groups_on_stream(of)
        await assert_enough_with_spread(of, got)
        assert [(each.prompt, list(each.samples)) for each in got] == [
            (each.prompt, list(each.samples)) for each in want
        ]


async def test_an_earlier_leads_copy_of_a_group_decides_whether_it_is_replaced(tmp_path: Path) -> None:
    held: list[HeldPublishing] = []

    def wrap(samples: SampleStream, changes: Changes) -> SampleStream:
        held.append(HeldPublishing(samples, changes, prompt=1))
        return held[0]

    async with rollout(tmp_path, Engines(), wrap=wrap, algorithm=REPLACED | {"max_extra_prompts": 4}) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.changes.until(lambda: held[0].is_holding)
        assert held[0].group is not None
        other = samples_pb2.SampleGroup()
        other.CopyFrom(held[0].group)
        other.samples[0].reward = 1.0
        await of.bus.samples.publish(Stage.GENERATED, other)
        held[0].let_go.set()
        await of.published("iteration_reported")
        groups = await groups_on_stream(of)
        assert [group.prompt for group in groups] == list(range(8)), (
            "all groups have equal rewards, except the one on the stream"
        )
        (progress, *_) = reversed(await of.published("progress", count=8))
        assert (progress.progress.num_done, progress.progress.num_total) == (8, 8)


async def test_an_engine_generates_only_once_it_holds_the_version_of_the_iteration(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration(1, version=1))
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
        (loaded_event,) = await of.published("weights_loaded")
        assert loaded_event.weights_loaded.checksum == snapshot(1).checksum
        await assert_whole_iteration(of, version=1, iteration=1)


async def test_a_newer_incarnation_ends_running_requests_and_makes_all_responses_anew(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 1, SECOND: 1}
    async with rollout(tmp_path, engines) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        await of.published("progress")
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(incarnation=2), weights=snapshot(0, incarnation=2)))
        lead.take(of.open_iteration(incarnation=2))
        (report,) = await of.published("iteration_reported")
        assert report.incarnation == 2
        assert report.iteration_reported.generated == fate_of(all_ids(of, incarnation=2))
        assert len(await groups_on_stream(of, incarnation=1)) == 1


async def test_a_refused_request_fails_the_component_with_the_engines_message(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        engines.of[FIRST].refusal = "the prompt is longer than max_seq_len=80"
        give(of, of.open_iteration())
        (failed,) = await of.published("failed")
        assert "longer than max_seq_len=80" in failed.failed.message


async def test_the_lead_reports_an_engine_whose_node_gives_no_answer_and_the_others_go_on(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        of.instances[NODES[0]].is_silent = True
        give(of, of.open_iteration())
        await assert_whole_iteration(of)
        (failed,) = await of.published("failed")
        assert [grant.gpu for grant in failed.failed.grants] == [FIRST]
        assert engines.of[FIRST].asked == []


async def test_weights_that_are_not_the_published_ones_fail_the_component(tmp_path: Path) -> None:
    engines = Engines()
    async with rollout(tmp_path, engines) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        engines.of[SECOND].lies_about_weights = True
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(1)))
        with pytest.raises(AssertionError, match="n1/2 loaded version 1 with checksum of something else"):
            await of.published("weights_loaded")


@pytest.mark.parametrize(("kl_coefficient", "want"), [(0.0, ()), (0.1, (0,))], ids=["without KL", "with KL"])
async def test_closing_an_iteration_frees_older_versions_but_not_the_reference(
    tmp_path: Path, kl_coefficient: float, want: tuple[int, ...]
) -> None:
    async with rollout(tmp_path, Engines(), algorithm={"kl_coefficient": kl_coefficient}) as of:
        lead = give(of, of.scale_up(weights=snapshot(1)), of.open_iteration(1, version=1))
        lead.take(commands_pb2.CloseIterationRequest(header=of.header(), iteration=1))
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(2)))
        await of.published("weights_loaded")
        assert [instance.drops for instance in of.instances.values()] == [[(1, want)], [(1, want)]]


async def test_released_engines_are_reported_with_the_memory_that_stays_held(tmp_path: Path) -> None:
    async with rollout(tmp_path, Engines()) as of:
        up = of.scale_up(weights=snapshot(0))
        lead = give(of, up)
        down = commands_pb2.ScaleDownRequest(header=of.header(transition="stop"), grants=up.grants)
        lead.take(down)
        (released,) = await of.published("gpus_released")
        assert (released.transition_id, released.gpus_released.held_bytes) == ("stop", 0)
        assert list(released.gpus_released.grants) == list(up.grants)
        assert await of.instances[NODES[0]].workers(JOB) == ()
