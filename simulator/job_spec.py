"""The scenario's job as a `JobSpec` of the scheduler.

It has the rates and lengths that earlier iterations would have measured. The present iteration is measured as the
components of a real job measure it. Rates count response tokens, as policies count work, though the trainer and the
inference compute prompts too:

    rate = tokens a second * response_share

Nothing in it depends on the lengths of the present iteration. The one exception is a trace: its moments stand for those
of earlier iterations.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from services.scheduler.state.costs import Costs as MeasuredCosts
from services.scheduler.state.costs import DecodeStep, LengthLaw, Rates
from services.scheduler.state.layouts import replica_size, with_dp
from services.scheduler.state.learned import MIN_SIGMA
from services.scheduler.state.switch_costs import ReshardCosts
from services.scheduler.state.values import JobSpec, Placed
from simulator.cost_model import CostLaws, EngineCosts, TrainerLaw
from simulator.lengths import LengthLaw as DrawnLaw
from simulator.lengths import Lengths, LengthSection
from simulator.scenario import Scenario, ScenarioError
from simulator.scenario_physics import fewest_copies, other_layouts
from tidegate.types import GpuId, Layout, Role

COMMAND_DEADLINE_MS = 600_000
_MOST_LOG = 50.0
"""The largest logarithm of a mean before the cut. No job has so many tokens, and from 710 on the exponential is
infinite."""


def job_of(scenario: Scenario, lengths: Lengths) -> JobSpec:
    """ScenarioError: a component has no GPUs. A policy needs a placement of each component to return to."""
    own, placement = scenario.algorithm, scenario.placement()
    has = {Role.ACTOR: placement.actor, Role.ROLLOUT: placement.rollout, Role.INFERENCE: placement.inference}
    if homeless := [role.value for role, gpus in has.items() if not gpus]:
        names = " and ".join(f"cluster.placement.{role}" for role in homeless)
        raise ScenarioError(f"{names} has no GPUs: a policy starts from a placement; give each component at least one")
    others, laws = other_layouts(scenario), scenario.laws()
    size, copy = laws.engine.gpus_per_engine, laws.inference.gpus_per_copy
    layouts = {
        Role.ACTOR: placement.layout or Layout(dp=len(placement.actor)),
        Role.ROLLOUT: Layout(tp=size, dp=len(placement.rollout) // size),
        Role.INFERENCE: Layout(tp=copy, dp=len(placement.inference) // copy),
    }
    held = {gpu for gpus in has.values() for gpu in gpus}
    law = population_law(scenario.lengths, lengths)
    share = response_share(scenario, law)
    return JobSpec(
        placement={role: Placed(has[role], layouts[role]) for role in Role},
        num_iterations=1,
        num_prompts=own.prompts_per_iteration,
        group_size=own.group_size,
        num_minibatches=own.n_minibatches,
        seed=scenario.seed,
        uses_reference=False,
        max_actor_restarts=len(placement.cluster),
        command_deadline_ms=COMMAND_DEADLINE_MS,
        standby=tuple(gpu for gpu in placement.cluster if gpu not in held),
        minibatch_order=own.minibatch_order,
        streams=own.streams,
        carries_gradients=scenario.carries_gradients,
        scores_ahead=scenario.scores_ahead,
        num_logical_shards=scenario.actor_num_logical_shards,
        layouts=others,
        fewest_actor_copies=fewest_copies(scenario),
        costs=measured_costs(laws, layouts[Role.ACTOR], _reshard(scenario)),
        rates=Rates(
            _trainer_rates(scenario, laws.trainer, layouts[Role.ACTOR], held, share),
            laws.inference.rate_tokens_per_s * share,
            by_layout=_rates_by_layout(laws.trainer, others, share),
        ),
        lengths=law,
    )


def measured_costs(costs: CostLaws, home: Layout, reshard: ReshardCosts | None = None) -> MeasuredCosts:
    """`home`: the layout in which earlier iterations measured the fixed part of an update."""
    engine, switch = costs.engine, costs.switch
    return MeasuredCosts(
        decode=_decode_step(engine),
        update_s=costs.trainer.update_s(home),
        release_s=switch.release_s,
        acquire_s=switch.acquire_s,
        resubmit_s=switch.resubmit_s,
        prefill_tokens_per_s=engine.prefill_tokens_per_s,
        reshard_s=switch.reshard_s,
        load_s=switch.trainer_warm_s,
        inference_start_s=switch.inference_warm_s,
        reshard=reshard,
    )


def _decode_step(engine: EngineCosts) -> DecodeStep:
    """The line of an engine's steps. The time of experts bends it: their line fits all batches from one sequence on by
    least squares."""
    at_0 = slope = 0.0
    if engine.step_experts_s:
        batches = range(1, engine.max_running + 1)
        slope, at_0 = map(float, np.polyfit(batches, [engine.experts_s(running) for running in batches], 1))
    return DecodeStep(
        # Every step includes the base, so the base is the floor where the scenario names no larger one.
        floor_s=max(engine.step_floor_s, engine.step_base_s + engine.experts_s(1)),
        base_s=engine.step_base_s + at_0,
        per_sequence_s=engine.step_per_sequence_s + slope,
        per_kv_token_s=engine.step_per_kv_token_s,
    )


def _reshard(scenario: Scenario) -> ReshardCosts | None:
    switch, model = scenario.costs.switch, scenario.reshard_model
    if model is None:
        return None
    return ReshardCosts(
        setup_s=switch.reshard_setup_s,
        communicators_s=switch.communicators_s,
        bytes_per_s=switch.reshard_bytes_per_s,
        weight_bytes=model.weight_bytes,
        optimizer_bytes=model.optimizer_bytes,
        gpus_per_host=max(scenario.cluster.nodes.values()),
    )


def response_share(scenario: Scenario, law: LengthLaw) -> float:
    """The share of responses in the tokens that the trainer and the inference compute."""
    own, mean = scenario.lengths, mean_tokens(law)
    others = scenario.algorithm.prompt_tokens + (own.mean_turns - 1) * own.observation_tokens
    return mean / (mean + others)


def mean_tokens(law: LengthLaw) -> float:
    """The mean length of a response: of a lognormal variable that is cut at `max_tokens`."""
    assert law.max_tokens is not None, "a scenario's lengths have a limit"
    sigma = math.hypot(law.sigma_prompt, law.sigma_group)
    normal, at = NormalDist(), (math.log(law.max_tokens) - law.log_mean) / sigma
    # The exponent is below log(max_tokens) wherever the factor is above 0.
    below = math.exp(min(law.log_mean + sigma**2 / 2, _MOST_LOG)) * normal.cdf(at - sigma)
    return min(below, law.max_tokens) + law.max_tokens * (1 - normal.cdf(at))


def _trainer_rates(
    scenario: Scenario, trainer: TrainerLaw, home: Layout, gpus: Collection[GpuId], share: float
) -> tuple[tuple[int, float], ...]:
    """(GPUs, response tokens a second) of the trainer in these layouts, with the configured size of a copy:

    - the smallest with room, the configured one, and the largest on all of the job's GPUs. Between them the law of
      `published_fit` is a power of the GPUs, which a policy's curve is too;
    - each layout with a rate of its own.

    Minibatches divide over the copies.
    """
    own, fewest = scenario.algorithm, fewest_copies(scenario)
    most = min(len(gpus) // replica_size(home), own.prompts_per_iteration // own.n_minibatches * own.group_size)
    named = [copies for copies in range(fewest, most + 1) if trainer.has_own_rate(replace(home, dp=copies))]
    layouts = {layout for copies in (fewest, home.dp, most, *named) if (layout := with_dp(home, copies))}
    return tuple(
        (layout.num_ranks, share / trainer.tokens_s(1.0, layout))
        for layout in sorted(layouts, key=lambda layout: layout.num_ranks)
    )


def _rates_by_layout(
    trainer: TrainerLaw, layouts: Collection[Layout], share: float
) -> tuple[tuple[Layout, float], ...]:
    """The trainer's rates in kinds of copies of which some layout has a rate of its own."""
    known = {replace(layout, dp=1) for layout in layouts if trainer.has_own_rate(layout)}
    return tuple(
        (layout, share / trainer.tokens_s(1.0, layout)) for layout in layouts if replace(layout, dp=1) in known
    )


