"""Policies that see wrong rates and lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.direct import simulate
from benchmarks.wrong_rates import MisinformedPolicy, Wrong
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.policy.trainer_rates import trainer_curve
from services.scheduler.state.remembered import Remembered, as_configured
from services.scheduler.state.values import JobSpec
from simulator.happenings import What
from simulator.iteration import SimulatedIteration
from simulator.job_spec import response_share
from simulator.scenario import parse_scenario

SMALL = parse_scenario(
    {
        "physics": {"law": "published_fit"},
        "cluster": {"nodes": {"n0": 8}, "placement": {"actor": "0-1", "rollout": "2-6", "inference": "7"}},
        "algorithm": {"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 2},
        "lengths": {"median_tokens": 800, "max_tokens": 4000},
        "costs": {
            "engine": {"gpus_per_engine": 1, "max_running": 8},
            "trainer": {"rate_gpus": 8, "rate_tokens_per_s": 4000, "fixed_s": 1.0},
        },
    }
)


def test_with_all_factors_1_a_policy_chooses_as_usual() -> None:
    want, found = (
        simulate(SMALL, policy, seed=1) for policy in (TidePolicy(), MisinformedPolicy(TidePolicy(), Wrong()))
    )
    assert found.decisions == want.decisions
    assert found.iteration_s == want.iteration_s


@pytest.mark.parametrize("wrong", [Wrong(trainer=3.0), Wrong(decode=0.3), Wrong(median=0.3, sigma=2.0)])
def test_wrong_rates_change_the_choices_of_tide_and_not_the_times_of_the_iteration(wrong: Wrong) -> None:
    want, found = (simulate(SMALL, MisinformedPolicy(TidePolicy(), each), seed=1) for each in (Wrong(), wrong))
    assert found.decisions != want.decisions
    by_the_same_rule = simulate(SMALL, MisinformedPolicy(PhasesPolicy(), wrong), seed=1)
    assert by_the_same_rule.iteration_s == simulate(SMALL, PhasesPolicy(), seed=1).iteration_s


def test_each_factor_multiplies_the_true_value() -> None:
    simulated = SimulatedIteration(SMALL, 1)
    world = simulated.world(as_configured(simulated.spec))
    true = simulated.situations.situation(world, Remembered())
    wrong = Wrong(trainer=1.2, decode=0.8, median=2.0, sigma=1.5).distorted(true)
    (size, rate), (want_size, want) = wrong.spec.rates.trainer[0], true.spec.rates.trainer[0]
    assert size == want_size
    assert rate == pytest.approx(1.2 * want)
    assert wrong.costs.decode.floor_s == pytest.approx(true.costs.decode.floor_s / 0.8)
    assert wrong.lengths.log_mean == pytest.approx(true.lengths.log_mean + 0.6931, abs=1e-4)
    assert wrong.lengths.sigma_group == 1.5 * true.lengths.sigma_group
    assert dataclasses.replace(wrong, spec=true.spec, costs=true.costs) == (
        dataclasses.replace(true, lengths=wrong.lengths)
    )


@pytest.mark.parametrize("directly", [False, True])
def test_a_wrong_speed_of_decoding_is_right_once_engines_generate(directly: bool) -> None:
    recording = RecordingPolicy()
    simulate(SMALL, MisinformedPolicy(recording, Wrong(decode=0.5)), seed=1, directly=directly)
    true = SimulatedIteration(SMALL, 1).spec.costs.decode
    generating = [each for each in recording.seen if any(engine.num_running for engine in each.engines)]
    assert recording.seen[0].costs.decode == true.slowed(2.0)
    assert len(generating) > 1
    for each in generating:
        found, want = (step.seconds(num_running=8, num_kv_tokens=4000) for step in (each.costs.decode, true))
        assert found == pytest.approx(want)


@dataclasses.dataclass(frozen=True)
class RecordingPolicy:
    """Chooses as `tide`, and records each situation."""

    seen: list[Situation] = dataclasses.field(default_factory=list)

    def check(self, spec: JobSpec) -> None:
        pass

    def choose(self, situation: Situation) -> Choice:
        self.seen.append(situation)
        return TidePolicy().choose(situation)


@pytest.mark.parametrize("directly", [False, True])
def test_measurements_are_true_whatever_rates_the_policy_sees(directly: bool) -> None:
    recording = RecordingPolicy()
    simulate(SMALL, MisinformedPolicy(recording, Wrong(trainer=2.0)), seed=1, directly=directly)
    first, last = recording.seen[0], recording.seen[-1]
    assert first.trainer.training.measured == ()
    assert first.trainer.training.update_s is None
    assert first.inference.measured_tokens_per_s_per_gpu is None
    share = response_share(SMALL, first.lengths)
    assert share < 1
    assert last.inference.measured_tokens_per_s_per_gpu == SMALL.costs.inference.rate_tokens_per_s * share
    assert last.trainer.training.update_s == SMALL.costs.trainer.fixed_s
    trained_in = [each.layout for each in last.trainer.training.measured]
    assert trained_in
    even = [layout.num_ranks for layout in trained_in if 32 % layout.dp == 0]
    want = [SMALL.costs.trainer.rate(size) * share for size in even]
    found = [trainer_curve(each).tokens_per_s(np.array(even), copy_size=1) for each in (first, last)]
    assert found[0] == pytest.approx([2 * rate for rate in want], rel=1e-5)
    assert found[1] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("streams", "want"), [(True, [1, 0, 1, 1]), (False, [0, 0, 1, 1])])
def test_a_trainer_measures_its_rate_with_a_group_if_it_streams_and_else_with_a_minibatch(
    streams: bool, want: list[int]
) -> None:
    own = SMALL.model_copy(update={"algorithm": SMALL.algorithm.model_copy(update={"streams": streams})})
    simulated = SimulatedIteration(own, 1)
    world = simulated.world(as_configured(simulated.spec))
    seen: list[int] = []
    for happening in world.happenings():
        if happening.what in (What.MINIBATCH_CLOSED, What.MINIBATCH_FINISHED) and len(seen) < 4:
            training = simulated.situations.training(world)
            seen += [len(training.measured), int(training.update_s is not None)]
    assert seen == want


def test_shuffled_hints_are_the_same_hints_of_other_prompts() -> None:
    simulated = SimulatedIteration(SMALL, 1)
    true = simulated.situations.situation(simulated.world(as_configured(simulated.spec)), Remembered())
    wrong = Wrong(are_hints_shuffled=True).distorted(true)
    assert sorted(wrong.generation.hints) == sorted(true.generation.hints)
    assert wrong.generation.hints != true.generation.hints
    assert wrong == Wrong(are_hints_shuffled=True).distorted(true), "and the same ones each time"
