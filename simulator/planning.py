"""A job's config -> its iteration as the simulator foresees it, under each policy and from several placements.

What a config does not say is assumed, each a named key of it: `assumptions.costs` and `assumptions.lengths`, or those
of a scenario that was calibrated on a run. A config has no tokens of prompts: they are taken for `PROMPT_SHARE` of what
`max_new_tokens` leaves of the model's longest sequence.
Order: the placement of the config first, then other splits of the same GPUs, none twice; only those with which the job
itself could start. Invariant: nothing is started, and nothing but the files that were named is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from simulator.costs import Costs
from simulator.iterating import Simulated
from simulator.lengths import LengthSection
from simulator.policies import NAMES
from simulator.run import Run, simulate
from simulator.scenario import Scenario, parse_scenario
from simulator.world import Unfinished
from tidegate.config import ConfigError, JobConfig, parse_config
from tidegate.config_costs import MEDIAN_SHARE
from tidegate.gpu_lists import gpu_list
from tidegate.types import Role

PROMPT_SHARE = 200 / 1024
"""Of the published job: 200 tokens assumed where 1,024 are allowed."""
AS_CONFIGURED = "as configured"
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
class Calibrated:
    """What a run taught, in place of the config's assumptions."""

    costs: Costs
    lengths: LengthSection


def predictions(config: JobConfig, calibrated: Calibrated | None = None) -> tuple[Prediction, ...]:
    """By placement, then by policy; the first is `static` as configured."""
    return tuple(
        _predicted(start, name, scenario_of(start.config, calibrated)) for start in starts(config) for name in NAMES
    )


def starts(config: JobConfig) -> Iterator[Start]:
    yield Start(AS_CONFIGURED, config)
    seen = {_split(config)}
    for name, share in _ACTOR_SHARES.items():
        other = _resplit(config, share)
        if other is not None and _split(other) not in seen:
            seen.add(_split(other))
            yield Start(name, other)


def scenario_of(config: JobConfig, calibrated: Calibrated | None = None) -> Scenario:
    """Of one iteration of the job."""
    known = calibrated or Calibrated(_costs(config), _lengths(config))
    placement, own = config.cluster.component_placement, config.algorithm
    return parse_scenario(
        {
            "name": config.job,
            "seed": config.seed,
            "cluster": {"nodes": config.cluster.nodes, "placement": placement.model_dump()},
            "actor_layout": config.actor.layout.model_dump(),
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
    told = config.assumptions.costs
    return Costs.model_validate(
        {
            "engine": {
                "gpus_per_engine": 1,
                "max_running": config.rollout.max_running_requests,
                "step_floor_s": told.decode_floor_s,
                "step_base_s": told.decode_base_s,
                "step_per_sequence_s": told.decode_per_sequence_s,
                "step_per_kv_token_s": told.decode_per_kv_token_s,
                "prefill_tokens_per_s": told.prefill_tokens_per_s,
            },
            "trainer": {
                "fixed_s": told.update_s,
                "rate_tokens_per_s": told.trainer_tokens_per_s,
                "rate_gpus": told.trainer_gpus,
                "exponent": told.trainer_exponent,
            },
            "inference": {"rate_tokens_per_s": told.inference_tokens_per_s},
            "switch": {
                "release_s": told.release_s,
                "acquire_s": told.acquire_s,
                "resubmit_s": told.resubmit_s,
                "reshard_s": told.reshard_s,
                "trainer_warm_s": told.load_s,
                "inference_warm_s": told.inference_start_s,
            },
        }
    )


def _lengths(config: JobConfig) -> LengthSection:
    told, longest = config.assumptions.lengths, config.algorithm.max_new_tokens
    return LengthSection(
        median_tokens=told.median_tokens or MEDIAN_SHARE * longest,
        sigma_prompt=told.sigma_prompt,
        sigma_group=told.sigma_group,
        hint_sigma=told.sigma_hint,
        min_tokens=1,
        max_tokens=longest,
    )


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
