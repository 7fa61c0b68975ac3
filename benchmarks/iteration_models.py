"""Published throughputs of three models on 64 and 128 GPUs, and the scenarios that are compared with them.

`PUBLISHED` and `MODELS` have the published numbers: DynaRL's throughputs in K tokens/s, read from its figures to about
2 %, and the seconds of its trainer's and rollout's moves. The rest is assumed. These assumptions were fixed before any
policy ran on them:
- Every model has the prompts, lengths, engines of two GPUs and minibatches of the 7B job, on 128 GPUs too.
- All steps, passes and updates of a model take the times of the 7B model, divided by one factor: the model's published
  throughput on 64 GPUs over that of the 7B model, with verl or, where verl ran out of memory, with RLinf.
- The release and the acquisition share the time of a rollout's move as in the 7B job.
- A published move of the trainer doubles its copies, to a new layout. The part that the bytes of the plan do not
  explain is setup and communicators, in the proportion of the 7B job.
- The trainer has TP 4 as in the 7B job. The 1.5B model has two key/value heads and therefore TP 2.
The results on 128 GPUs are predictions. `VARIED` has the ranges of the assumptions, which are varied one at a time.
`WRONG` has the wrong rates and lengths that the policies see, one at a time, while the iteration stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.wrong_rates import MisinformedPolicy, Wrong
from services.scheduler.policy import Policy
from simulator.cost_model import Costs
from simulator.model import ModelSection
from simulator.policies import Contender, contenders_of, policies_of
from simulator.reshard_costs import change_of, moved_bytes
from simulator.scenario import Scenario, load_scenario
from tidegate.config.sections.scheduler import POLICIES
from tidegate.types import Layout, NodeId, gpu_id

SCENARIO = Path(__file__).parents[1] / "examples" / "scenarios" / "published_64gpu.yaml"
REFERENCE_GPUS = 64


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
"""`static` of the published scenario is collocated phases."""
OWN = ("tide", "planned_once")
"""`planned_once` is `tide` without its later plans, and no rival of it."""


@dataclass(frozen=True, slots=True)
class Published:
    """K tokens/s of each system. None: it ran out of memory."""

    verl: float | None
    rlinf: float
    rlhfuse: float
    dynarl: float


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and by number of GPUs the seconds of one move of the trainer and of the rollout's median move.

    `section` is its shape, from config.json of Qwen2.5 in that size.
    """

    name: str
    section: ModelSection
    tp: int
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
QWEN25_1_5B = ModelSection(
    hidden_size=1536,
    ffn_hidden_size=8960,
    num_heads=12,
    num_kv_heads=2,
    vocab_size=151_936,
    padded_vocab_size=151_936,
    tied_embeddings=True,
)
QWEN25_32B = ModelSection(num_layers=64, hidden_size=5120, ffn_hidden_size=27_648, num_heads=40, num_kv_heads=8)
MODELS = (
    Model("1.5B", QWEN25_1_5B, 2, {64: 0.46, 128: 0.51}, {64: 3.7, 128: 4.3}),
    Model("7B", ModelSection(), 4, {64: 1.25, 128: 1.46}, {64: 3.6, 128: 4.6}),
    Model("32B", QWEN25_32B, 4, {64: 2.78, 128: 2.80}, {64: 4.0, 128: 5.0}),
)
VARIED: Sequence[tuple[str, tuple[float, float]]] = (
    ("costs.trainer.exponent", (0.3, 0.5)),
    ("lengths.sigma_prompt", (0.4, 0.6)),
    ("lengths.sigma_group", (0.15, 0.35)),
    ("lengths.hint_sigma", (0.1, 0.6)),
    ("costs.engine.kv_capacity_tokens", (1_200_000, 2_800_000)),
)
WRONG = (
    ("the trainer's rates told 20 % high", Wrong(trainer=1.2)),
    ("the trainer's rates told 20 % low", Wrong(trainer=0.8)),
    ("decoding told 20 % fast", Wrong(decode=1.2)),
    ("decoding told 20 % slow", Wrong(decode=0.8)),
    ("the median length told 20 % high", Wrong(median=1.2)),
    ("the median length told 20 % low", Wrong(median=0.8)),
    ("the lengths' spreads told 30 % high", Wrong(sigma=1.3)),
    ("the lengths' spreads told 30 % low", Wrong(sigma=0.7)),
)


@dataclass(frozen=True, slots=True)
class Variation:
    """One changed assumption, or one wrong value that the policies see."""

    name: str
    overrides: tuple[str, ...] = ()
    wrong: Wrong | None = None


def policies(scenario: Scenario) -> dict[str, Policy]:
    """The scheduler's policies by name, with the scenario's rules, and dynarl with its request priority."""
    return policies_of((*POLICIES, "dynarl_priority"), scenario)


