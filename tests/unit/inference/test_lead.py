"""The inference's lead over fake ranks scores each group once, by its own version, despite losses and repeats.

By default it has two copies of one rank each, on FIRST and SECOND. With `ONE_COPY` they are the ranks of one copy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.shell.codecs.observed_codec import inferring_of
from services.scheduler.state.observed import Inferring
from tests.component_bench import ACK_WAIT_S, JOB, NODES, snapshot
from tests.unit.inference.scoring_bench import (
    FIRST,
    ONE_COPY,
    REFERENCE_IS_AT,
    SECOND,
    scoring,
)
from tests.watched_samples import generated_group
from tidegate.v1 import commands_pb2


async def test_groups_are_scored_by_all_ranks_of_a_copy_together_and_published_whole(tmp_path: Path) -> None:
    async with scoring(tmp_path, **ONE_COPY) as of:
        await of.generated(range(4))
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("iteration_reported")
        for want_prompt, group in enumerate(await of.on_stream()):
            want = generated_group(want_prompt)
            for sample in want.samples:
                sample.old_log_probs.extend([-1.0] * len(sample.response_tokens))
            assert group == want
        assert await of.num_unsettled() == 0
        assert of.ranks[FIRST].scored == of.ranks[SECOND].scored


async def test_a_group_is_scored_as_soon_as_it_arrives(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        for prompt in (2, 0, 3, 1):
            await of.generated([prompt])
            await of.bench.changes.until(lambda prompt=prompt: prompt in of.watch.prompts("ack"))  # type: ignore[misc]
        await of.bench.published("iteration_reported")
        assert [group.prompt for group in await of.on_stream()] == [2, 0, 3, 1]
        progress = await of.bench.published("progress", count=4)
        assert [each.progress.num_done for each in progress] == [1, 2, 3, 4]
        assert {each.backlog.num_messages for each in await of.bench.published("backlog", count=4)} == {0}


@pytest.mark.parametrize(("order", "want"), [("fixed", (0, 1, 2, 3)), ("arrival", (2, 0, 3, 1))])
async def test_pictures_show_the_groups_for_the_actor_in_its_order(
    tmp_path: Path, order: str, want: tuple[int, ...]
) -> None:
    async with scoring(tmp_path, algorithm={"minibatch_order": order}) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        (first,) = await of.bench.published("inferring")
        assert inferring_of(first.inferring) == Inferring()
        for prompt in (2, 0, 3, 1):
            await of.generated([prompt])
            await of.bench.changes.until(lambda prompt=prompt: prompt in of.watch.prompts("ack"))  # type: ignore[misc]
        await of.bench.published("iteration_reported")
        pictures = await of.bench.published("inferring", count=2)
        last = inferring_of(pictures[-1].inferring)
        rate = last.rate_tokens_per_s_per_gpu
        assert last == Inferring(want, is_busy=False, rate_tokens_per_s_per_gpu=rate)
        assert rate is not None, "its calls were measured"


async def test_a_group_is_acknowledged_only_after_its_scored_form_is_on_the_stream(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        await of.generated(range(4))
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("iteration_reported")
        for prompt in range(4):
            assert of.watch.acts.index(("publish scored", prompt)) < of.watch.acts.index(("ack", prompt))


async def test_the_reference_policy_is_loaded_beside_the_policy_and_its_log_probabilities_are_published(
    tmp_path: Path,
) -> None:
    async with scoring(tmp_path) as of:
        await of.generated(range(4), version=2)
        up = of.bench.scale_up(weights=snapshot(2), reference=snapshot(0))
        of.new_lead(up, of.bench.open_iteration(version=2))
        await of.bench.published("iteration_reported")
        assert of.ranks[FIRST].loads == of.ranks[SECOND].loads == [(0, True), (2, False)]
        for group in await of.on_stream():
            for sample in group.samples:
                assert list(sample.old_log_probs) == [-3.0] * len(sample.response_tokens)
                assert list(sample.reference_log_probs) == [REFERENCE_IS_AT] * len(sample.response_tokens)


async def test_a_group_of_the_iteration_drawn_from_another_version_is_dead_lettered_with_both_numbers(
    tmp_path: Path,
) -> None:
    async with scoring(tmp_path) as of:
        await of.generated([0], version=7)
        await of.generated([1])
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        (letter,) = await of.bench.published("dead_lettered")
        want = "prompt 0 of iteration 0 was drawn from version 7, but its iteration is of version 0"
        assert letter.dead_lettered.reason == want
        await of.bench.published("progress")
        assert [group.prompt for group in await of.on_stream()] == [1]
        assert [kept.reason for kept in await of.bench.bus.dead_letters.list(JOB)] == [want]


async def test_a_group_of_a_foreign_prompt_is_dead_lettered_with_the_prompts_that_the_iteration_takes(
    tmp_path: Path,
) -> None:
    async with scoring(tmp_path) as of:
        await of.generated([7])
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        (letter,) = await of.bench.published("dead_lettered")
        assert letter.dead_lettered.reason == "prompt 7 is not of iteration 0, which takes 0-3"


REPLACED = {"filter_zero_std": True, "max_extra_prompts": 2}


async def test_an_iteration_goes_on_until_the_groups_that_replace_others_are_scored(tmp_path: Path) -> None:
    async with scoring(tmp_path, algorithm=REPLACED) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.generated([4, 0, 1, 3])
        await of.generated([2], rewards=(0.5, 0.5))
        await of.bench.published("iteration_reported")
        assert sorted(group.prompt for group in await of.on_stream()) == [0, 1, 2, 3, 4]


async def test_groups_that_the_actor_filters_are_published_without_log_probabilities(tmp_path: Path) -> None:
    async with scoring(tmp_path, algorithm={"filter_zero_std": True}) as of:
        await of.generated([1, 3], rewards=(0.5, 0.5))
        await of.generated([0, 2])
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("iteration_reported")
        assert of.scored() == [0, 2]
        on_stream = {group.prompt: group for group in await of.on_stream()}
        assert [on_stream[prompt] for prompt in (1, 3)] == [
            generated_group(prompt, rewards=(0.5, 0.5)) for prompt in (1, 3)
        ]
        assert all(sample.old_log_probs for sample in on_stream[2].samples)
        assert await of.num_unsettled() == 0


async def test_a_new_lead_learns_from_the_stream_which_groups_are_missing(tmp_path: Path) -> None:
    async with scoring(tmp_path, algorithm=REPLACED) as of:
        old = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.generated([0, 1, 2])
        await of.generated([3], rewards=(0.5, 0.5))
        await of.bench.changes.until(lambda: sorted(of.watch.prompts("ack")) == [0, 1, 2, 3])
        await old.aclose()
        of.new_lead(of.load(0), of.bench.open_iteration())
        await of.bench.published("weights_loaded")
        assert "iteration_reported" not in await of.bench.kinds()
        await of.generated([4])
        await of.bench.published("iteration_reported")
        assert sorted(of.watch.prompts("publish scored")) == [0, 1, 2, 3, 4]


async def test_groups_of_older_incarnations_and_iterations_are_acknowledged_unscored(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        await of.generated([4], incarnation=1, iteration=1, version=1)
        await of.generated([0], incarnation=2, iteration=0)
        await of.generated(range(4, 8), incarnation=2, iteration=1, version=1)
        up = of.bench.scale_up(weights=snapshot(1, incarnation=2), incarnation=2)
        of.new_lead(up, of.bench.open_iteration(1, incarnation=2))
        await of.bench.published("iteration_reported")
        groups = await of.on_stream()
        assert [(group.incarnation, group.iteration, group.prompt) for group in groups] == [
            (2, 1, prompt) for prompt in range(4, 8)
        ]
        assert await of.num_unsettled() == 0


async def test_groups_of_a_newer_incarnation_wait_until_it_begins(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        await of.generated(range(4), incarnation=2)
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.changes.until(lambda: len(of.watch.prompts("nak")) == 4)
        assert of.ranks[FIRST].scored == []
        lead.take(of.load(0, incarnation=2))
        lead.take(of.bench.open_iteration(incarnation=2))
        await of.bench.published("weights_loaded")
        await of.bench.clock.advance(1.0)
        await of.bench.published("iteration_reported")
        assert [group.incarnation for group in await of.on_stream()] == [2] * 4


async def test_the_groups_of_a_lost_rank_are_scored_after_the_next_scale_up(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, **ONE_COPY) as of:
        await of.generated(range(4))
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.bench.instances[NODES[1]].kill(SECOND)
        of.permit()
        lead.take(of.bench.scale_up(of.bench.grants(term=2), weights=snapshot(0)))
        await of.bench.published("iteration_reported")
        assert "failed" not in await of.bench.kinds(), "its instance tells the death"
        assert sorted(group.prompt for group in await of.on_stream()) == [0, 1, 2, 3]
        assert of.watch.prompts("fetch") == [0, 1, 2, 3], "the lead keeps the groups of a copy that died"


async def test_the_lead_reports_a_rank_whose_node_gives_no_answer(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)))
        await of.bench.published("layout_committed")
        of.bench.instances[NODES[1]].is_silent = True
        lead.take(of.bench.open_iteration())
        await of.generated(range(4))
        (failed,) = await of.bench.published("failed")
        assert [grant.gpu for grant in failed.failed.grants] == [SECOND]
        assert not failed.failed.fatal


async def test_a_group_delivered_again_after_it_was_scored_is_neither_scored_nor_published_again(
    tmp_path: Path,
) -> None:
    async with scoring(tmp_path) as of:
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("layout_committed")
        of.watch.lost_acks.add(0)
        await of.generated([0])
        await of.bench.changes.until(lambda: of.watch.prompts("ack") == [0])
        assert await of.num_unsettled() == 1
        await of.bench.clock.advance(ACK_WAIT_S)
        await of.bench.changes.until(lambda: of.watch.prompts("ack") == [0, 0])
        await of.generated([1, 2, 3])
        await of.bench.published("iteration_reported")
        assert of.watch.prompts("publish scored").count(0) == 1
        assert of.scored() == [0, 1, 2, 3]


async def test_a_new_lead_scores_the_groups_that_the_old_one_had_not_finished_and_none_twice(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=1, **ONE_COPY) as of:
        await of.generated([0])
        old = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.changes.until(lambda: of.watch.prompts("ack") == [0])
        await of.generated([1, 2, 3])
        await of.until_asked(first=2, second=2)
        await old.aclose()
        of.permit()
        of.new_lead(of.load(0), of.bench.open_iteration())
        await of.bench.published("weights_loaded")
        await of.bench.clock.advance(ACK_WAIT_S)
        await of.bench.published("iteration_reported")
        assert of.watch.prompts("publish scored") == [0, 1, 2, 3]
        assert of.ranks[FIRST].scored == [(0,), (1, 2, 3)]


async def test_nothing_is_scored_before_weights_are_loaded(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        await of.generated(range(4))
        lead = of.new_lead(of.bench.scale_up(), of.bench.open_iteration())
        await of.bench.published("layout_committed")
        assert of.ranks[FIRST].num_asked == 0
        lead.take(of.load(0))
        await of.bench.published("iteration_reported")
        assert of.watch.prompts("publish scored") == [0, 1, 2, 3]


@pytest.mark.parametrize(("kl_coefficient", "want"), [(0.0, ()), (0.1, (0,))], ids=["without KL", "with KL"])
async def test_closing_an_iteration_frees_older_versions_but_not_the_reference(
    tmp_path: Path, kl_coefficient: float, want: tuple[int, ...]
) -> None:
    async with scoring(tmp_path, algorithm={"kl_coefficient": kl_coefficient}) as of:
        await of.generated(range(4), version=3)
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(3)), of.bench.open_iteration(version=3))
        lead.take(commands_pb2.CloseIterationRequest(header=of.bench.header(), iteration=0))
        lead.take(of.load(4))
        await of.bench.published("weights_loaded")
        assert [instance.drops for instance in of.bench.instances.values()] == [[(3, want)], [(3, want)]]
