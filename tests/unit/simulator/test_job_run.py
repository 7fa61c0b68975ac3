"""Whole jobs under policies: one state, one clock, and what is learned goes from iteration to iteration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf
from typing import Any

import pytest

from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.tide_policy import TidePolicy
from simulator.happenings import What
from simulator.job_iterations import SimulatedJob
from simulator.job_run import JobRun, simulate_job
from simulator.run import simulate
from simulator.scenario import Scenario, parse_scenario
from simulator.scheduled import Finished, JobFailed, Scheduled
from tests import effort

THREE_NODES: dict[str, Any] = {
    "physics": {"law": "published_fit"},
    "cluster": {
        "nodes": {"n0": 4, "n1": 4, "n2": 4},
        "placement": {"actor": "0-1", "rollout": "2-7", "inference": "8-11"},
    },
    "algorithm": {"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 2},
    "lengths": {"median_tokens": 800, "max_tokens": 4000},
    "costs": {"engine": {"max_running": 8, "kv_capacity_tokens": 20_000}, "trainer": {"rate_gpus": 12}},
}
"""n2 has all GPUs of the inference, and n1 has two engines."""
POLICIES: dict[str, Policy] = {
    "static": StaticPolicy(),
    "phases": PhasesPolicy(),
    "rlinf": RLinfPolicy(RLinfRules(16, auto_scheduler=True, use_pre_process_policy=True)),
    "dynarl": DynaRLPolicy(DynaRLRules()),
    "tide": TidePolicy(),
}
DRIFT = {"mean_tokens": {0: 500, 2: 1500}, "epoch_prompts": 24, "trained_share": {0: 1, 2: 0.5}}
NUM_SAMPLES, NUM_GPUS = 64, 12


def scenario(**changes: Any) -> Scenario:
    return parse_scenario({**THREE_NODES, **changes})


def job(num_iterations: int = 3, **changes: Any) -> SimulatedJob:
    return SimulatedJob(scenario(**changes), num_iterations, seed=3)


def run_of(own: SimulatedJob, name: str) -> JobRun:
    return simulate_job(own, POLICIES[name], name=name)


def finished(own: SimulatedJob, name: str) -> list[Finished]:
    return list(Scheduled(own.iteration(0), POLICIES[name]).run_job(own, name))


def run_and_finished(own: SimulatedJob, name: str) -> tuple[JobRun, list[Finished]]:
    """The rows of a job, and what they are made of."""
    kept: list[Finished] = []

    class Keeping(Scheduled):
        def run_job(self, job: SimulatedJob, name: str) -> Iterator[Finished]:
            for each in super().run_job(job, name):
                kept.append(each)
                yield each

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("simulator.job_run.Scheduled", Keeping)
        return run_of(own, name), kept


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_of_one_iteration_is_a_run_of_one_iteration(name: str) -> None:
    own, (got,) = run_and_finished(job(1), name)
    want = simulate(scenario(), POLICIES[name], name=name, seed=3)
    assert got.run == want
    (row,) = own.rows
    assert (row.seconds, row.num_moves, row.wait_s) == (want.iteration_s, want.num_moves, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_seconds_add_up_and_every_sample_has_one_fate(name: str) -> None:
    own = run_of(job(drift=DRIFT), name)
    assert sum(row.seconds for row in own.rows) == pytest.approx(own.total_s)
    assert [row.num_filtered for row in own.rows] == [0, 16, 32]
    for row in own.rows:
        assert (row.num_samples + row.num_filtered, row.num_lost) == (NUM_SAMPLES, 0)
        assert row.seconds > row.bound_s
    assert own == run_of(job(drift=DRIFT), name), "the same seed gives the same job"


@pytest.mark.parametrize("name", ["static", "tide"])
def test_gpu_time_adds_up_and_happenings_have_the_time_of_the_job(name: str) -> None:
    own, ended = run_and_finished(job(), name)
    for row in own.rows:
        assert sum(row.gpu_s.values()) == pytest.approx(row.seconds * NUM_GPUS)
    runs = [each.run for each in ended]
    times = [happening.at_s for run in runs for happening in run.history]
    assert times == sorted(times)
    assert times[-1] == own.total_s


def test_what_is_learned_goes_on_to_the_next_iteration() -> None:
    own = job(4, drift={"mean_tokens": {0: 500, 3: 2000}})
    of_job, ended = run_and_finished(own, "tide")
    rows = of_job.rows
    expected = [row.expected_mean_tokens for row in rows]
    assert expected[0] == pytest.approx(500)
    assert expected[1:] == sorted(expected[1:])
    assert all(row.expected_mean_tokens < row.mean_tokens for row in rows), "they grow, and what is learned is older"
    learned = ended[0].learned
    assert learned.rates
    assert learned.update_s == own.scenario.costs.trainer.fixed_s


FAULTS: dict[str, dict[str, Any]] = {
    "a node at the beginning of iteration 1": {"at_s": 0, "iteration": 1, "kind": "node", "node": "n2"},
    "a node that is back in a later iteration": {"at_s": 5, "kind": "node", "node": "n2", "back_after_s": 100},
    "a GPU in iteration 2": {"at_s": 3, "iteration": 2, "kind": "gpu", "gpu": 5},
    "a GPU at a time of the job": {"at_s": 80, "kind": "gpu", "gpu": 10, "back_after_s": 30},
}


STRUCK = [(fault, name) for fault in FAULTS for name in ("dynarl", "tide")]
LATER = "a node that is back in a later iteration"


@pytest.mark.parametrize(
    ("case", "name"), effort.cases(STRUCK, always=[(LATER, "tide"), *((fault, "dynarl") for fault in FAULTS)])
)
def test_a_fault_strikes_once_and_lasts_over_iterations(case: str, name: str) -> None:
    fault = FAULTS[case]
    own = job(3, faults=[fault])
    runs = [each.run for each in finished(own, name)]
    assert [(run.num_samples, run.num_lost) for run in runs] == [(NUM_SAMPLES, 0)] * 3
    history = [each for run in runs for each in run.history]
    lost = [each for each in history if each.what is What.GPU_LOST]
    assert len(lost) == (4 if fault["kind"] == "node" else 1)
    before_s = sum(run.iteration_s for run in runs[: fault.get("iteration", 0)])
    assert [each.at_s for each in lost] == pytest.approx([before_s + fault["at_s"]] * len(lost))
    lost_gpus = {each.gpus[0] for each in lost}
    back_s = lost[0].at_s + fault.get("back_after_s", inf)
    for each in history:
        if each.what in (What.ENGINE_ACQUIRED, What.INFERENCE_RESIZED, What.TRAINER_RESIZED, What.GPUS_FREED):
            assert lost_gpus.isdisjoint(each.gpus) or not lost[0].at_s < each.at_s < back_s
    assert any(each.at_s == back_s and lost_gpus & set(each.gpus) for each in history) == (back_s < inf)


def test_a_component_without_gpus_between_two_iterations_waits_for_them() -> None:
    """The inference loses all its GPUs in the sync of the first iteration."""
    end_s = run_of(job(1), "static").total_s
    fault = {"at_s": end_s - 1, "kind": "node", "node": "n2", "back_after_s": 75}
    first, second = run_of(job(2, faults=[fault]), "static").rows
    assert first.ends_s == end_s
    assert 74 <= second.wait_s < 110
    assert second.num_samples == NUM_SAMPLES
    assert sum(second.gpu_s.values()) == pytest.approx(second.seconds * NUM_GPUS)


def test_a_fixed_split_waits_for_a_node_that_comes_back_and_fails_without_it() -> None:
    fault = {"at_s": 0, "iteration": 1, "kind": "node", "node": "n2", "back_after_s": 400}
    assert run_of(job(2, faults=[fault]), "static").rows[1].seconds > 400
    with pytest.raises(JobFailed, match="the job is failed"):
        run_of(job(2, faults=[{**fault, "back_after_s": None}]), "static")


ON_N1: dict[str, Any] = {
    "nodes": THREE_NODES["cluster"]["nodes"],
    "placement": {"actor": "4-5", "rollout": "0-3,6-7", "inference": "8-11"},
}
"""The actor is at home on n1."""


@cache
def undisturbed_on_n1(name: str) -> JobRun:
    return run_of(job(2, cluster=ON_N1), name)


@pytest.mark.parametrize("name", effort.cases(["static", "phases", "dynarl", "tide"], always=["static", "tide"]))
@pytest.mark.parametrize("iteration", [0, 1])
def test_a_job_that_loses_the_actors_state_goes_back_to_its_checkpoint(name: str, iteration: int) -> None:
    """The actor's node is lost while it trains."""
    undisturbed = undisturbed_on_n1(name).rows[iteration]
    at_s = undisturbed.seconds - scenario().costs.sync.fixed_s - 1
    fault = {"at_s": at_s, "iteration": iteration, "kind": "node", "node": "n1", "back_after_s": 20}
    own, ended = run_and_finished(job(2, cluster=ON_N1, faults=[fault]), name)
    rows, last = own.rows, ended[iteration]
    assert [row.num_restarts for row in rows] == [int(at == iteration) for at in range(2)]
    assert [(row.num_samples, row.num_lost) for row in rows] == [(NUM_SAMPLES, 0)] * 2
    row = rows[iteration]
    assert [each.iteration_s for each in last.abandoned] == pytest.approx([at_s])
    assert scenario().costs.switch.trainer_cold_s <= row.wait_s < scenario().costs.switch.trainer_cold_s + 70
    assert row.seconds == pytest.approx(at_s + row.wait_s + last.run.iteration_s)
    for each in rows:
        assert sum(each.gpu_s.values()) == pytest.approx(each.seconds * NUM_GPUS)


def test_an_actor_that_loses_a_rank_in_the_sync_has_it_again_before_it_trains() -> None:
    end_s = run_of(job(1), "static").total_s
    fault = {"at_s": end_s - 1, "kind": "gpu", "gpu": 0, "back_after_s": 40}
    rows = run_of(job(2, faults=[fault]), "static").rows
    assert [(row.num_samples, row.num_restarts) for row in rows] == [(NUM_SAMPLES, 0)] * 2


def test_an_iteration_that_is_abandoned_as_it_begins_has_no_attempt_of_its_own() -> None:
    fault = {"at_s": 0, "iteration": 1, "kind": "node", "node": "n1", "back_after_s": 20}
    row = run_of(job(2, cluster=ON_N1, faults=[fault]), "static").rows[1]
    assert (row.num_restarts, row.num_samples) == (1, NUM_SAMPLES)
    assert sum(row.gpu_s.values()) == pytest.approx(row.seconds * NUM_GPUS)