def contenders(scenario: Scenario, wrong: Wrong | None = None) -> dict[str, Contender]:
    """All that is compared, by name.

    `wrong`: the wrong values that all of them see. `best_split` is searched with the true ones: a user tunes a split on
    iterations, and not on what a config says.
    """
    found = contenders_of(COMPARED, scenario)
    if wrong is None:
        return found
    return {name: replace(each, policy=MisinformedPolicy(each.policy, wrong)) for name, each in found.items()}


def rivals(seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of what `tide` is compared with."""
    return {name: each for name, each in seconds.items() if name in COMPARED and name not in OWN}


def scenario_of(model: Model, num_gpus: int, overrides: Sequence[str] = ()) -> Scenario:
    words = [
        *cluster_of(num_gpus, model.tp),
        *_shape(model),
        *_speeds(speed_of(model)),
        *_moves(model, num_gpus),
        *overrides,
    ]
    return load_scenario(SCENARIO, [f"name={model.name}-{num_gpus}", *words])


def cluster_of(num_gpus: int, tp: int = 4) -> Iterator[str]:
    """The placement of the 7B job, 16 : 40 : 8, on nodes of eight GPUs."""
    nodes = ", ".join(f"n{node}: 8" for node in range(num_gpus // 8))
    actor, inference = num_gpus // 4, num_gpus * 7 // 8
    yield f"cluster.nodes={{{nodes}}}"
    placement = f"actor: 0-{actor - 1}, rollout: {actor}-{inference - 1}, inference: {inference}-{num_gpus - 1}"
    yield f"cluster.placement={{{placement}}}"
    yield f"actor_layout.tp={tp}"
    yield f"actor_layout.dp={actor // tp}"


def speed_of(model: Model) -> float:
    """The speed of a model relative to the 7B model."""
    own, reference = PUBLISHED[model.name, REFERENCE_GPUS], PUBLISHED["7B", REFERENCE_GPUS]
    if own.verl is None or reference.verl is None:
        return own.rlinf / reference.rlinf
    return own.verl / reference.verl


def variations() -> Iterator[Variation]:
    """All variations, one assumption at a time. The first one changes nothing."""
    yield Variation("as it is")
    for key, values in VARIED:
        yield from (Variation(f"{key}={value}", overrides=(f"{key}={value}",)) for value in values)
    yield from (Variation(name, wrong=wrong) for name, wrong in WRONG)


def _speeds(speed: float) -> Iterator[str]:
    costs = load_scenario(SCENARIO).costs
    engine, trainer = costs.engine, costs.trainer
    for key in ("step_floor_s", "step_base_s", "step_per_sequence_s", "step_per_kv_token_s"):
        yield f"costs.engine.{key}={getattr(engine, key) / speed!r}"
    yield f"costs.engine.prefill_tokens_per_s={engine.prefill_tokens_per_s * speed!r}"
    yield f"costs.trainer.fixed_s={trainer.fixed_s / speed!r}"
    yield f"costs.trainer.rate_tokens_per_s={trainer.rate_tokens_per_s * speed!r}"
    yield f"costs.inference.rate_tokens_per_s={costs.inference.rate_tokens_per_s * speed!r}"


def doubled_bytes(model: Model, num_gpus: int) -> int:
    """The bytes that the busiest rank moves when the trainer doubles its copies."""
    copies = num_gpus // 4 // model.tp
    gpus = tuple(gpu_id(NodeId(f"n{index // 8}"), index % 8) for index in range(num_gpus // 2))
    before, after = (Layout(tp=model.tp, dp=times * copies) for times in (1, 2))
    return moved_bytes(model.section, change_of(gpus[: before.num_ranks], before, gpus, after))


def _shape(model: Model) -> Iterator[str]:
    for key, value in model.section.model_dump(mode="json").items():
        yield f"model.{key}={value}"


def _moves(model: Model, num_gpus: int) -> Iterator[str]:
    switch, move_s = Costs().switch, model.rollout_move_s[num_gpus]
    release_share = switch.release_s / (switch.release_s + switch.acquire_s)
    besides_s = model.trainer_move_s[num_gpus] - doubled_bytes(model, num_gpus) / switch.reshard_bytes_per_s
    setup_share = switch.reshard_setup_s / (switch.reshard_setup_s + switch.communicators_s)
    yield f"costs.switch.reshard_setup_s={besides_s * setup_share!r}"
    yield f"costs.switch.communicators_s={besides_s * (1 - setup_share)!r}"
    yield f"costs.switch.release_s={move_s * release_share!r}"
    yield f"costs.switch.acquire_s={move_s * (1 - release_share)!r}"
