"""A recorded run -> a scenario of its job whose costs are fitted to it, each with what it was fitted to.

Order: the job's own figures, its model among them; the decode step (an engine's steps of each iteration are counted by
simulating it with steps of one second), the inference's rate, the trainer's line, then the sync: all that an iteration
took beyond what the others explain, messages and checkpoints among it. Lines are Theil and Sen's (medians of slopes),
medians bear the odd stall of a busy machine.
A run in which nothing moved has no reshard in it, so no time of a reshard is in the sync or another fitted value: its
bytes follow from the model, and the seconds beside them keep their defaults.
Invariants: what one run in one placement cannot tell keeps its default and source; every fitted value is one that the
scenario takes; the same run gives the same scenario.
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
from simulator.lengths import Lengths
from simulator.model import ModelSection
from simulator.scenario import Scenario
from simulator.workload import Workload
from simulator.world import World
from tidegate.recorded import RecordedIteration, RecordedRun
from tidegate.types import Role

_DIGITS = 4
"""Of a fitted value: runs differ by far more."""
_NO_TIME = 1e9
"""Tokens a second where tokens cost nothing that could be seen; steps a second likewise."""


_HEAD = (
    "# Fitted to what this job did. M: measured. What is not here keeps the simulator's default: one placement tells",
    "# nothing of moves (costs.switch) and of other numbers of GPUs (costs.trainer.exponent). What a reshard moves is",
    "# planned for the model; with no model named, each takes costs.switch.reshard_s.",
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """`value` of the field `key`, such as `costs.sync.fixed_s`."""

    key: str
    value: Any
    source: str


def calibrated(run: RecordedRun, model: ModelSection | None = None) -> tuple[Fitted, ...]:
    """In the order of a scenario's fields. `model`: the job's, None where it is not known."""
    settled = [*_of_job(run), *_of_model(model), *_law(run), *_room(run)]
    fitted = [*_engine(run, scenario_of(settled)), *_inference(run), *_trainer(run)]
    sync = _sync(run, scenario_of([*settled, *fitted]))
    return (*settled, *fitted, sync)


def scenario_text(fitted: Sequence[Fitted], notes: Sequence[str] = ()) -> str:
    """As a scenario file, every value with its source in a comment; `notes` stand above."""
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
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) and not value.isidentifier() else str(value)


def scenario_of(fitted: Sequence[Fitted]) -> Scenario:
    """Of the values alone."""
    raw: dict[str, Any] = {}
    for each in fitted:
        *sections, key = each.key.split(".")
        into = raw
        for section in sections:
            into = into.setdefault(section, {})
        into[key] = each.value
    return Scenario.model_validate(raw)


def _of_job(run: RecordedRun) -> Iterator[Fitted]:
    config, own = run.config, run.config.algorithm
    layout = config.actor.layout
    placement = config.cluster.component_placement
    yield Fitted("name", config.job, "")
    yield Fitted("seed", config.seed, "")
    yield Fitted("cluster.nodes", dict(config.cluster.nodes), "")
    for role in Role:
        yield Fitted(f"cluster.placement.{role.value}", getattr(placement, role.value), "")
    for axis in ("tp", "pp", "dp"):
        yield Fitted(f"actor_layout.{axis}", getattr(layout, axis), "")
    if config.actor.num_logical_shards is not None:
        yield Fitted("actor_num_logical_shards", config.actor.num_logical_shards, "")
    for key in ("prompts_per_iteration", "group_size", "n_minibatches"):
        yield Fitted(f"algorithm.{key}", getattr(own, key), "")
    yield Fitted("algorithm.minibatch_order", own.minibatch_order.value, "")
    yield Fitted("algorithm.streams", False, "a minibatch starts when all of its groups are there")
    kept = "mean of the samples that the run kept" if run.prompt_tokens else "not known: the run kept no samples"
    yield Fitted("algorithm.prompt_tokens", run.prompt_tokens, kept)


def _of_model(model: ModelSection | None) -> Iterator[Fitted]:
    for key, value in (model.model_dump(mode="json") if model else {}).items():
        yield Fitted(f"model.{key}", value, "")


def _law(run: RecordedRun) -> Iterator[Fitted]:
    """Of all iterations together: lengths change while a policy learns."""
    logs_IGM = np.log(np.maximum(1, np.array([iteration.lengths for iteration in run.iterations])))
    told = f"M: {logs_IGM.size} responses of {len(run.iterations)} iterations"
    within = float(logs_IGM.var(axis=2, ddof=1).mean()) if logs_IGM.shape[2] > 1 else 0.0
    between = max(0.0, float(logs_IGM.mean(axis=2).var()) - within / logs_IGM.shape[2])
    yield Fitted("lengths.median_tokens", _rounded(math.exp(float(logs_IGM.mean()))), told)
    yield Fitted("lengths.sigma_prompt", _rounded(math.sqrt(between)), told)
    yield Fitted("lengths.sigma_group", _rounded(math.sqrt(within)), told)
    yield Fitted("lengths.min_tokens", 1, "")
    yield Fitted("lengths.max_tokens", run.config.algorithm.max_new_tokens, "")


def _room(run: RecordedRun) -> Iterator[Fitted]:
    yield Fitted("costs.engine.gpus_per_engine", 1, "")
    yield Fitted("costs.engine.max_running", run.config.rollout.max_running_requests, "")
    yield Fitted("costs.engine.kv_capacity_tokens", run.kv_capacity_tokens, "as the engines told")


def _engine(run: RecordedRun, scenario: Scenario) -> Iterator[Fitted]:
    """A step by the sequences that run, of each iteration on average."""
    num_engines = len(run.config.placement(Role.ROLLOUT))
    points = []
    for iteration in run.iterations:
        num_steps = _num_steps(iteration, scenario)
        points.append((iteration.num_tokens / (num_engines * num_steps), iteration.generating_s / num_steps))
    base_s, per_sequence_s = _line(points)
    told = f"M: {len(points)} iterations, median {1e3 * median(step_s for _, step_s in points):.2f} ms a step"
    yield Fitted("costs.engine.step_floor_s", 0.0, "what holds every step is in step_base_s")
    yield Fitted("costs.engine.step_base_s", _rounded(max(base_s, 1 / _NO_TIME)), told)
    yield Fitted("costs.engine.step_per_sequence_s", _rounded(per_sequence_s), told)
    yield Fitted("costs.engine.step_per_kv_token_s", 0.0, "not told apart from the sequences")


def _inference(run: RecordedRun) -> Iterator[Fitted]:
    rates = [all_tokens(iteration, run) / iteration.inferring_s for iteration in run.iterations]
    told = f"M: median of {len(rates)} iterations, of a GPU at work"
    yield Fitted("costs.inference.rate_tokens_per_s", _rounded(median(rates)), told)


def _trainer(run: RecordedRun) -> Iterator[Fitted]:
    points = [(float(each.num_tokens), each.seconds) for iteration in run.iterations for each in iteration.minibatches]
    fixed_s, per_token_s = _line(points)
    told = f"M: {len(points)} minibatches, median {median(seconds for _, seconds in points):.3f} s"
    yield Fitted("costs.trainer.fixed_s", _rounded(fixed_s), told)
    rate = _rounded(1 / max(per_token_s, 1 / _NO_TIME))
    seen = told if per_token_s else f"{told}; tokens made no difference"
    yield Fitted("costs.trainer.rate_tokens_per_s", rate, seen)
    yield Fitted("costs.trainer.rate_gpus", len(run.config.placement(Role.ACTOR)), "the layout of this run")


def _sync(run: RecordedRun, scenario: Scenario) -> Fitted:
    """What is left of each iteration once it was simulated with its own lengths."""
    alone = _with_costs(scenario, "sync", {"fixed_s": 0.0})
    left = [iteration.seconds - _simulated_s(iteration, alone, What.ITERATION_FINISHED) for iteration in run.iterations]
    explained = 1 - median(left) / median(iteration.seconds for iteration in run.iterations)
    told = (
        f"M: median of what {len(left)} iterations took beyond the above, which explains {max(0.0, explained):.0%}: "
        "publish, load, checkpoint, and messages between components"
    )
    return Fitted("costs.sync.fixed_s", _rounded(max(0.0, median(left))), told)


def _num_steps(iteration: RecordedIteration, scenario: Scenario) -> float:
    """Of the engine that generates longest: its seconds, where each step takes one and prefill none."""
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
    """The iteration with its own lengths, every component where the config has it."""
    turns = tuple(tuple((max(1, length),) for length in group) for group in iteration.lengths)
    own = scenario.algorithm
    workload = Workload(
        lengths=Lengths(turns, hints=(0.0,) * len(turns)),
        n_minibatches=own.n_minibatches,
        prompt_tokens=own.prompt_tokens,
        minibatch_order=own.minibatch_order,
        streams=own.streams,
    )
    return World(workload, scenario.costs, scenario.placement())


def all_tokens(iteration: RecordedIteration, run: RecordedRun) -> int:
    """Of prompts and responses, which inference computes and the trainer trains on."""
    return iteration.num_tokens + run.prompt_tokens * sum(map(len, iteration.lengths))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Value at 0 and slope, neither below 0: the line of the median slope through the median point."""
    slopes = [(y - other_y) / (x - other_x) for (x, y), (other_x, other_y) in combinations(points, 2) if x != other_x]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    at_0 = median(y - slope * x for x, y in points)
    if at_0 >= 0:
        return at_0, slope
    return 0.0, median(y / x for x, y in points)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
