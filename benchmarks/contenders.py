"""What is compared on a simulated iteration, and the ratios of its seconds.

    X_vs_Y   = seconds of Y / seconds of X
    X_over_Y = seconds of X / seconds of Y

both on the same lengths. `best_split` and the other baselines are those of `simulator/baselines.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.direct import simulate
from services.scheduler.policy import Policy
from simulator.policies import Contender, contenders_of, policies_of
from simulator.scenario import Scenario
from tidegate.config.sections.scheduler import POLICIES

SCENARIO = Path(__file__).parents[1] / "examples" / "scenarios" / "published_64gpu.yaml"
ROOFLINE = SCENARIO.with_name("grpo_7b_64gpu.yaml")

COMPARED = (
    "static",
    "phases_ordered",
    "fused",
    "fused_ordered",
    "split",
    "best_split",
    "rlinf",
    "rlinf_ordered",
    "rlinf_wait",
    "dynarl",
    "dynarl_priority",
    "planned_once",
    "tide",
)
"""`static` of both scenarios is collocated phases."""
OWN = ("tide", "planned_once")
"""`planned_once` is `tide` without its later plans, and no rival of it."""
STRONG = ("phases_ordered", "best_split", "planned_once")
"""Each has a figure of its own beside `tide`. A user would do one of the first two; the last is `tide`'s first plan."""
DYNAMIC = ("rlinf", "rlinf_ordered", "rlinf_wait", "dynarl", "dynarl_priority")
"""Other policies that move GPUs while the iteration runs."""


def policies(scenario: Scenario) -> dict[str, Policy]:
    """The scheduler's policies by name, with the scenario's rules, and dynarl with its request priority."""
    return policies_of((*POLICIES, "dynarl_priority"), scenario)


def contenders(scenario: Scenario) -> dict[str, Contender]:
    """All that is compared, by name. `best_split` is searched here, on seeds of its own."""
    return contenders_of(COMPARED, scenario)


def rivals(seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of what `tide` is compared with."""
    return {name: each for name, each in seconds.items() if name in COMPARED and name not in OWN}


def compared(among: Mapping[str, Contender], seed: int, *, directly: bool = False) -> dict[str, float]:
    """The seconds of the iteration under each policy and baseline, and the bound."""
    seconds: dict[str, float] = {}
    for name, each in among.items():
        run = simulate(each.scenario, each.policy, name=name, seed=seed, directly=directly)
        assert run.num_lost == 0, f"{name} lost {run.num_lost} samples at seed {seed}"
        seconds[name], seconds["bound"] = run.iteration_s, run.bound.bound_s
    return seconds


def ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    """The ratios of the result of `compared`."""
    others, tide_s = rivals(seconds), seconds["tide"]
    return {
        **{f"{name}_vs_static": seconds["static"] / each for name, each in others.items() if name != "static"},
        **{f"tide_vs_{name}": seconds[name] / tide_s for name in ("static", *STRONG)},
        "tide_vs_best_other": min(others.values()) / tide_s,
        "tide_vs_best_dynamic": min(others[name] for name in DYNAMIC) / tide_s,
        "tide_over_bound": seconds["tide"] / seconds["bound"],
        "bound_vs_best_other": min(others.values()) / seconds["bound"],
        "bound_vs_phases_ordered": seconds["phases_ordered"] / seconds["bound"],
    }


def cluster_of(num_gpus: int, tp: int = 4) -> Iterator[str]:
    """The placement of the 7B job, 16 : 40 : 8, on nodes of eight GPUs."""
    nodes = ", ".join(f"n{node}: 8" for node in range(num_gpus // 8))
    actor, inference = num_gpus // 4, num_gpus * 7 // 8
    yield f"cluster.nodes={{{nodes}}}"
    placement = f"actor: 0-{actor - 1}, rollout: {actor}-{inference - 1}, inference: {inference}-{num_gpus - 1}"
    yield f"cluster.placement={{{placement}}}"
    yield f"actor_layout.tp={tp}"
    yield f"actor_layout.dp={actor // tp}"