def population_law(section: LengthSection, lengths: Lengths) -> LengthLaw:
    """The moments of the scenario's law of lengths, or of its trace. Spreads are at least those that a job learns."""
    if section.law is DrawnLaw.TRACE:
        return _law_of_trace(lengths, section)
    mean, variance = math.log(section.median_tokens), section.sigma_prompt**2
    if section.law is DrawnLaw.LONG_TAILED:
        # The logarithm of 1 + a Lomax variable is exponential with mean 1 / tail_index.
        share, scale = section.tail_share, 1 / section.tail_index
        mean += share * scale
        variance += 2 * share * scale**2 - (share * scale) ** 2
    return _law(mean, math.sqrt(variance), section.sigma_group, section)


def _law_of_trace(lengths: Lengths, section: LengthSection) -> LengthLaw:
    logs = np.log([[sum(turns) for turns in row] for row in lengths.turns])
    by_group = logs.mean(axis=1)
    within = float(logs.var(axis=1, ddof=1).mean()) if logs.shape[1] > 1 else 0.0
    between = float(by_group.var()) - within / logs.shape[1]
    return _law(float(logs.mean()), math.sqrt(max(0.0, between)), math.sqrt(within), section)


def _law(log_mean: float, sigma_prompt: float, sigma_group: float, section: LengthSection) -> LengthLaw:
    return LengthLaw(
        log_mean=log_mean,
        sigma_prompt=max(MIN_SIGMA, sigma_prompt),
        sigma_group=max(MIN_SIGMA, sigma_group),
        sigma_hint=max(MIN_SIGMA, section.hint_sigma),
        max_tokens=section.max_tokens,
    )
