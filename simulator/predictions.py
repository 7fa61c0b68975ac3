"""A job's config -> its iteration as the simulator foresees it, under each policy and from several placements.

What a config does not say is assumed, each a named key of it: `assumptions.costs` and `assumptions.lengths`, or those
of a scenario that was calibrated on a run. Reshards are planned for the job's model, as in any simulation, unless the
config gives the seconds of each itself (`reshard_s`, and no `weight_bytes`). A config has no tokens of prompts: they
are taken for `PROMPT_SHARE` of what `max_new_tokens` leaves of the model's longest sequence.
Order: the placement of the config first, then other splits of the same GPUs, none twice; only those with which the job
itself could start. Invariant: nothing is started, and nothing but the files that were named is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from simulator.costs import Costs
from simulator.iteration import Simulated
from simulator.lengths import LengthSection
from simulator.model import ModelSection
from simulator.policies import NAMES
from simulator.run import Run, simulate
from simulator.scenario import Scenario, ScenarioError, parse_scenario
from simulator.world import Unfinished
from tidegate.config.checks.faults import fault_line
from tidegate.config.gpu_lists import gpu_list
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.config.sections.costs import MEDIAN_SHARE
from tidegate.types import Role

PROMPT_SHARE = 200 / 1024
"""Of the published job: 200 tokens assumed where 1,024 are allowed."""
AS_CONFIGURED = "as configured"
COST_KEYS = {
    ("engine", "step_floor_s"): "decode_floor_s",
    ("engine", "step_base_s"): "decode_base_s",
    ("engine", "step_per_sequence_s"): "decode_per_sequence_s",
    ("engine", "step_per_kv_token_s"): "decode_per_kv_token_s",
    ("engine", "prefill_tokens_per_s"): "prefill_tokens_per_s",
    ("trainer", "fixed_s"): "update_s",
    ("trainer", "rate_tokens_per_s"): "trainer_tokens_per_s",
    ("trainer", "rate_gpus"): "trainer_gpus",
    ("trainer", "exponent"): "trainer_exponent",
    ("inference", "rate_tokens_per_s"): "inference_tokens_per_s",
    ("switch", "release_s"): "release_s",
    ("switch", "acquire_s"): "acquire_s",
    ("switch", "resubmit_s"): "resubmit_s",
    ("switch", "reshard_s"): "reshard_s",
    ("switch", "reshard_setup_s"): "reshard_setup_s",
    ("switch", "communicators_s"): "communicators_s",
    ("switch", "reshard_bytes_per_s"): "reshard_bytes_per_s",
    ("switch", "trainer_warm_s"): "load_s",
    ("switch", "inference_warm_s"): "inference_start_s",
}
"""Section and field of the simulator's costs: the key of a config's `assumptions.costs` that gives it."""
LENGTH_KEYS = {
    "median_tokens": "median_tokens",
    "sigma_prompt": "sigma_prompt",
    "sigma_group": "sigma_group",
    "hint_sigma": "sigma_hint",
}
"""Likewise, of `assumptions.lengths`."""
_CONFIGS_KEY = {
    **{f"costs.{section}.{name}": f"assumptions.costs.{own}" for (section, name), own in COST_KEYS.items()},
    **{f"lengths.{name}": f"assumptions.lengths.{own}" for name, own in LENGTH_KEYS.items()},
    "lengths.max_tokens": "algorithm.max_new_tokens",
    "costs.engine.max_running": "rollout.max_running_requests",
    "actor_layout.tp": "actor.layout.tp",
    "actor_num_logical_shards": "actor.num_logical_shards",
}
"""By the key of a scenario that is made of it."""
_SCENARIOS_KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, _CONFIGS_KEY))})(?!\w)")
_ACTOR_SHARES = {"an eighth trains": 1 / 8, "a quarter trains": 1 / 4, "half trains": 1 / 2, "most trains": 3 / 4}
"""Of all GPUs, by the name of the placement; inference gets `_INFERENCE_SHARE`, the rollout what is left."""
_INFERENCE_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Start:
    """A placement, as the config writes GPUs, with the config that has it."""

    name: str
    config: JobConfig

    def gpus(self, role: Role) -> str:
        text: str = getattr(self.config.cluster.component_placement, role.value)
        return text


@dataclass(frozen=True, slots=True)
class Prediction:
    """`run` is None where the policy cannot run the job from there; then `refused` says why."""

    start: Start
    policy: str
    run: Run | None
    refused: str = ""

    @property
    def iteration_s(self) -> float:
        """Infinite for none."""
        return self.run.iteration_s if self.run else float("inf")


@dataclass(frozen=True, slots=True)
class Known:
    """What an iteration is foreseen with. `model`: what reshards move; None: each takes `costs.switch.reshard_s`.
    `model_told`: where the model is from, or why there is none."""

    costs: Costs
    lengths: LengthSection
    model: ModelSection | None
    model_told: str
    is_calibrated: bool


def assumed(config: JobConfig, model: ModelSection | None, *, unknown: str = "") -> Known:
    """By the config's assumptions; `unknown` says why there is no model. ScenarioError for what takes no time that a
    simulation could pass."""
    told = config.assumptions.costs
    if "reshard_s" in told.model_fields_set and not told.weight_bytes:
        model, unknown = None, "assumptions.costs.reshard_s is given"
    model_told = f"the config's, in {model.precision}" if model else f"each reshard takes reshard_s: {unknown}"
    return Known(_costs(config), _lengths(config), model, model_told, is_calibrated=False)


def learned(scenario: Scenario) -> Known:
    """What a run taught, in place of the config's assumptions."""
    model, none = scenario.model, "each reshard takes reshard_s: the calibrated scenario names no model"
    model_told = f"the calibrated scenario, in {model.precision}" if model else none
    return Known(scenario.costs, scenario.lengths, model, model_told, is_calibrated=True)


