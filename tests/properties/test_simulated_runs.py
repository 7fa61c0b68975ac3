"""Whatever fails and when: a policy's iteration ends, with every sample trained once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.direct import simulate
from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.fused import FusedPolicy
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.tide_policy import TidePolicy
from simulator.happenings import What
from simulator.scenario import Scenario, parse_scenario
from simulator.scheduled import JobFailed
from tests.effort import examples
from tests.unit.simulator.whole_runs import check_whole
from tidegate.types import PromptOrder

POLICIES: list[Policy] = [
    PhasesPolicy(),
    PhasesPolicy(PromptOrder.LONGEST_FIRST),
    FusedPolicy(),
    RLinfPolicy(RLinfRules(16, auto_scheduler=True, use_pre_process_policy=True)),
    RLinfPolicy(RLinfRules(16, auto_scheduler=True, use_wait_before_last_iter_policy=False)),
    DynaRLPolicy(DynaRLRules()),
    DynaRLPolicy(DynaRLRules(request_priority=True)),
    TidePolicy(),
    TidePolicy(revises=False),
]

when = st.floats(0, 40)
gpu_faults = st.builds(
    lambda at_s, gpu, back_s: {"at_s": at_s, "kind": "gpu", "gpu": gpu, "back_after_s": back_s},
    when,
    st.integers(0, 11),
    st.floats(0, 20),
)
engine_faults = st.builds(
    lambda at_s, engine: {"at_s": at_s, "kind": "engine", "engine": engine}, when, st.integers(0, 8)
)
late_faults = st.builds(
    lambda at_s, what, late_s: {"at_s": at_s, "kind": "late", "what": what, "late_s": late_s},
    when,
    st.sampled_from([what.value for what in What if what not in (What.SEQUENCE_FINISHED, What.ITERATION_FINISHED)]),
    st.floats(0, 20),
)

gone_for_good = st.builds(lambda at_s, gpu: {"at_s": at_s, "kind": "gpu", "gpu": gpu}, when, st.integers(0, 11))
Faults = st.SearchStrategy[dict[str, Any]]


nodes_gone = st.builds(
    lambda at_s, node, back: {"at_s": at_s, "kind": "node", "node": node, **back},
    when,
    st.sampled_from(["n1", "n2"]),
    st.one_of(st.just({}), st.builds(lambda back_s: {"back_after_s": back_s}, st.floats(0, 90))),
)
ONE_NODE = {"n0": 12}
THREE_NODES = {"n0": 4, "n1": 4, "n2": 4}


def apart(faults: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Without those of a node that is lost already, which a scenario may not have."""
    back_s: dict[str, float] = {}
    for each in sorted(faults, key=lambda each: each["at_s"]):
        node = each.get("node", "")
        if node and each["at_s"] <= back_s.get(node, -1.0):
            continue
        back_s[node] = each["at_s"] + each.get("back_after_s", inf)
        yield each


@st.composite
def scenarios(draw: st.DrawFn, losses: Faults = gpu_faults, nodes: Mapping[str, int] = ONE_NODE) -> Scenario:
    """Twelve GPUs, which come back when they are lost."""
    faults: list[dict[str, Any]] = draw(st.lists(st.one_of(losses, engine_faults, late_faults), max_size=3))
    faults = list(apart(faults))
    order, streams = draw(st.sampled_from(["arrival", "fixed"])), draw(st.booleans())
    return parse_scenario(
        {
            "physics": {"law": "published_fit"},
            "cluster": {"nodes": nodes, "placement": {"actor": "0-3", "rollout": "4-9", "inference": "10-11"}},
            "actor_layout": {"tp": 2, "dp": 2},
            "actor_layouts": draw(st.sampled_from([[], [{}], [{"pp": 3}, {"tp": 2, "pp": 2, "dp": 2}]])),
            "algorithm": {
                "prompts_per_iteration": draw(st.sampled_from([8, 16, 24])),
                "group_size": draw(st.sampled_from([1, 4])),
                "n_minibatches": draw(st.sampled_from([1, 2, 4])),
                "minibatch_order": order,
                "streams": streams,
            },
            "lengths": {
                "law": draw(st.sampled_from(["lognormal", "long_tailed"])),
                "median_tokens": 800,
                "hint_sigma": draw(st.sampled_from([0.3, 3.0])),
                "max_tokens": 4000,
                "mean_turns": draw(st.sampled_from([1.0, 2.5])),
                "environment_s": 1.0,
            },
            "costs": {
                "engine": {"max_running": draw(st.sampled_from([2, 16])), "kv_capacity_tokens": 20_000},
                "trainer": {"rate_gpus": 12},
            },
            "faults": faults,
        }
    )


@settings(max_examples=examples(60), deadline=None)
@given(scenarios(), st.sampled_from(POLICIES), st.integers(0, 2**31), st.booleans())
def test_every_sample_is_trained_once_whatever_fails(
    scenario: Scenario, policy: Policy, seed: int, directly: bool
) -> None:
    check_whole(simulate(scenario, policy, seed=seed, directly=directly), scenario)


@settings(max_examples=examples(40), deadline=None)
@given(scenarios(gone_for_good), st.sampled_from([*POLICIES, StaticPolicy()]), st.integers(0, 2**31))
def test_without_gpus_that_never_come_back_an_iteration_ends_or_its_job_fails_with_a_reason(
    scenario: Scenario, policy: Policy, seed: int
) -> None:
    """It never stalls: with nothing due and no event outstanding the world says so by another exception."""
    reason = failure(scenario, policy, seed)
    assert not reason or "without effect" in reason


@settings(max_examples=examples(40), deadline=None)
@given(scenarios(st.one_of(nodes_gone, gone_for_good), THREE_NODES), st.sampled_from(POLICIES), st.integers(0, 2**31))
def test_without_nodes_an_iteration_ends_or_its_job_says_why_it_does_not(
    scenario: Scenario, policy: Policy, seed: int
) -> None:
    """An actor that had GPUs there goes back to its checkpoint; of two nodes that are lost, or GPUs besides, one may
    have had what nobody can spare."""
    reason = failure(scenario, policy, seed)
    assert (
        not reason or "without effect" in reason or "did not renew its lease" in reason or "for an instance" in reason
    )


def failure(scenario: Scenario, policy: Policy, seed: int) -> str:
    """In the scheduler's words; empty where the iteration ended, whole."""
    try:
        run = simulate(scenario, policy, seed=seed)
    except JobFailed as failed:
        return str(failed)
    check_whole(run, scenario)
    return ""
