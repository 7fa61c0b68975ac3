"""Copies of the inference come, leave and die while an iteration is open; each group is scored and published once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.component_bench import ACK_WAIT_S, JOB, NODES, snapshot
from tests.unit.inference.scoring_bench import FIRST, ONE_COPY, SECOND, scoring
from tidegate.codec import decode_grants, decode_layout
from tidegate.ports.bus import Stage
from tidegate.runtime.lead import CommandRefused
from tidegate.types import NO_TOKEN, Grant, Layout


async def test_copies_score_different_groups_at_the_same_time(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0) as of:
        await of.generated(range(4))
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.permit()
        await of.bench.published("iteration_reported")
        assert of.batches == {FIRST: [(0, 1)], SECOND: [(2, 3)]}


NARROW = {"inference": {"layout": {"dp": 2}, "max_tokens_per_microbatch": 8}}
"""Each sample is a micro-batch of its own."""
ONE_PROMPT = {"prompts_per_iteration": 1, "n_minibatches": 1}


async def test_the_last_group_is_split_between_copies_and_published_whole(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, algorithm=ONE_PROMPT, **NARROW) as of:
        await of.generated([0])
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.permit(FIRST)
        await of.bench.changes.until(lambda: of.ranks[FIRST].scored == [(0,)])
        assert of.watch.prompts("ack") == []
        of.permit(SECOND)
        await of.bench.published("iteration_reported")
        stored = await of.bench.samples.stored_group(JOB, Stage.SCORED, incarnation=1, iteration=0, prompt=0)
    assert of.ranks[SECOND].scored == [(0,)]
    assert stored is not None
    assert [(sample.id.draw, list(sample.old_log_probs)) for sample in stored.samples] == [(0, [-1.0]), (1, [-1.0] * 2)]


async def test_a_share_whose_copy_dies_goes_to_another_and_the_group_is_published_once(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, algorithm=ONE_PROMPT, **NARROW) as of:
        await of.generated([0])
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.bench.instances[NODES[1]].kill(SECOND)
        of.permit()
        await of.bench.published("iteration_reported")
        assert of.ranks[FIRST].scored == [(0,), (0,)]
        assert of.watch.prompts("ack") == [0]
        assert of.watch.prompts("fetch") == [0], "a death uses up no delivery"


async def test_a_copy_that_leaves_in_the_middle_of_its_batch_finishes_it_and_gets_no_other(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, algorithm={"prompts_per_iteration": 6}) as of:
        await of.generated(range(4))
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.permit(FIRST)
        lead.take(of.leave(SECOND))
        # Commands are done in order: once this one is, the lead has begun to do the one before.
        lead.take(of.load(0))
        await of.bench.published("weights_loaded")
        assert "gpus_released" not in await of.bench.kinds()
        of.permit(SECOND)
        (released,) = await of.bench.published("gpus_released")
        assert [grant.gpu for grant in released.gpus_released.grants] == [SECOND]
        _, committed = await of.bench.published("layout_committed", count=2)
        assert [grant.gpu for grant in committed.layout_committed.grants] == [FIRST]
        assert decode_layout(committed.layout_committed.layout) == Layout(dp=1)
        await of.generated(range(4, 6))
        await of.bench.published("iteration_reported")
        assert of.ranks[SECOND].scored == [(2, 3)]
        assert of.scored() == of.watch.prompts("fetch") == [0, 1, 2, 3, 4, 5]
        assert await of.num_unsettled() == 0


async def test_the_batch_of_a_copy_that_hangs_as_it_leaves_goes_to_another(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, runtime={"command_deadline_s": 0.2}) as of:
        await of.generated(range(4))
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.permit(FIRST)
        lead.take(of.leave(SECOND))
        await of.bench.published("gpus_released")
        await of.bench.published("iteration_reported")
        assert (of.ranks[SECOND].scored, of.scored()) == ([], [0, 1, 2, 3])
        assert of.watch.prompts("fetch") == [0, 1, 2, 3]
        assert "failed" not in await of.bench.kinds()


async def test_a_copy_that_dies_in_the_middle_of_its_batch_leaves_it_to_the_others(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0) as of:
        await of.generated(range(4))
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.bench.instances[NODES[1]].kill(SECOND)
        of.permit()
        await of.bench.published("iteration_reported")
        assert of.batches[FIRST] == [(0, 1), (2,), (3,)], "groups that were with a dead copy are dealt alone"
        assert of.watch.prompts("fetch") == [0, 1, 2, 3], "a death uses up no delivery"
        assert "failed" not in await of.bench.kinds(), "its instance reports the death"


async def test_a_copy_comes_back_after_its_death_and_the_others_worked_on(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0) as of:
        await of.generated(range(2))
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        of.bench.instances[NODES[1]].kill(SECOND)
        of.permit(FIRST)
        await of.bench.changes.until(lambda: sorted(of.watch.prompts("ack")) == [0, 1])
        lead.take(of.come(SECOND, term=2, weights=snapshot(0)))
        await of.bench.published("layout_committed", count=2)
        assert of.ranks[SECOND].loads == [(0, False)]
        assert len(of.ranks[FIRST].loads) == 1
        of.permit(SECOND)
        await of.generated(range(2, 4))
        await of.bench.published("iteration_reported")
        assert of.scored() == [0, 1, 2, 3]


async def test_a_group_that_killed_as_many_copies_as_it_may_is_set_aside(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0, runtime={"max_deliveries": 2}) as of:
        await of.generated([0])
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1)
        of.bench.instances[NODES[0]].kill(FIRST)
        await of.until_asked(second=1)
        of.bench.instances[NODES[1]].kill(SECOND)
        (letter,) = await of.bench.published("dead_lettered")
        assert letter.dead_lettered.reason == "each of the 2 copies that had prompt 0 died; see their logs"


async def test_a_copy_that_comes_in_the_middle_of_an_iteration_takes_part_once_it_holds_the_weights(
    tmp_path: Path,
) -> None:
    async with scoring(tmp_path, num_permits=0, algorithm={"prompts_per_iteration": 8}) as of:
        first, _ = of.bench.grants()
        await of.generated(range(4))
        lead = of.new_lead(of.bench.scale_up([first], weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1)
        lead.take(of.come(SECOND, weights=snapshot(0)))
        await of.bench.published("layout_committed", count=2)
        await of.generated(range(4, 8))
        of.permit(SECOND)
        await of.bench.changes.until(lambda: of.watch.prompts("ack") == [4, 5, 6, 7])
        of.permit(FIRST)
        await of.bench.published("iteration_reported")
        assert (of.ranks[FIRST].scored, of.scored()) == ([(0, 1, 2, 3)], [*range(8)])


async def test_the_start_of_a_copy_delays_no_other_command_and_it_loads_the_version_named_meanwhile(
    tmp_path: Path,
) -> None:
    async with scoring(tmp_path) as of:
        first, _ = of.bench.grants()
        lead = of.new_lead(of.bench.scale_up([first], weights=snapshot(0)))
        await of.bench.published("layout_committed")
        of.may_start.clear()
        lead.take(of.come(SECOND, weights=snapshot(0)))
        lead.take(of.load(1))
        await of.bench.published("weights_loaded")
        assert of.ranks[FIRST].version == 1
        of.may_start.set()
        await of.bench.published("layout_committed", count=2)
        assert of.ranks[SECOND].version == 1


async def test_a_copy_that_is_to_leave_before_it_has_started_is_stopped_at_once(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        first, _ = of.bench.grants()
        lead = of.new_lead(of.bench.scale_up([first], weights=snapshot(0)))
        await of.bench.published("layout_committed")
        of.may_start.clear()
        lead.take(of.come(SECOND, weights=snapshot(0)))
        lead.take(of.leave(SECOND))
        (released,) = await of.bench.published("gpus_released")
        assert [grant.gpu for grant in released.gpus_released.grants] == [SECOND]
        assert "failed" not in await of.bench.kinds()


async def test_a_stop_under_an_older_grant_does_not_end_the_start_of_a_copy(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        first, _ = of.bench.grants()
        lead = of.new_lead(of.bench.scale_up([first], weights=snapshot(0)))
        await of.bench.published("layout_committed")
        of.may_start.clear()
        lead.take(of.come(SECOND, term=2, weights=snapshot(0)))
        await of.bench.changes.until(lambda: SECOND in of.ranks)
        lead.take(of.leave(SECOND))
        await of.bench.published("gpus_released")
        of.may_start.set()
        *_, committed = await of.bench.published("layout_committed", count=3)
        assert [grant.gpu for grant in committed.layout_committed.grants] == [FIRST, SECOND]


async def test_the_start_of_a_copy_that_fails_is_reported_with_its_gpus_and_costs_no_other(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        first, _ = of.bench.grants()
        lead = of.new_lead(of.bench.scale_up([first], weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("layout_committed")
        of.may_start.clear()
        lead.take(of.come(SECOND, weights=snapshot(0)))
        await of.bench.changes.until(lambda: SECOND in of.ranks)
        of.bench.instances[NODES[1]].kill(SECOND)
        (failed,) = await of.bench.published("failed")
        assert [grant.gpu for grant in decode_grants(failed.failed.grants)] == [SECOND]
        await of.generated(range(4))
        await of.bench.published("iteration_reported")
        assert of.scored() == [0, 1, 2, 3]


async def test_a_copy_starts_on_a_worker_that_stands_by(tmp_path: Path) -> None:
    async with scoring(tmp_path) as of:
        first, second = of.bench.grants()
        lead = of.new_lead(of.bench.scale_up([first], weights=snapshot(0)), of.bench.open_iteration())
        await of.bench.published("layout_committed")
        await lead.crew.start([Grant(second.gpu, NO_TOKEN)], transition="standby")
        lead.take(of.come(SECOND, weights=snapshot(0)))
        await of.bench.published("layout_committed", count=2)
        await of.generated(range(4))
        await of.bench.published("iteration_reported")
        assert of.bench.instances[NODES[1]].started == [Grant(second.gpu, NO_TOKEN)], "no other process was started"
        assert of.ranks[SECOND].scored
        assert lead.crew.standbys == ()


async def test_groups_wait_in_hand_while_the_inference_has_lent_all_its_gpus(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0) as of:
        await of.generated(range(2))
        lead = of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1, second=1)
        lead.take(of.leave(FIRST, SECOND, transition="suspend"))
        of.permit()
        (released,) = await of.bench.published("gpus_released")
        assert [grant.gpu for grant in released.gpus_released.grants] == [FIRST, SECOND]
        assert of.scored() == [0, 1]
        await of.generated(range(2, 4))
        lead.take(of.bench.scale_up(of.bench.grants(term=2)))
        lead.take(of.load(0))
        await of.bench.published("iteration_reported")
        assert sorted(of.watch.prompts("publish scored")) == [0, 1, 2, 3]


async def test_a_group_delivered_again_while_a_copy_has_it_is_dealt_once(tmp_path: Path) -> None:
    async with scoring(tmp_path, num_permits=0) as of:
        await of.generated([0])
        of.new_lead(of.bench.scale_up(weights=snapshot(0)), of.bench.open_iteration())
        await of.until_asked(first=1)
        await of.bench.clock.advance(ACK_WAIT_S)
        await of.bench.changes.until(lambda: of.watch.prompts("fetch") == [0, 0])
        of.permit()
        await of.generated(range(1, 4))
        await of.bench.published("iteration_reported")
        assert of.scored() == [0, 1, 2, 3]
        assert of.watch.prompts("publish scored").count(0) == of.watch.prompts("ack").count(0) == 1


async def test_gpus_that_are_no_whole_copies_are_refused_with_the_remedy(tmp_path: Path) -> None:
    async with scoring(tmp_path, **ONE_COPY) as of:
        lead = of.new_lead()
        first, second = of.bench.grants()
        with pytest.raises(CommandRefused, match=r"not whole copies of layout .*; name all GPUs of each copy"):
            lead.check(of.bench.scale_up([second], members=[first, second]))
