"""Published throughputs of three models on 64 and 128 GPUs, and the scenarios that are set beside them.

Published (DynaRL, K tokens/s read off its figures, about 2 %; its trainer's and rollout's moves in seconds) is what
`PUBLISHED` and `MODELS` hold. Not published, and so assumed, before any policy was run on it:
- every model has the 7B job's prompts, lengths, engines of two GPUs and minibatches, on 128 GPUs too;
- a model's steps, passes and updates all take the 7B's times over one factor: its published throughput on 64 GPUs over
  the 7B's, verl's or, where verl ran out of memory, RLinf's;
- a rollout's move is released and acquired in the 7B's proportion.
128 GPUs are then a prediction. `VARIED` are the ranges in which the assumptions are tried one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from simulator.costs import Costs
from simulator.policies import NAMES, policies_of
from simulator.scenario import Scenario, load_scenario

SCENARIO = Path(__file__).parents[1] / "examples" / "scenarios" / "published_64gpu.yaml"
REFERENCE_GPUS = 64


@dataclass(frozen=True, slots=True)
class Published:
    """K tokens/s; None where it ran out of memory."""

    verl: float | None
    rlinf: float
    rlhfuse: float
    dynarl: float


@dataclass(frozen=True, slots=True)
class Model:
    """Seconds of one move of the trainer, by GPUs, and of the rollout's median move."""

    name: str
    trainer_move_s: Mapping[int, float]
    rollout_move_s: Mapping[int, float]


PUBLISHED = {
    ("1.5B", 64): Published(156, 154, 168, 237),
    ("1.5B", 128): Published(216, 221, 257, 311),
    ("7B", 64): Published(76, 73, 88, 105),
    ("7B", 128): Published(118, 127, 154, 192),
    ("32B", 64): Published(None, 16.6, 18.0, 21.2),
    ("32B", 128): Published(21.0, 29.6, 32.8, 41.5),
}
MODELS = (
    Model("1.5B", {64: 0.46, 128: 0.51}, {64: 3.7, 128: 4.3}),
    Model("7B", {64: 1.25, 128: 1.46}, {64: 3.6, 128: 4.6}),
    Model("32B", {64: 2.78, 128: 2.80}, {64: 4.0, 128: 5.0}),
)
VARIED: Sequence[tuple[str, tuple[float, float]]] = (
    ("costs.trainer.exponent", (0.3, 0.5)),
    ("lengths.sigma_prompt", (0.4, 0.6)),
    ("lengths.sigma_group", (0.15, 0.35)),
    ("lengths.hint_sigma", (0.1, 0.6)),
    ("costs.engine.kv_capacity_tokens", (1_200_000, 2_800_000)),
)


def policies(scenario: Scenario) -> dict[str, Policy]:
    """The scheduler's own by their names, with the scenario's rules, and dynarl with its request priority."""
    section = scenario.scheduler
    priority = section.dynarl.model_copy(update={"request_priority": True})
    of_priority = section.model_copy(update={"policy": "dynarl", "dynarl": priority})
    return policies_of(NAMES, scenario) | {"dynarl_priority": policy_of(of_priority)}


def scenario_of(model: Model, num_gpus: int, overrides: Sequence[str] = ()) -> Scenario:
    given = [*cluster_of(num_gpus), *_speeds(speed_of(model)), *_moves(model, num_gpus), *overrides]
    return load_scenario(SCENARIO, [f"name={model.name}-{num_gpus}", *given])


def cluster_of(num_gpus: int) -> Iterator[str]:
    """The 7B job's placement, 16 : 40 : 8, on as many nodes of eight."""
    nodes = ", ".join(f"n{node}: 8" for node in range(num_gpus // 8))
    actor, inference = num_gpus // 4, num_gpus * 7 // 8
    yield f"cluster.nodes={{{nodes}}}"
    placement = f"actor: 0-{actor - 1}, rollout: {actor}-{inference - 1}, inference: {inference}-{num_gpus - 1}"
    yield f"cluster.placement={{{placement}}}"
    yield f"actor_layout.dp={actor // 4}"


def speed_of(model: Model) -> float:
    """How many times as fast as the 7B."""
    own, reference = PUBLISHED[model.name, REFERENCE_GPUS], PUBLISHED["7B", REFERENCE_GPUS]
    if own.verl is None or reference.verl is None:
        return own.rlinf / reference.rlinf
    return own.verl / reference.verl


def variations() -> Iterator[tuple[str, ...]]:
    """Overrides, one assumption at a time; the first leaves all as it is."""
    yield ()
    for key, values in VARIED:
        yield from ((f"{key}={value}",) for value in values)


def _speeds(speed: float) -> Iterator[str]:
    costs = load_scenario(SCENARIO).costs
    engine, trainer = costs.engine, costs.trainer
    for key in ("step_floor_s", "step_base_s", "step_per_sequence_s", "step_per_kv_token_s"):
        yield f"costs.engine.{key}={getattr(engine, key) / speed!r}"
    yield f"costs.engine.prefill_tokens_per_s={engine.prefill_tokens_per_s * speed!r}"
    yield f"costs.trainer.fixed_s={trainer.fixed_s / speed!r}"
    yield f"costs.trainer.rate_tokens_per_s={trainer.rate_tokens_per_s * speed!r}"
    yield f"costs.inference.rate_tokens_per_s={costs.inference.rate_tokens_per_s * speed!r}"


def _moves(model: Model, num_gpus: int) -> Iterator[str]:
    switch, move_s = Costs().switch, model.rollout_move_s[num_gpus]
    release_share = switch.release_s / (switch.release_s + switch.acquire_s)
    yield f"costs.switch.reshard_s={model.trainer_move_s[num_gpus]}"
    yield f"costs.switch.release_s={move_s * release_share!r}"
    yield f"costs.switch.acquire_s={move_s * (1 - release_share)!r}"
