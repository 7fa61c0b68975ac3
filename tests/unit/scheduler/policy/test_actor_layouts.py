"""Layouts of other kinds of copies: which one a policy takes on a number of GPUs, and what a change to it takes.

The job: 8 GPUs, actor on 0-1 as tp2, rollout on 2-5, inference on 6-7. It allows one-GPU copies besides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policy.actor_layouts import ActorLayouts, actor_layouts, is_allowed
from services.scheduler.policy.dynarl import split_of
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.situation import Situation, Split
from services.scheduler.policy.stages import remaining_work, slowest_stage_s
from services.scheduler.policy.tide.cluster import cluster_of, fitting, gpus_there
from services.scheduler.policy.tide.seating import seated
from services.scheduler.state.costs import Rates
from services.scheduler.state.layouts import replicas
from services.scheduler.state.observed import TrainerRate
from services.scheduler.state.remembered import Assignment, as_configured
from services.scheduler.state.switch_costs import ReshardCosts
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.situations import after, gpus, job, seen
from tidegate.types import Layout

HOME_ALONE = job(actor=2, rollout=4, inference=2, actor_tp=2, prompts=48, group_size=2, minibatches=2)
"""48 sequences a minibatch."""
SINGLES = tuple(Layout(dp=dp) for dp in range(1, 9))
SPEC = replace(HOME_ALONE, layouts=SINGLES)
EVERYWHERE = Assignment(replicas(gpus(0, 8), 1), None, ())
RATES = Rates(trainer=((1, 100.0), (4, 200.0)), inference_tokens_per_s_per_gpu=1e9)


def sit(spec: JobSpec = SPEC, at: Assignment = EVERYWHERE, *measured: tuple[Layout, float]) -> Situation:
    rates = tuple(TrainerRate(*each) for each in measured)
    return seen(replace(spec, rates=RATES), at, num_unfinished=8, measured=rates)


def chosen(found: ActorLayouts, *sizes: int) -> list[str]:
    return [str(found.on(num_gpus)) for num_gpus in sizes]


def test_numbers_of_gpus_that_home_copies_cannot_make_are_reached_by_others() -> None:
    alone, both = actor_layouts(sit(HOME_ALONE), 8), actor_layouts(sit(), 8)
    assert chosen(alone, 1, 2, 3, 4, 5) == ["None", "tp2", "tp2", "tp2-dp2", "tp2-dp2"]
    assert chosen(both, 1, 2, 3, 4, 5) == ["single", "tp2", "dp3", "tp2-dp2", "dp5"]
    assert (alone.step, alone.fewest, both.step, both.fewest) == (2, 2, 1, 1)
    assert np.all(np.diff(both.rates) >= 0)


def test_before_anything_is_measured_the_homes_kind_comes_first_and_then_the_most_copies() -> None:
    assert chosen(actor_layouts(sit(), 8), 2, 4, 8) == ["tp2", "tp2-dp2", "tp2-dp4"]
    odd = replace(HOME_ALONE, layouts=(Layout(pp=3, dp=1), Layout(dp=3), Layout(cp=3)))
    assert chosen(actor_layouts(sit(odd), 8), 3) == ["dp3"]


def test_of_kinds_on_as_many_gpus_the_faster_one_by_its_measurements_is_taken() -> None:
    slow_home = sit(SPEC, EVERYWHERE, (Layout(tp=2), 80.0), (Layout(dp=3), 180.0))
    assert chosen(actor_layouts(slow_home, 8), 2, 4) == ["dp2", "dp4"]
    fast_home = sit(SPEC, EVERYWHERE, (Layout(tp=2), 180.0), (Layout(dp=3), 100.0))
    assert chosen(actor_layouts(fast_home, 8), 1, 2, 3, 4) == ["single", "tp2", "tp2", "tp2-dp2"], "3 GPUs are slower"


def test_what_was_measured_of_the_home_alone_tells_nothing_of_other_kinds() -> None:
    found = actor_layouts(sit(SPEC, EVERYWHERE, (Layout(tp=2), 20.0)), 8)
    assert chosen(found, 1, 2, 3) == ["single", "tp2", "dp3"]


def test_rates_that_the_job_gives_by_layout_count_until_it_has_measured_its_own() -> None:
    by_layout = tuple((Layout(dp=dp), 500.0 * dp) for dp in (1, 8))
    situation = sit()
    spec = replace(situation.spec, rates=replace(RATES, by_layout=by_layout))
    found = actor_layouts(replace(situation, spec=spec), 8)
    assert chosen(found, 2, 4) == ["dp2", "dp4"]
    assert found.rates[[1, 2, 8]] == pytest.approx([500.0, 1000.0, 4000.0])


def test_fewer_copies_of_the_home_than_have_room_are_no_layout() -> None:
    large = replace(HOME_ALONE, fewest_actor_copies=2)
    found = actor_layouts(sit(large), 8)
    assert chosen(found, 2, 3, 4, 6, 8) == ["None", "None", "tp2-dp2", "tp2-dp3", "tp2-dp4"]
    assert (found.step, found.fewest) == (2, 4)
    assert list(found.rates[:2]) == [0.0, 0.0]
    assert not is_allowed(large, Layout(tp=2))
    assert is_allowed(large, Layout(tp=2, dp=2))
    assert chosen(actor_layouts(sit(replace(large, layouts=SINGLES)), 8), 2, 4) == ["dp2", "tp2-dp2"]


def test_every_layout_is_one_that_the_job_allows() -> None:
    shards = replace(HOME_ALONE, num_logical_shards=4, layouts=(Layout(tp=2, pp=2), Layout(tp=2, pp=2, dp=2)))
    for spec in (SPEC, HOME_ALONE, shards):
        for at in (EVERYWHERE, as_configured(spec)):
            found = actor_layouts(sit(spec, at), 8)
            layouts = [layout for num_gpus in range(9) if (layout := found.on(num_gpus))]
            assert layouts
            assert all(is_allowed(spec, layout) for layout in layouts)
    assert not is_allowed(SPEC, Layout(pp=2))
    assert not is_allowed(shards, Layout(tp=2, dp=3)), "3 copies do not divide 4 shards"


def test_a_trainer_that_keeps_its_gpus_keeps_its_layout_whatever_is_measured() -> None:
    at = Assignment(replicas(gpus(2, 6), 1), Placed(gpus(0, 2), Layout(tp=2)), gpus(6, 8))
    situation = sit(SPEC, at, (Layout(tp=2), 20.0), (Layout(dp=2), 180.0))
    assert chosen(actor_layouts(situation, 8), 2, 3) == ["tp2", "dp3"]
    assert seated(situation, Split(4, 2, 2), at, gpus_there(situation)) == at
    grown = seated(situation, Split(3, 3, 2), at, gpus_there(situation))
    assert grown.trainer is not None
    assert (grown.trainer.layout, grown.trainer.gpus[:2]) == (Layout(dp=3), gpus(0, 2))


def test_a_layout_of_a_kind_that_is_not_allowed_any_more_is_left_at_the_next_seating() -> None:
    at = Assignment(replicas(gpus(2, 6), 1), Placed(gpus(0, 2), Layout(pp=2)), gpus(6, 8))
    found = seated(sit(SPEC, at), Split(4, 2, 2), at, gpus(0, 8))
    assert found.trainer == Placed(gpus(0, 2), Layout(tp=2))


def test_tide_counts_gpus_in_steps_that_every_kind_is_made_of() -> None:
    situation = sit()
    cluster = cluster_of(situation, EVERYWHERE, gpus_there(situation))
    assert (cluster.unit_size, len(cluster.unit_rates)) == (1, 9)
    assert fitting(situation, Split(0, 3, 2), 8) == Split(3, 3, 2)
    assert seated(situation, Split(3, 3, 2), EVERYWHERE, gpus(0, 8)).trainer == Placed(gpus(0, 3), Layout(dp=3))
    pairs = sit(HOME_ALONE)
    assert fitting(pairs, Split(0, 3, 2), 8) == Split(4, 2, 2)


def test_a_change_between_kinds_takes_as_long_as_if_no_rank_kept_anything() -> None:
    """8 bytes of weights, 24 of the optimizer, a byte a second: tp2 on 2 GPUs becomes three copies on 3 GPUs."""
    reshard = ReshardCosts(
        setup_s=1.0, communicators_s=5.0, bytes_per_s=1.0, weight_bytes=8, optimizer_bytes=24, gpus_per_host=8
    )
    situation = sit()
    costs = replace(situation.costs, reshard=reshard)
    found = actor_layouts(situation, 8)
    seconds = found.switches_s(costs)
    assert seconds[2, 3] == pytest.approx(1 + 5 + max(8 + 24 / 3, (8 * 3 + 24) / 2))
    assert seconds[3, 2] == pytest.approx(1 + 5 + max((8 + 24) / 2, (8 + 24) / 3))
    assert seconds[2, 4] == pytest.approx(actor_layouts(sit(HOME_ALONE), 8).switches_s(costs)[1, 2]), "one kind"
    assert not seconds.diagonal().any()
    assert seconds[0, 1:].tolist() == [situation.costs.load_s] * 8
    flat = found.switches_s(situation.costs)
    assert flat[1:, 1:].max() == flat[2, 3] == situation.costs.reshard_s


def test_dynarl_gives_the_trainer_gpus_that_home_copies_leave_over() -> None:
    assert split_of(sit(HOME_ALONE), 3) == Split(3, 2, 3)
    assert split_of(sit(), 3) == Split(3, 3, 2)
    ended = replace(sit(SPEC, EVERYWHERE, (Layout(dp=3), 180.0)), generation=seen(SPEC, EVERYWHERE).generation)
    left = replace(remaining_work(ended, uses_hints=False), to_train_tokens=1800.0, to_infer_tokens=0.0)
    assert slowest_stage_s(ended, left, Split(0, 3, 2)) == pytest.approx(10 + ended.costs.load_s, rel=1e-4)


def test_collocated_phases_train_in_the_fastest_layout_on_all_gpus_and_stay_in_it() -> None:
    odd = job(actor=2, rollout=3, inference=2, actor_tp=2, prompts=42, group_size=2, minibatches=2)
    odd = replace(odd, layouts=SINGLES[:7], rates=RATES)
    memory, found = None, []
    at = Assignment((), None, gpus(0, 7))
    for measured in ((), (TrainerRate(Layout(dp=7), 1.0),), (TrainerRate(Layout(dp=7), 1.0),)):
        choice = PhasesPolicy().choose(seen(odd, at, measured=measured, remembered=memory))
        memory, at = after(choice), choice.assignment
        assert at.trainer is not None
        found.append(str(at.trainer.layout))
    assert found == ["dp7", "dp7", "dp7"], "tp2 leaves a GPU over"
    without = seen(replace(odd, layouts=()), Assignment((), None, gpus(0, 7)))
    trainer = PhasesPolicy().choose(without).assignment.trainer
    assert trainer == Placed(gpus(0, 6), Layout(tp=2, dp=3))
