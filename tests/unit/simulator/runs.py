"""Runs that tests write by hand: four GPUs, ten seconds, two policies."""

from __future__ import annotations

from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import Placed
from simulator.bound import Bound
from simulator.gpus import Doing
from simulator.happenings import Happening, What
from simulator.run import GpuSpan, PolicyDecision, Run
from simulator.scenario import Scenario, parse_scenario
from tidegate.types import GpuId, Layout

GPUS = tuple(GpuId(f"n{index // 2}/{index % 2}") for index in range(4))
SCENARIO = {
    "name": "small",
    "physics": {"law": "published_fit"},
    "cluster": {"nodes": {"n0": 2, "n1": 2}, "placement": {"actor": "0", "rollout": "1-2", "inference": "3"}},
}


def scenario() -> Scenario:
    return parse_scenario(SCENARIO)


def spans(*states: tuple[Doing, float]) -> tuple[GpuSpan, ...]:
    """The spans of states, each with the second at which it ends."""
    starts = [0.0, *(end_s for _, end_s in states[:-1])]
    return tuple(GpuSpan(start_s, end_s, doing) for start_s, (doing, end_s) in zip(starts, states, strict=True))


def run(policy: str, *, reason: str = "the tail is thin", end_s: float = 10.0) -> Run:
    """Two GPUs generate and then train, one waits, and one infers and is then free. No float is exactly a third."""
    works = spans((Doing.GENERATING, end_s / 3), (Doing.SWITCHING, end_s / 2), (Doing.TRAINING, end_s))
    timeline = {
        GPUS[0]: works,
        GPUS[1]: works,
        GPUS[2]: spans((Doing.WAITING, end_s)),
        GPUS[3]: spans((Doing.INFERRING, 1.0), (Doing.FREE, end_s)),
    }
    assignment = Assignment(engines=(), trainer=Placed(GPUS[:2], Layout(dp=2)), inference=GPUS[3:])
    return Run(
        policy=policy,
        seed=7,
        iteration_s=end_s,
        timeline=timeline,
        decisions=(PolicyDecision(end_s / 3, reason, assignment, predicted_end_s=9.5),),
        history=(Happening(end_s, What.MINIBATCH_FINISHED, 0, 1234),),
        bound=Bound(longest_path_s=4.0, order_s=5.0, gpu_seconds_s=3.0),
        num_moves=1,
        num_samples=32,
        num_lost=0,
    )
