"""A job's config -> the scenario of one of its iterations.

Times and lengths come from the config's `assumptions.costs` and `assumptions.lengths`, from a scenario that was
calibrated on a run, or from computed physics (`simulator.planning.hardware`). Reshards are planned for the job's model,
unless the config sets `reshard_s` and no `weight_bytes`. Where the length of prompts is not known, the scenario assumes

    prompt_tokens = PROMPT_SHARE * (max_seq_len - max_new_tokens)

A job on modelled slots has the law of its pace, which knows a replica and not its waits for others. So its trainer has
the micro-batches of the actor. Any other rate of a trainer is measured or assumed with those waits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from simulator.cost_model import Costs
from simulator.lengths import LengthSection
from simulator.model import ModelSection
from simulator.physics.sections import PhysicsLaw, PhysicsSection
from simulator.scenario import Scenario, ScenarioError, parse_scenario
from tidegate.config.checks.faults import fault_line
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.costs import MEDIAN_SHARE
from tidegate.pace.costs import SYNC_S

PROMPT_SHARE = 200 / 1024
"""The share in the published job: 200 assumed tokens of 1,024 legal ones."""
PACED_PREFILL_SHARE = 1.0
"""`costs.engine.fresh_prefill_share` of a job on modelled slots: the embedded engine shares no prompt's prefix."""
PACED_KEYS = frozenset({"costs.engine.fresh_prefill_share", "costs.sync.fixed_s"})
"""The costs that no key of a config sets, and that modelled slots have otherwise than the simulator's default."""
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
"""The key of a config's `assumptions.costs` for each section and field of the simulator's costs."""
LENGTH_KEYS = {
    "median_tokens": "median_tokens",
    "sigma_prompt": "sigma_prompt",
    "sigma_group": "sigma_group",
    "hint_sigma": "sigma_hint",
}
"""The key of a config's `assumptions.lengths` for each field of the simulator's lengths."""
_CONFIGS_KEY = {
    **{f"costs.{section}.{name}": f"assumptions.costs.{own}" for (section, name), own in COST_KEYS.items()},
    **{f"lengths.{name}": f"assumptions.lengths.{own}" for name, own in LENGTH_KEYS.items()},
    "lengths.max_tokens": "algorithm.max_new_tokens",
    "costs.engine.max_running": "rollout.max_running_requests",
    "actor_layout.tp": "actor.layout.tp",
    "actor_layouts": "actor.layouts",
    "actor_num_logical_shards": "actor.num_logical_shards",
    "physics.trainer.micro_batch_tokens": "actor.max_tokens_per_microbatch",
}
"""The config's key for each key of a scenario that is made from it."""
_SCENARIOS_KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, _CONFIGS_KEY))})(?!\w)")


@dataclass(frozen=True, slots=True)
class PredictionBasis:
    """The basis of a forecast: costs, lengths, model and the law of all times.

    `model` is the model that reshards move. None: each reshard takes `costs.switch.reshard_s`.
    `model_source` is the source of the model, or the reason why there is none.
    `prompt_tokens` is the mean of the job's prompts. None: it is not known.
    `token_cost` is that of the model in a micro-batch (`tidegate.megatron.packing`). 0: it is not known.
    `physics` computes the times that `costs` does not set, if its law is `roofline`.
    """

    costs: Costs
    lengths: LengthSection
    model: ModelSection | None
    model_source: str
    is_calibrated: bool
    prompt_tokens: int | None = None
    token_cost: int = 0
    physics: PhysicsSection = field(default_factory=lambda: PhysicsSection(law=PhysicsLaw.PUBLISHED_FIT))

    @property
    def is_computed(self) -> bool:
        return self.physics.law is PhysicsLaw.ROOFLINE


def basis_of_config(
    config: JobConfig,
    model: ModelSection | None,
    *,
    unknown: str = "",
    prompt_tokens: int | None = None,
    token_cost: int = 0,
) -> PredictionBasis:
    """The basis from the config's assumptions. `unknown` is the reason why there is no model. `prompt_tokens`,
    `token_cost`: as in PredictionBasis.

    ScenarioError: a time or rate is out of the simulator's range.
    """
    costs = config.assumptions.costs
    if "reshard_s" in costs.model_fields_set and not costs.weight_bytes:
        model, unknown = None, "assumptions.costs.reshard_s is set"
    model_source = f"the config's, in {model.precision}" if model else f"each reshard takes reshard_s: {unknown}"
    return PredictionBasis(
        _costs(config),
        assumed_lengths(config),
        model,
        model_source,
        is_calibrated=False,
        prompt_tokens=prompt_tokens,
        token_cost=token_cost,
    )


