"""Policies on simulated iterations: the policy's view, the moves from its choices, and the results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest

from benchmarks.direct import simulate
from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.observed import ENDED
from services.scheduler.state.remembered import Assignment, as_configured
from services.scheduler.state.values import JobSpec, Placed
from simulator.cost_model import Costs
from simulator.gpus import Doing
from simulator.happenings import Happening, What
from simulator.run import Run
from simulator.scenario import Scenario, ScenarioError, load_scenario, parse_scenario
from simulator.scheduled import JobFailed
from tests import effort
from tests.unit.simulator.scenarios import PUBLISHED, SMALL, small
from tests.unit.simulator.whole_runs import check_whole, numbers_of
from tidegate.types import GpuId, Layout, Role

POLICIES: dict[str, Policy] = {
    "phases": PhasesPolicy(),
    "rlinf": RLinfPolicy(RLinfRules(16, auto_scheduler=True, use_pre_process_policy=True)),
    "dynarl": DynaRLPolicy(DynaRLRules(request_priority=True)),
    "tide": TidePolicy(),
}


@dataclass
class Asked:
    """A policy that stays as configured and keeps every situation."""

    seen: list[Situation]

    def check(self, spec: JobSpec) -> None:
        """Every job is legal."""

    def choose(self, situation: Situation) -> Choice:
        self.seen.append(situation)
        return Choice(as_configured(situation.spec), True, "as configured")


def test_the_published_scenario_has_the_defaults_of_every_cost() -> None:
    scenario = load_scenario(PUBLISHED)
    assert scenario.costs == Costs()
    assert scenario.lengths == Scenario.model_fields["lengths"].default
    assert scenario.algorithm == Scenario.model_fields["algorithm"].default


@pytest.mark.parametrize("directly", effort.cases([False, True], always=[False]))
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_trains_every_sample_once_and_the_same_seed_gives_the_same_run(name: str, directly: bool) -> None:
    runs = [simulate(small(), POLICIES[name], seed=3, directly=directly) for _ in range(2)]
    check_whole(runs[0], small())
    assert runs[0] == runs[1]
    assert runs[0].iteration_s > runs[0].bound.bound_s


@pytest.mark.parametrize("name", ["phases", "dynarl", "tide"])
def test_a_trainer_gets_numbers_of_gpus_that_copies_of_its_home_cannot_make(name: str) -> None:
    odd: dict[str, Any] = {
        "physics": {"law": "published_fit"},
        "cluster": {"nodes": {"n0": 7}, "placement": {"actor": "0-1", "rollout": "2-5", "inference": "6"}},
        "algorithm": {"prompts_per_iteration": 28, "group_size": 4, "n_minibatches": 4},
        "actor_layout": {"tp": 2},
        # So slow a trainer is worth a way home.
        "costs": {**SMALL["costs"], "trainer": {"rate_gpus": 8, "rate_tokens_per_s": 1_000}},
    }
    found = {}
    for layouts in ([], [{"tp": 1}]):
        scenario = small(**odd, actor_layouts=layouts)
        run = simulate(scenario, POLICIES[name], seed=3)
        check_whole(run, scenario)
        trainers = {each.assignment.trainer.layout for each in run.decisions if each.assignment.trainer}
        found[bool(layouts)] = {layout.num_ranks for layout in trainers}
        assert all(layout.tp == 2 or layouts for layout in trainers)
    assert max(found[False]) == 6
    assert max(found[True]) == 7, "the last minibatch has every GPU"


def test_a_kind_of_copies_that_is_known_to_be_faster_is_taken_on_as_many_gpus() -> None:
    efficiency = {f"dp{dp}": 1.5 for dp in range(1, 9)}
    trainer = {"rate_gpus": 8, "layout_efficiency": efficiency}
    own = {"actor_layout": {"tp": 2}, "actor_layouts": [{"tp": 1}], "costs": {**SMALL["costs"], "trainer": trainer}}
    run = simulate(small(**own), POLICIES["phases"], seed=3)
    trainers = [each.assignment.trainer.layout for each in run.decisions if each.assignment.trainer]
    assert Layout(dp=8) in trainers
    assert trainers[-1] == Layout(tp=2), "home"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", effort.cases([0, 1, 2], always=[1]))
def test_the_history_is_the_same_through_the_scheduler_and_directly(name: str, seed: int) -> None:
    check_both_ways(small(), POLICIES[name], seed)


def check_both_ways(scenario: Scenario, policy: Policy, seed: int) -> None:
    """Compare both histories up to the last optimizer step. After it the scheduler returns all components to their
    placements, and has deadlines of its own."""
    runs = [simulate(scenario, policy, seed=seed, directly=directly) for directly in (False, True)]
    got, want = (up_to_the_last_step(run) for run in runs)
    assert [replace(each, at_s=0) for each in got] == [replace(each, at_s=0) for each in want]
    assert [each.at_s for each in got] == pytest.approx([each.at_s for each in want])
    assert runs[0].iteration_s == pytest.approx(runs[1].iteration_s)
    assert [each.assignment for each in runs[0].decisions] == [each.assignment for each in runs[1].decisions]


@pytest.mark.parametrize("name", ["dynarl", "tide"])
def test_reshards_with_a_model_take_the_same_time_through_the_scheduler_and_directly(name: str) -> None:
    own = {
        "algorithm": {"prompts_per_iteration": 32, "group_size": 4, "n_minibatches": 4},
        "costs": {**SMALL["costs"], "trainer": {"rate_gpus": 8, "rate_tokens_per_s": 2_000, "fixed_s": 1}},
    }
    scenarios = [small(**own, model={"num_layers": 8})] * 2 + [small(**own)]
    runs = [
        simulate(scenario, POLICIES[name], seed=1, directly=directly)
        for scenario, directly in zip(scenarios, (False, True, True), strict=True)
    ]
    got, want = (up_to_the_last_step(run) for run in runs[:2])
    assert [replace(each, at_s=0) for each in got] == [replace(each, at_s=0) for each in want]
    assert [each.at_s for each in got] == pytest.approx([each.at_s for each in want])
    assert runs[0].iteration_s == pytest.approx(runs[1].iteration_s)
    assert runs[0].iteration_s != pytest.approx(runs[2].iteration_s)


def up_to_the_last_step(run: Run) -> list[Happening]:
    last = max(at for at, each in enumerate(run.history) if each.what is What.MINIBATCH_FINISHED)
    return [each for each in run.history[: last + 1] if each.what is not What.WOKE]


FAULTS = {
    "a GPU of the rollout": [{"at_s": 5, "kind": "gpu", "gpu": 2, "back_after_s": 1}],
    "a GPU of the actor": [{"at_s": 14, "kind": "gpu", "gpu": 1, "back_after_s": 4}],
    "a GPU of the inference": [{"at_s": 5, "kind": "gpu", "gpu": 6, "back_after_s": 0}],
    "an engine": [{"at_s": 5, "kind": "engine", "engine": 0}],
    "a late event": [{"at_s": 0, "kind": "late", "what": "minibatch_finished", "late_s": 9}],
}


STRUCK = [*product(FAULTS, ["tide"]), *product(["a GPU of the rollout", "a GPU of the actor"], POLICIES)]


@pytest.mark.parametrize("directly", effort.cases([False, True], always=[False]))
@pytest.mark.parametrize(("fault", "name"), effort.cases(product(FAULTS, POLICIES), always=STRUCK))
def test_a_fault_loses_no_sample_and_trains_none_twice(name: str, fault: str, directly: bool) -> None:
    scenario = small(faults=FAULTS[fault])
    check_whole(simulate(scenario, POLICIES[name], seed=3, directly=directly), scenario)


@pytest.mark.parametrize("directly", effort.cases([False, True], always=[False]))
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("gpu", "at_s"), effort.cases([(0, 5), (0, 14), (2, 5), (6, 14)], always=[(0, 14)]))
def test_an_iteration_continues_without_a_gpu_that_never_comes_back(
    name: str, gpu: int, at_s: float, directly: bool
) -> None:
    scenario = small(faults=[{"at_s": at_s, "kind": "gpu", "gpu": gpu}])
    check_whole(simulate(scenario, POLICIES[name], seed=3, directly=directly), scenario)


def test_a_component_gets_other_gpus_a_minute_after_the_loss_of_all_its_own() -> None:
    """Each GPU has a copy of the inference, so the minutes of the two run at once."""
    faults: list[dict[str, object]] = [{"at_s": 14, "kind": "gpu", "gpu": gpu} for gpu in (6, 7)]
    run = simulate(small(faults=faults), POLICIES["rlinf"], seed=3)
    check_whole(run, small(faults=faults))
    lost = {GpuId("n0/6"), GpuId("n0/7")}
    resized = next(each for each in run.history if each.what is What.INFERENCE_RESIZED and each.gpus and each.at_s > 14)
    assert 14 + 60 < resized.at_s < 14 + 70
    assert not lost & set(resized.gpus)


THREE_NODES: dict[str, Any] = {
    **SMALL,
    "physics": {"law": "published_fit"},
    "cluster": {
        "nodes": {"n0": 4, "n1": 4, "n2": 4},
        "placement": {"actor": "0-1", "rollout": "2-7", "inference": "8-11"},
    },
    "costs": {"engine": {"max_running": 8, "kv_capacity_tokens": 20_000}, "trainer": {"rate_gpus": 12}},
}
"""n2 has all GPUs of the inference, and n1 has two engines."""


def without_node(node: str, at_s: float, **back: float) -> Scenario:
    return parse_scenario({**THREE_NODES, "faults": [{"at_s": at_s, "kind": "node", "node": node, **back}]})


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("node", "at_s"), effort.cases([("n1", 2), ("n1", 14), ("n2", 5), ("n2", 14)], always=[("n1", 14)])
)
def test_an_iteration_continues_without_a_node_that_is_lost_for_good(name: str, node: str, at_s: float) -> None:
    scenario = without_node(node, at_s)
    run = simulate(scenario, POLICIES[name], seed=3)
    check_whole(run, scenario)
    resized = [each for each in run.history if each.what in (What.INFERENCE_RESIZED, What.TRAINER_RESIZED)]
    assert all(not gpu.startswith(node) for each in resized if each.at_s > at_s for gpu in each.gpus)
    assert run.iteration_s < simulate(parse_scenario(THREE_NODES), POLICIES[name], seed=3).iteration_s + 70, (
        "a minute of waiting, the lost work, and the work with fewer GPUs"
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("back_after_s", effort.cases([0, 3, 75], always=[3]))
def test_a_node_that_comes_back_loses_no_sample_and_trains_none_twice(name: str, back_after_s: float) -> None:
    scenario = without_node("n2", 14, back_after_s=back_after_s)
    run = simulate(scenario, POLICIES[name], seed=3)
    check_whole(run, scenario)
    freed = [each for each in run.history if each.what is What.GPUS_FREED and set(each.gpus) & {GpuId("n2/0")}]
    assert any(each.at_s == 14 + back_after_s for each in freed) == (run.iteration_s > 14 + back_after_s)


def test_the_loss_of_a_node_with_gpus_of_the_actor_returns_the_job_to_its_checkpoint() -> None:
    """The state of the actor's ranks is lost with the node's memory."""
    own = {**THREE_NODES["cluster"], "placement": {"actor": "4-5", "rollout": "0-3,6-7", "inference": "8-11"}}
    scenario = parse_scenario({**THREE_NODES, "cluster": own, "faults": [{"at_s": 14, "kind": "node", "node": "n1"}]})
    keeps = RLinfPolicy(RLinfRules(16, auto_scheduler=True))
    with pytest.raises(JobFailed, match="actor@n1 did not renew its lease; restart 1 of"):
        simulate(scenario, keeps, seed=3)


def test_under_static_a_job_fails_after_the_loss_of_a_node_with_the_schedulers_message() -> None:
    with pytest.raises(JobFailed, match=r"waited .* s for an instance on n2, whose gate must tell of lost GPUs"):
        simulate(without_node("n2", 5), StaticPolicy(), seed=3)


def test_under_static_a_job_fails_after_the_loss_of_a_gpu_with_the_schedulers_message() -> None:
    with pytest.raises(JobFailed, match="the gate of n0/0, which a worker still holds, was asked 16 times"):
        simulate(small(faults=[{"at_s": 5, "kind": "gpu", "gpu": 0}]), StaticPolicy(), seed=3)


def test_under_static_a_job_continues_without_a_copy_of_the_inference() -> None:
    scenario = small(faults=[{"at_s": 5, "kind": "gpu", "gpu": 6}])
    check_whole(simulate(scenario, StaticPolicy(), seed=3), scenario)


def test_a_trainer_gets_other_gpus_after_the_loss_of_one_that_it_waits_for() -> None:
    scenario = parse_scenario(
        {
            "physics": {"law": "published_fit"},
            "cluster": {"nodes": {"n0": 12}, "placement": {"actor": "0-3", "rollout": "4-9", "inference": "10-11"}},
            "actor_layout": {"tp": 2, "dp": 2},
            "algorithm": {"prompts_per_iteration": 12, "group_size": 1, "n_minibatches": 1, "streams": False},
            "lengths": {"median_tokens": 800, "max_tokens": 4000},
            "costs": {"engine": {"max_running": 2, "kv_capacity_tokens": 20_000}, "trainer": {"rate_gpus": 12}},
            "faults": [{"at_s": 11.0, "kind": "gpu", "gpu": 2}],
        }
    )
    run = simulate(scenario, POLICIES["dynarl"], seed=5, directly=True)
    assert numbers_of(run, What.MOVE_DROPPED)
    check_whole(run, scenario)


@pytest.mark.parametrize("name", POLICIES)
def test_a_trainer_begins_no_minibatch_before_a_requested_resize(name: str) -> None:
    scenario = small(algorithm={"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 4})
    run = simulate(scenario, POLICIES[name], seed=0)
    changes = [
        after for before, after in pairwise(run.decisions) if after.assignment.trainer != before.assignment.trainer
    ]
    for change in changes:
        since = [each.what for each in run.history if each.at_s >= change.at_s]
        kinds = [what for what in since if what in (What.MINIBATCH_STARTED, What.TRAINER_RESIZED)]
        assert not kinds or kinds[0] is What.TRAINER_RESIZED


def test_a_policy_sees_no_length_of_an_unfinished_response_and_all_counts_add_up() -> None:
    asked = Asked([])
    run = simulate(small(), asked, seed=3)
    lengths = {each.number: each.count for each in run.history if each.what is What.SEQUENCE_FINISHED}
    for situation in asked.seen:
        generation = situation.generation
        ended = generation.place_of <= ENDED
        assert all(
            length == lengths[index] if ended[index] else length < lengths[index]
            for index, length in enumerate(generation.lengths)
        )
        engines = [gpu for engine in situation.engines for gpu in engine.gpus]
        placed = situation.trainer.placed.gpus if situation.trainer.placed else ()
        everywhere = Counter((*engines, *placed, *situation.inference.gpus, *situation.free, *situation.moving))
        assert everywhere == Counter(situation.spec.gpus)


def test_a_policy_is_asked_at_a_boundary_before_the_next_minibatch_begins() -> None:
    asked = Asked([])
    simulate(small(algorithm={"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 4}), asked, seed=3)
    done = {each.trainer.training.num_minibatches_done for each in asked.seen if each.trainer.training.is_at_boundary}
    assert done == {0, 1, 2, 3, 4}


@dataclass
class Lending:
    """A policy that lends the trainer's GPUs to the rollout until `until_ms`. The trainer then gets them, and trains
    after the inference has finished."""

    until_ms: int

    def check(self, spec: JobSpec) -> None:
        """Every job is legal."""

    def choose(self, situation: Situation) -> Choice:
        home = as_configured(situation.spec)
        actor = situation.spec.placement[Role.ACTOR]
        lent = Assignment((*home.engines, actor.gpus), None, home.inference)
        is_over = situation.now_ms >= self.until_ms
        order = tuple(reversed(range(situation.generation.num_groups)))
        trains = situation.is_inferred
        return Choice(home if is_over else lent, trains, "lends", group_order=order, ask_at_ms=self.until_ms)


def test_a_choice_is_carried_out_as_soon_as_possible() -> None:
    few = {"engine": {"max_running": 4, "kv_capacity_tokens": 20_000}, "trainer": {"rate_gpus": 8}}
    run = simulate(small(costs=few), Lending(10_000), seed=3)
    states = [(round(each.start_s, 2), each.state) for each in run.timeline[GpuId("n0/0")]]
    # The release takes 2.1 s and the load 5 s.
    assert states[:2] == [(0, Doing.GENERATING), (10.0, Doing.SWITCHING)]
    assert (17.1, Doing.WAITING) in states
    assert [decided.at_s for decided in run.decisions] == [0, 10.0]
    started = next(each.at_s for each in run.history if each.what is What.MINIBATCH_STARTED)
    inferred = next(each.at_s for each in run.history if each.what is What.INFERENCE_FINISHED)
    assert started == inferred
    assert numbers_of(run, What.GROUP_FINISHED)[0] > 7, "the policy puts the last prompts first"


def test_a_placement_without_gpus_for_a_component_is_refused_by_its_key() -> None:
    placement = {"rollout": "0-7"}
    with pytest.raises(ScenarioError, match=r"cluster.placement.actor and cluster.placement.inference has no GPUs"):
        simulate(small(cluster={"nodes": {"n0": 8}, "placement": placement}), PhasesPolicy())


def test_the_phases_policy_trains_on_no_more_replicas_than_a_minibatch_has_samples() -> None:
    of_few = small(algorithm={"prompts_per_iteration": 6, "group_size": 1, "n_minibatches": 2})
    run = simulate(of_few, PhasesPolicy(), seed=3)
    want = tuple(GpuId(f"n0/{index}") for index in range(3))
    assert run.decisions[-2].assignment.trainer == Placed(want, Layout(dp=3)), (
        "the last decision returns to the placement"
    )
    check_whole(run, of_few)


def test_the_phases_policy_uses_every_gpu_for_one_stage_after_the_other() -> None:
    run = simulate(small(), PhasesPolicy(), seed=3)
    at = [each.assignment for each in run.decisions]
    everything = tuple(GpuId(f"n0/{index}") for index in range(8))
    assert [len(each.gpus) for each in at] == [8, 8, 8, 8]
    assert at[2].trainer == Placed(everything, Layout(dp=8))
    assert all((at[3].engines, at[3].trainer, at[3].inference)), "the components are back in their placements"


@pytest.mark.long
def test_a_trainer_stays_in_place_if_its_minibatch_is_longer_than_the_commands_deadline() -> None:
    endless = 10_000_000
    cluster = {"nodes": {"n0": 4, "n1": 4}, "placement": {"actor": "0-1", "rollout": "2-5", "inference": "6-7"}}
    algorithm = {"prompts_per_iteration": 8, "group_size": 4, "n_minibatches": 2, "prompt_tokens": endless}
    lengths = {"median_tokens": endless, "max_tokens": endless}
    physics = {"law": "published_fit"}
    scenario = parse_scenario({"physics": physics, "cluster": cluster, "algorithm": algorithm, "lengths": lengths})
    run = simulate(scenario, TidePolicy(), name="tide")
    check_whole(run, scenario)
