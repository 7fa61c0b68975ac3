"""A recorded run -> a scenario of its job with fitted costs, each with the data that it is fitted to.

Order:
1. The job's own figures and its model.
2. The decode step. A simulation with steps of one second counts the steps of an engine in each iteration.
3. The rate of inference.
4. The line of the trainer: fixed seconds plus seconds per token.
5. The sync: the time of an iteration that the other values do not explain, with messages and checkpoints.

A job on modelled slots (`cluster.pace`) has the law of its pace in place of 2 to 4, the actor's micro-batches, and its
assumed switches.

A line is fitted by the method of Theil and Sen: the median of the slopes between points. Medians tolerate the rare
stall of a busy machine. A run without moves has no reshard, so no fitted value contains reshard time. The bytes of
reshards follow from the model, and the seconds beside them keep their defaults.

Invariants:
- A value that one run in one placement cannot show keeps its default and source.
  [test_calibration: other_values_keep_their_defaults]
- A scenario accepts every fitted value. [test_calibration: the_fitted_scenario_takes]
- The same run gives the same scenario. [test_calibration: the_same_run_gives_the_same_scenario]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from simulator.happenings import What
from simulator.job_scenario import COST_KEYS, micro_batches_of
from simulator.lengths import Lengths
from simulator.model import ModelSection
from simulator.paced import paced_costs
from simulator.physics.sections import PhysicsLaw
from simulator.scenario import Scenario
from simulator.world import World
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.pace import PaceSection
from tidegate.recorded import RecordedIteration, RecordedRun
from tidegate.types import Role

_DIGITS = 4
"""The significant digits of a fitted value. Runs differ by far more."""
_NO_TIME = 1e9
"""The rate, in tokens or steps a second, where the run shows no time for them."""


_HEAD = (
    "# Fitted to a run of this job. M: measured. Other values keep the simulator's defaults: one placement shows",
    "# nothing of moves (costs.switch) and of other numbers of GPUs (costs.trainer.exponent). The bytes of a reshard",
    "# are planned for the model. Without a model each reshard takes costs.switch.reshard_s.",
)


@dataclass(frozen=True, slots=True)
class FittedValue:
    """`value` of the field `key`, such as `costs.sync.fixed_s`."""

    key: str
    value: Any
    source: str


def fitted_values(
    run: RecordedRun, model: ModelSection | None = None, *, token_cost: int = 0
) -> tuple[FittedValue, ...]:
    """The values in the order of a scenario's fields. `model`: the job's model; None: it is unknown. `token_cost`: as
    in `job_scenario.PredictionBasis`."""
    settled = [*_of_job(run, token_cost), *_of_model(model), *_law(run), *_room(run)]
    if run.config.cluster.pace is not None:
        fitted = [*_of_pace(run.config, run.config.cluster.pace)]
    else:
        fitted = [*_engine(run, scenario_of(settled)), *_inference(run), *_trainer(run)]
    sync = _sync(run, scenario_of([*settled, *fitted]))
    return (*settled, *fitted, sync)


def scenario_text(fitted: Sequence[FittedValue], notes: Sequence[str] = ()) -> str:
    """A scenario file that has every value with its source in a comment. `notes` are comments at the top."""
    lines = [*_HEAD, *(f"# {note}" for note in notes)]
    open_path: tuple[str, ...] = ()
    for each in fitted:
        *sections, key = each.key.split(".")
        shared = 0
        while shared < min(len(sections), len(open_path)) and sections[shared] == open_path[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        open_path = tuple(sections)
        if each.source:
            lines.append(f"{'  ' * len(sections)}# {each.source}")
        lines.append(f"{'  ' * len(sections)}{key}: {_plain(each.value)}")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_plain(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) and not value.isidentifier() else str(value)


def scenario_of(fitted: Sequence[FittedValue]) -> Scenario:
    """The scenario with these values."""
    raw: dict[str, Any] = {}
    for each in fitted:
        *sections, key = each.key.split(".")
        into = raw
        for section in sections:
            into = into.setdefault(section, {})
        into[key] = each.value
    return Scenario.model_validate(raw)


def _of_job(run: RecordedRun, token_cost: int) -> Iterator[FittedValue]:
    config, own = run.config, run.config.algorithm
    layout = config.actor.layout
    placement = config.cluster.component_placement
    yield FittedValue("name", config.job, "")
    yield FittedValue("seed", config.seed, "")
    yield FittedValue("cluster.nodes", dict(config.cluster.nodes), "")
    for role in Role:
        yield FittedValue(f"cluster.placement.{role.value}", getattr(placement, role.value), "")
    for axis in ("tp", "pp", "dp", *(axis for axis in ("cp", "ep", "vpp") if getattr(layout, axis) > 1)):
        yield FittedValue(f"actor_layout.{axis}", getattr(layout, axis), "")
    if config.actor.layouts:
        yield FittedValue(
            "actor_layouts", [each.model_dump(exclude_defaults=True) for each in config.actor.layouts], ""
        )
    if config.actor.num_logical_shards is not None:
        yield FittedValue("actor_num_logical_shards", config.actor.num_logical_shards, "")
    for key in ("prompts_per_iteration", "group_size", "n_minibatches"):
        yield FittedValue(f"algorithm.{key}", getattr(own, key), "")
    yield FittedValue("algorithm.minibatch_order", own.minibatch_order.value, "")
    yield FittedValue("algorithm.streams", config.actor.streams_minibatches, "")
    kept = "mean of the samples that the run kept" if run.prompt_tokens else "unknown: the run kept no samples"
    yield FittedValue("algorithm.prompt_tokens", run.prompt_tokens, kept)
    for key, value in (micro_batches_of(config, token_cost=token_cost) or {}).items():
        yield FittedValue(f"algorithm.micro_batches.{key}", value, "")


def _of_model(model: ModelSection | None) -> Iterator[FittedValue]:
    for key, value in (model.model_dump(mode="json") if model else {}).items():
        yield FittedValue(f"model.{key}", value, "")


def _law(run: RecordedRun) -> Iterator[FittedValue]:
    """The law of lengths over all iterations together, since lengths change while the model learns."""
    # Axes: I iterations, G groups, M members of a group.
    logs_IGM = np.log(np.maximum(1, np.array([iteration.lengths for iteration in run.iterations])))
    source = f"M: {logs_IGM.size} responses of {len(run.iterations)} iterations"
    within = float(logs_IGM.var(axis=2, ddof=1).mean()) if logs_IGM.shape[2] > 1 else 0.0
    between = max(0.0, float(logs_IGM.mean(axis=2).var()) - within / logs_IGM.shape[2])
    yield FittedValue("lengths.median_tokens", _rounded(math.exp(float(logs_IGM.mean()))), source)
    yield FittedValue("lengths.sigma_prompt", _rounded(math.sqrt(between)), source)
    yield FittedValue("lengths.sigma_group", _rounded(math.sqrt(within)), source)
    yield FittedValue("lengths.min_tokens", 1, "")
    yield FittedValue("lengths.max_tokens", run.config.algorithm.max_new_tokens, "")


def _room(run: RecordedRun) -> Iterator[FittedValue]:
    yield FittedValue("physics.law", PhysicsLaw.PUBLISHED_FIT.value, "the times of costs")
    yield FittedValue("costs.engine.gpus_per_engine", 1, "")
    yield FittedValue("costs.engine.max_running", run.config.rollout.max_running_requests, "")
    yield FittedValue("costs.engine.kv_capacity_tokens", run.kv_capacity_tokens, "as the engines reported")


def _of_pace(config: JobConfig, pace: PaceSection) -> Iterator[FittedValue]:
    for key, value in paced_costs(pace, num_policies=1 + (config.algorithm.kl_coefficient > 0)).items():
        yield FittedValue(
            f"costs.{key}", value if isinstance(value, int) else _rounded(value), "the law of cluster.pace"
        )
    for (section, name), own in COST_KEYS.items():
        if section == "switch" and (seconds := getattr(config.assumptions.costs, own)) is not None:
            yield FittedValue(f"costs.switch.{name}", seconds, "the job's assumption: a pace models no switch")


def _engine(run: RecordedRun, scenario: Scenario) -> Iterator[FittedValue]:
    """Fit the time of a decode step to the number of running sequences, with one average point per iteration."""
    num_engines = len(run.config.placement(Role.ROLLOUT))
    points = []
    for iteration in run.iterations:
        num_steps = _num_steps(iteration, scenario)
        points.append((iteration.num_tokens / (num_engines * num_steps), iteration.generating_s / num_steps))
    base_s, per_sequence_s = _line(points)
    source = f"M: {len(points)} iterations, median {1e3 * median(step_s for _, step_s in points):.2f} ms a step"
    yield FittedValue("costs.engine.step_floor_s", 0.0, "step_base_s contains the fixed part of every step")
    yield FittedValue("costs.engine.step_base_s", _rounded(max(base_s, 1 / _NO_TIME)), source)
    yield FittedValue("costs.engine.step_per_sequence_s", _rounded(per_sequence_s), source)
    yield FittedValue("costs.engine.step_per_kv_token_s", 0.0, "the run does not separate it from the sequences")


def _inference(run: RecordedRun) -> Iterator[FittedValue]:
    rates = [all_tokens(iteration, run) / iteration.inferring_s for iteration in run.iterations]
    source = f"M: median of {len(rates)} iterations, for one busy GPU"
    yield FittedValue("costs.inference.rate_tokens_per_s", _rounded(median(rates)), source)


def _trainer(run: RecordedRun) -> Iterator[FittedValue]:
    points = [(float(each.num_tokens), each.seconds) for iteration in run.iterations for each in iteration.minibatches]
    fixed_s, per_token_s = _line(points)
    source = f"M: {len(points)} minibatches, median {median(seconds for _, seconds in points):.3f} s"
    yield FittedValue("costs.trainer.fixed_s", _rounded(fixed_s), source)
    rate = _rounded(1 / max(per_token_s, 1 / _NO_TIME))
    rate_source = source if per_token_s else f"{source}; tokens made no difference"
    yield FittedValue("costs.trainer.rate_tokens_per_s", rate, rate_source)
    yield FittedValue("costs.trainer.rate_gpus", len(run.config.placement(Role.ACTOR)), "the layout of this run")


def _sync(run: RecordedRun, scenario: Scenario) -> FittedValue:
    """The part of an iteration's time that a simulation with its own lengths does not explain, as a median."""
    alone = _with_costs(scenario, "sync", {"fixed_s": 0.0})
    left = [iteration.seconds - _simulated_s(iteration, alone, What.ITERATION_FINISHED) for iteration in run.iterations]
    explained = 1 - median(left) / median(iteration.seconds for iteration in run.iterations)
    source = (
        f"M: median of the rest of {len(left)} iterations; the values above explain {max(0.0, explained):.0%}: "
        "publish, load, checkpoint, and messages between components"
    )
    return FittedValue("costs.sync.fixed_s", _rounded(max(0.0, median(left))), source)