def basis_of_calibration(scenario: Scenario) -> PredictionBasis:
    """The basis from a calibrated scenario. It replaces the config's assumptions.

    ScenarioError: the scenario's times are computed.
    """
    if scenario.is_computed:
        raise ScenarioError(
            f"scenario {scenario.name} has physics.law={scenario.physics.law}, and a calibrated scenario has the costs "
            "of a run: name one that `tidegate calibrate` wrote"
        )
    model, none = scenario.model, "each reshard takes reshard_s: the calibrated scenario names no model"
    model_source = f"the calibrated scenario, in {model.precision}" if model else none
    own = scenario.algorithm
    return PredictionBasis(
        scenario.costs,
        scenario.lengths,
        model,
        model_source,
        is_calibrated=True,
        # A calibration that found no sample has 0.
        prompt_tokens=own.prompt_tokens or None if "prompt_tokens" in own.model_fields_set else None,
        token_cost=own.micro_batches.token_cost if own.micro_batches else 0,
    )


def with_config_keys(faults: str) -> str:
    """Replace the scenario's keys in its faults by the keys of the config that the scenario is made from."""
    return _SCENARIOS_KEY.sub(lambda found: _CONFIGS_KEY[found[0]], faults)


def scenario_of(config: JobConfig, known: PredictionBasis) -> Scenario:
    """The scenario of one iteration of the job. ScenarioError: the simulator refuses it."""
    placement, own = config.cluster.component_placement, config.algorithm
    return parse_scenario(
        {
            "name": config.job,
            "seed": config.seed,
            "cluster": {"nodes": config.cluster.nodes, "placement": placement.model_dump()},
            "actor_layout": config.actor.layout.model_dump(),
            "actor_layouts": [each.model_dump() for each in config.actor.layouts],
            "actor_num_logical_shards": config.actor.num_logical_shards,
            "model": known.model.model_dump() if known.model else None,
            "algorithm": {
                "prompts_per_iteration": own.prompts_per_iteration,
                "group_size": own.group_size,
                "n_minibatches": own.n_minibatches,
                "minibatch_order": own.minibatch_order,
                "streams": config.actor.streams_minibatches,
                "prompt_tokens": assumed_prompt_tokens(config) if known.prompt_tokens is None else known.prompt_tokens,
                "micro_batches": micro_batches_of(config, token_cost=known.token_cost),
            },
            "lengths": known.lengths.model_dump() | {"max_tokens": own.max_new_tokens},
            "scheduler": config.scheduler.model_dump(),
            "physics": known.physics.model_dump(),
            # Only what is set: a cost beside computed physics replaces the computed one, or is refused.
            "costs": known.costs.model_dump(exclude_unset=known.is_computed),
        }
    )


def micro_batches_of(config: JobConfig, *, token_cost: int) -> dict[str, int] | None:
    """The section `algorithm.micro_batches` of the job's scenario. None for a job without pace."""
    if config.cluster.pace is None:
        return None
    if config.actor.max_tokens_per_microbatch is None:
        return {"max_sequences": config.actor.micro_batch_size}
    return {"max_tokens": config.actor.max_tokens_per_microbatch, "token_cost": token_cost}


def assumed_prompt_tokens(config: JobConfig) -> int:
    return round(PROMPT_SHARE * (config.model.max_seq_len - config.algorithm.max_new_tokens))


def _costs(config: JobConfig) -> Costs:
    """The costs that the scheduler's policies assume. Costs that only a simulation needs have its defaults, or those of
    modelled slots."""
    raw: dict[str, dict[str, Any]] = {
        "engine": {"gpus_per_engine": 1, "max_running": config.rollout.max_running_requests}
    }
    if config.cluster.pace is not None:
        raw["engine"]["fresh_prefill_share"] = PACED_PREFILL_SHARE
        raw["sync"] = {"fixed_s": SYNC_S}
    for (section, name), own in COST_KEYS.items():
        raw.setdefault(section, {})[name] = getattr(config.assumptions.costs, own)
    try:
        return Costs.model_validate(raw)
    except ValidationError as error:
        lines = [f"costs.{fault_line(Costs, fault)}" for fault in error.errors()]
        raise ScenarioError("\n".join(lines)) from error


def assumed_lengths(config: JobConfig) -> LengthSection:
    section, longest = config.assumptions.lengths, config.algorithm.max_new_tokens
    raw: dict[str, Any] = {name: getattr(section, own) for name, own in LENGTH_KEYS.items()}
    median_tokens = section.median_tokens or MEDIAN_SHARE * longest
    return LengthSection.model_validate(raw | {"median_tokens": median_tokens, "min_tokens": 1, "max_tokens": longest})
