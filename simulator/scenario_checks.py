"""Faults between a scenario's sections and faults of its numbers. Each line is one fault with its remedy.

A line names its keys in full, so that their origins can be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import pairwise
from math import inf
from typing import Any

from simulator.curves import BadCurve
from simulator.drift import drift_of
from simulator.lengths import LengthLaw
from simulator.scenario_sections import ScenarioSections
from tidegate.config.base import ITEM, fields_of
from tidegate.config.checks.actor_layouts import allowed_layouts
from tidegate.config.gpu_lists import gpu_indices, list_fault
from tidegate.config.reading.layers import dotted
from tidegate.types import Layout, Role

MAX_RESPONSES = 1_000_000
"""The most responses of an iteration: a hundred times the published number. Drawing a million takes some seconds."""
MAX_TOKENS = 10_000_000
"""The most tokens of a sequence: ten times the longest context of any model."""
MAX_SECONDS = 1_000_000
"""The longest time: eleven days."""
MAX_WHOLE = 10**15
"""The largest count of anything, bytes included: a petabyte."""
MIN_RATE = 1e-3
MAX_SIGMA = 10
"""The largest spread of a logarithm. With it one response in three differs from the median by a factor of 22,000 or
more. The exponential of hundreds is infinite."""
_FIELDS_OF_FAULT = {
    "gpu": {"gpu", "back_after_s"},
    "node": {"node", "back_after_s"},
    "engine": {"engine"},
    "late": {"what", "late_s"},
}
"""The fields of a fault by its kind, besides those of every fault."""


def scenario_faults(scenario: ScenarioSections) -> list[str]:
    return [*_whole_number_faults(scenario)] or [
        *_placement_faults(scenario),
        *_shards_faults(scenario),
        *_model_faults(scenario),
        *_actor_layouts_faults(scenario),
        *_workload_faults(scenario),
        *_range_faults(scenario),
        *_drift_faults(scenario),
        *_fault_faults(scenario),
    ]


def _whole_number_faults(scenario: ScenarioSections) -> Iterator[str]:
    """Faults of integers. They are checked first, since results from an integer that large would be infinite."""
    for path, _ in fields_of(type(scenario)):
        value = None if ITEM in path else _at(scenario, path)
        if isinstance(value, int) and value > MAX_WHOLE:
            yield f"{dotted(path)} is above {MAX_WHOLE:,}, the largest count: lower it"


def gpus_of(scenario: ScenarioSections, role: Role) -> list[int]:
    """The role's GPUs, counted over the nodes. ValueError: the text is no list of GPUs."""
    text = getattr(scenario.cluster.placement, role.value)
    return gpu_indices(text) if text else []


def _placement_faults(scenario: ScenarioSections) -> Iterator[str]:
    num_gpus, holder = len(scenario.cluster.gpus()), dict[int, str]()
    for role in Role:
        key = f"cluster.placement.{role}"
        try:
            indices = gpus_of(scenario, role)
        except ValueError as error:
            yield f"{key}: {error}"
            continue
        if fault := list_fault(key, indices, own=role, num_gpus=num_gpus, holder=holder):
            yield fault
        else:
            yield from _size_faults(scenario, role, len(indices))
        holder = dict.fromkeys(indices, str(role)) | holder


def _size_faults(scenario: ScenarioSections, role: Role, num_gpus: int) -> Iterator[str]:
    size = scenario.costs.engine.gpus_per_engine
    if role is Role.ROLLOUT and num_gpus % size:
        yield (
            f"cluster.placement.rollout has {num_gpus} GPUs, which make no whole engines of "
            f"costs.engine.gpus_per_engine={size}: leave {num_gpus % size} out"
        )
    if (
        role is Role.ACTOR
        and scenario.actor_layout
        and num_gpus != (needed := scenario.actor_layout.layout().num_ranks)
    ):
        own = scenario.actor_layout
        sizes = f"actor_layout.tp={own.tp}, pp={own.pp}, dp={own.dp}, cp={own.cp}"
        yield f"{sizes} needs {needed} GPUs and cluster.placement.actor has {num_gpus}: make them the same"