def _num_steps(iteration: RecordedIteration, scenario: Scenario) -> float:
    """The steps of the engine that generates longest: its seconds if a step takes one second and prefill none."""
    unit = {"step_floor_s": 0.0, "step_base_s": 1.0, "step_per_sequence_s": 0.0, "step_per_kv_token_s": 0.0}
    counting = _with_costs(scenario, "engine", {"prefill_tokens_per_s": _NO_TIME, **unit})
    return max(1.0, _simulated_s(iteration, counting, What.ROLLOUT_FINISHED))


def _with_costs(scenario: Scenario, section: str, values: Mapping[str, Any]) -> Scenario:
    costs = getattr(scenario.costs, section).model_copy(update=dict(values))
    return scenario.model_copy(update={"costs": scenario.costs.model_copy(update={section: costs})})


def _simulated_s(iteration: RecordedIteration, scenario: Scenario, until: What) -> float:
    world = world_of(iteration, scenario)
    return next(happening.at_s for happening in world.happenings() if happening.what is until)


def world_of(iteration: RecordedIteration, scenario: Scenario) -> World:
    """The iteration with its own lengths. Every component has the GPUs of the config."""
    turns = tuple(tuple((max(1, length),) for length in group) for group in iteration.lengths)
    workload = scenario.workload_of(Lengths(turns, hints=(0.0,) * len(turns)))
    return World(workload, scenario.costs, scenario.placement())


def all_tokens(iteration: RecordedIteration, run: RecordedRun) -> int:
    """The tokens of prompts and responses: the work of inference and trainer."""
    return iteration.num_tokens + run.prompt_tokens * sum(map(len, iteration.lengths))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The value at 0 and the slope of the line with the median slope through the median point. Neither is below 0."""
    slopes = [(y - other_y) / (x - other_x) for (x, y), (other_x, other_y) in combinations(points, 2) if x != other_x]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    at_0 = median(y - slope * x for x, y in points)
    if at_0 >= 0:
        return at_0, slope
    return 0.0, median(y / x for x, y in points)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