def predictions(config: JobConfig, known: Known) -> tuple[Prediction, ...]:
    """By placement, then by policy; the first is `static` as configured."""
    return tuple(
        _predicted(start, name, scenario_of(start.config, known)) for start in starts(config) for name in NAMES
    )


def starts(config: JobConfig) -> Iterator[Start]:
    yield Start(AS_CONFIGURED, config)
    seen = {_split(config)}
    for name, share in _ACTOR_SHARES.items():
        other = _resplit(config, share)
        if other is not None and _split(other) not in seen:
            seen.add(_split(other))
            yield Start(name, other)


def in_words_of_config(faults: str) -> str:
    """What is wrong with a scenario that was made of a config, by the config's keys."""
    return _SCENARIOS_KEY.sub(lambda found: _CONFIGS_KEY[found[0]], faults)


def scenario_of(config: JobConfig, known: Known) -> Scenario:
    """Of one iteration of the job. ScenarioError."""
    placement, own = config.cluster.component_placement, config.algorithm
    return parse_scenario(
        {
            "name": config.job,
            "seed": config.seed,
            "cluster": {"nodes": config.cluster.nodes, "placement": placement.model_dump()},
            "actor_layout": config.actor.layout.model_dump(),
            "actor_num_logical_shards": config.actor.num_logical_shards,
            "model": known.model.model_dump() if known.model else None,
            "algorithm": {
                "prompts_per_iteration": own.prompts_per_iteration,
                "group_size": own.group_size,
                "n_minibatches": own.n_minibatches,
                "minibatch_order": own.minibatch_order,
                "prompt_tokens": round(PROMPT_SHARE * (config.model.max_seq_len - own.max_new_tokens)),
            },
            "lengths": known.lengths.model_dump() | {"max_tokens": own.max_new_tokens},
            "scheduler": config.scheduler.model_dump(),
            "costs": known.costs.model_dump(),
        }
    )


def _predicted(start: Start, name: str, scenario: Scenario) -> Prediction:
    policy = _named(name, start.config)
    try:
        policy.check(Simulated(scenario, scenario.seed).spec)
        return Prediction(start, name, simulate(scenario, policy, name=name))
    except (ValueError, Unfinished) as error:
        # Of a placement or a policy that others stand beside: told in its row.
        return Prediction(start, name, None, str(error))


def _named(name: str, config: JobConfig) -> Policy:
    return policy_of(config.scheduler.model_copy(update={"policy": name}))


def _costs(config: JobConfig) -> Costs:
    """As the scheduler's policies assume them; what only a simulation needs has the simulator's default."""
    raw: dict[str, dict[str, Any]] = {
        "engine": {"gpus_per_engine": 1, "max_running": config.rollout.max_running_requests}
    }
    for (section, name), own in COST_KEYS.items():
        raw.setdefault(section, {})[name] = getattr(config.assumptions.costs, own)
    try:
        return Costs.model_validate(raw)
    except ValidationError as error:
        told = [f"costs.{fault_line(Costs, fault)}" for fault in error.errors()]
        raise ScenarioError("\n".join(told)) from error


def _lengths(config: JobConfig) -> LengthSection:
    told, longest = config.assumptions.lengths, config.algorithm.max_new_tokens
    raw: dict[str, Any] = {name: getattr(told, own) for name, own in LENGTH_KEYS.items()}
    median_tokens = told.median_tokens or MEDIAN_SHARE * longest
    return LengthSection.model_validate(raw | {"median_tokens": median_tokens, "min_tokens": 1, "max_tokens": longest})


def _split(config: JobConfig) -> tuple[int, ...]:
    return tuple(len(config.placement(role)) for role in Role)


def _resplit(config: JobConfig, actor_share: float) -> JobConfig | None:
    """With the same GPUs dealt out anew, whole data-parallel copies each; None where no job could start so."""
    gpus = sorted(index for role in Role for index in _indices(config, role))
    actor, inference = config.actor.layout, config.inference.layout
    num_actor = _whole(len(gpus) * actor_share, actor.tp * actor.pp)
    num_inference = _whole(len(gpus) * _INFERENCE_SHARE, inference.tp * inference.pp)
    num_rollout = len(gpus) - num_actor - num_inference
    if num_rollout < 1:
        return None
    parts = gpus[:num_actor], gpus[num_actor : num_actor + num_rollout], gpus[num_actor + num_rollout :]
    values: dict[str, Any] = config.model_dump(mode="json")
    values["cluster"]["component_placement"] = dict(
        zip(("actor", "rollout", "inference"), map(gpu_list, parts), strict=True)
    )
    values["actor"]["layout"]["dp"] = num_actor // (actor.tp * actor.pp)
    values["inference"]["layout"]["dp"] = num_inference // (inference.tp * inference.pp)
    try:
        return parse_config(values)
    except ConfigError:
        # A dp that this job cannot have: another placement is tried.
        return None


def _indices(config: JobConfig, role: Role) -> list[int]:
    of = {gpu: index for index, gpu in enumerate(config.cluster.gpus())}
    return [of[gpu] for gpu in config.placement(role)]


def _whole(wanted: float, size: int) -> int:
    return max(1, round(wanted / size)) * size