def _shards_faults(scenario: ScenarioSections) -> Iterator[str]:
    """The same check as for a job's config."""
    num_shards, section = scenario.actor_num_logical_shards, scenario.actor_layout
    try:
        dp = section.dp if section else max(1, len(gpus_of(scenario, Role.ACTOR)))
    except ValueError:
        return
    if num_shards is not None and (num_shards.bit_count() != 1 or num_shards % dp):
        yield (
            f"actor_num_logical_shards={num_shards} must be a power of two that every dp of the actor divides, and its "
            f"dp is {dp}: set it to one such as 8, and dp to a power of two up to it"
        )


def _model_faults(scenario: ScenarioSections) -> Iterator[str]:
    layout, model = scenario.actor_layout.layout() if scenario.actor_layout else Layout(), scenario.reshard_model
    if model and (why := model.refusal(layout)):
        yield f"actor_layout.tp={layout.tp}, pp={layout.pp} cannot hold the model: {why}"


def _actor_layouts_faults(scenario: ScenarioSections) -> Iterator[str]:
    """The checks of a job's config that need no model of its own."""
    num_gpus, num_shards = len(scenario.cluster.gpus()), scenario.actor_num_logical_shards
    home = scenario.actor_layout.layout() if scenario.actor_layout else Layout()
    model = scenario.reshard_model
    for at, section in enumerate(scenario.actor_layouts):
        layout, key = section.layout(), f"actor_layouts.{at}"
        if num_shards is not None and (layout.tp, layout.cp) != (home.tp, home.cp):
            yield (
                f"{key}: tp={layout.tp} cp={layout.cp} is not the tp={home.tp} cp={home.cp} of actor_layout, and with "
                "actor_num_logical_shards only dp, pp and vpp may change: give it that tp and cp"
            )
        elif layout.num_ranks > num_gpus:
            yield f"{key}: layout {layout} has {layout.num_ranks} ranks and the cluster {num_gpus} GPUs: lower an axis"
        elif model and (why := model.refusal(layout)):
            yield f"{key}.tp={layout.tp}, pp={layout.pp} cannot hold the model: {why}"
        elif not allowed_layouts([section], num_gpus=num_gpus, **sharing(scenario)):
            own = scenario.algorithm
            yield (
                f"{key}: no dp of layout {layout} shares a minibatch of {own.prompts_per_iteration} / "
                f"{own.n_minibatches} prompts, divides actor_num_logical_shards and gives ep its ranks: change an axis"
            )


def sharing(scenario: ScenarioSections) -> Mapping[str, Any]:
    """What the copies of the actor share: the samples of a minibatch, and the logical shards."""
    own = scenario.algorithm
    num_samples = own.prompts_per_iteration // own.n_minibatches * own.group_size
    return {"num_samples": num_samples, "num_shards": scenario.actor_num_logical_shards}


def _workload_faults(scenario: ScenarioSections) -> Iterator[str]:
    own, lengths = scenario.algorithm, scenario.lengths
    if own.n_minibatches > own.prompts_per_iteration:
        yield (
            f"algorithm.n_minibatches={own.n_minibatches} is more than the groups of an iteration, "
            f"prompts_per_iteration={own.prompts_per_iteration}: a minibatch needs at least one group"
        )
    if (num_responses := own.prompts_per_iteration * own.group_size) > MAX_RESPONSES:
        yield (
            f"algorithm.prompts_per_iteration={own.prompts_per_iteration} of group_size={own.group_size} are "
            f"{num_responses:,} responses, and at most {MAX_RESPONSES:,} can be simulated: lower one of the two"
        )
    if lengths.min_tokens > lengths.max_tokens:
        yield f"lengths.min_tokens={lengths.min_tokens} is above max_tokens={lengths.max_tokens}: lower the first"
    if (lengths.law is LengthLaw.TRACE) != bool(lengths.file):
        yield f"lengths.law={lengths.law} and lengths.file={lengths.file!r}: a trace needs a file, another law has none"


def _drift_faults(scenario: ScenarioSections) -> Iterator[str]:
    own = scenario.drift
    means = ("mean_tokens", "median_tokens", "curve", "file")
    if len(given := [f"drift.{name}" for name in means if getattr(own, name)]) > 1:
        yield f"{' and '.join(given)} are set, and each of them says how long responses are: leave one"
    if scenario.lengths.law is LengthLaw.TRACE:
        others = [name for name in (*means, "sigma_prompt", "spikes", "epoch_prompts") if getattr(own, name)]
        for name in others:
            yield f"drift.{name} is set and lengths.law=trace: a trace has its own lengths; leave drift.{name} out"
    if own.epoch_prompts is not None and own.epoch_prompts < (prompts := scenario.algorithm.prompts_per_iteration):
        yield (
            f"drift.epoch_prompts={own.epoch_prompts} is below algorithm.prompts_per_iteration={prompts}: an iteration "
            "would have a prompt twice; raise it"
        )
    try:
        drift_of(own)
    except BadCurve as error:
        yield str(error)


def _range_faults(scenario: ScenarioSections) -> Iterator[str]:
    """Faults of numbers that are finite but lead to infinite or endless results."""
    for path, _ in fields_of(type(scenario)):
        value = None if ITEM in path else _at(scenario, path)
        if not isinstance(value, int | float):
            continue
        name, key = path[-1], dotted(path)
        if name.startswith("sigma_") or name.endswith("_sigma"):
            if value > MAX_SIGMA:
                yield f"{key}={value:g} is above {MAX_SIGMA}: it is a spread of the logarithm, 1 is a factor of 2.7"
        elif name.endswith("_per_s"):
            if value < MIN_RATE:
                yield f"{key}={value:g} is below {MIN_RATE:g} a second: nothing would end"
        elif name.endswith("_tokens") and path[0] != "costs":
            if value > MAX_TOKENS:
                yield f"{key}={value:g} is above {MAX_TOKENS:,} tokens: lower it"
        elif name.endswith("_s") and value > MAX_SECONDS:
            yield f"{key}={value:g} is above {MAX_SECONDS:,} seconds: nothing would end"


def _at(value: Any, path: tuple[str, ...]) -> Any:
    """The value at a path. None: a section above it is missing."""
    return reduce(lambda part, name: getattr(part, name, None), path, value)


def _fault_faults(scenario: ScenarioSections) -> Iterator[str]:
    num_gpus = len(scenario.cluster.gpus())
    for at, fault in enumerate(scenario.faults):
        needed = "what" if fault.kind == "late" else fault.kind
        others = sorted(fault.model_fields_set - {"at_s", "kind", "iteration", *_FIELDS_OF_FAULT[fault.kind]})
        if others:
            yield f"faults.{at}.{others[0]} does not belong to kind={fault.kind}: leave it out"
        if getattr(fault, needed) is None:
            yield f"faults.{at}.kind={fault.kind} needs faults.{at}.{needed}: set it"
        for name in ("at_s", "back_after_s", "late_s"):
            if (getattr(fault, name) or 0.0) > MAX_SECONDS:
                yield f"faults.{at}.{name}={getattr(fault, name):g} is above {MAX_SECONDS:,} seconds: lower it"
        if fault.kind == "gpu" and fault.gpu is not None and fault.gpu >= num_gpus:
            yield f"faults.{at}.gpu={fault.gpu} is outside the cluster, which has {num_gpus} GPUs (0-{num_gpus - 1})"
        elif fault.kind == "node":
            yield from _node_faults(scenario, f"faults.{at}.node={fault.node}", fault.node)
    yield from _overlaps(scenario)


def _node_faults(scenario: ScenarioSections, key: str, node: str | None) -> Iterator[str]:
    nodes = sorted(scenario.cluster.nodes)
    if node not in nodes:
        yield f"{key} is no node of the cluster, which has {', '.join(nodes)}"
    elif node == nodes[0]:
        yield f"{key} has the components' leads, and no election is simulated: lose a node after it in the alphabet"


def _overlaps(scenario: ScenarioSections) -> Iterator[str]:
    """Faults of a node that overlap in time: the node's services would come back twice."""
    losses = [(at, fault) for at, fault in enumerate(scenario.faults) if fault.kind == "node"]
    losses.sort(key=lambda each: (each[1].node or "", each[1].iteration or 0, each[1].at_s))
    for (earlier, first), (at, second) in pairwise(losses):
        if (first.node, first.iteration) != (second.node, second.iteration):
            # Nobody knows yet when an iteration begins. A loss that overlaps then is reported as missed.
            continue
        back_s = inf if first.back_after_s is None else first.at_s + first.back_after_s
        if second.at_s <= back_s:
            period = f"from {first.at_s:g} s on for good" if back_s == inf else f"from {first.at_s:g} s to {back_s:g} s"
            yield (
                f"faults.{at}.at_s={second.at_s:g} loses {second.node}, which faults.{earlier} has lost {period}: "
                "make one fault of the two, or lose the node after it is back"
            )
