"""The placements to start a job from: as its config has it, and the best fixed split of the same GPUs.

1. GPUs of the cluster that the config places nowhere are left out.
2. `simulator.best_split` searches among the splits with which the job's config is valid.
3. The found split becomes a config again, with the keys that a person copies.

Invariants:
- Both starts have the same GPUs. [test_starts: both_starts_have_the_same_gpus]
- A job can start with the best split: its config is valid. [test_starts: a_job_can_start_with_the_best_split]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.best_split import BestSplit, Effort, best_split
from simulator.scenario import Scenario
from simulator.scenario_checks import gpus_of
from simulator.scenario_sections import ClusterSection, PlacementSection
from tidegate.config.gpu_lists import gpu_list
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.types import Role

AS_CONFIGURED = "as configured"
BEST_SPLIT = "the best split"
EFFORT = Effort(num_seeds=2, last_step_share=1 / 32)
"""Fewer runs than a full search, so that a plan of 64 GPUs ends within some minutes. Nobody measured the loss."""


@dataclass(frozen=True, slots=True)
class Start:
    """A placement to start from, with the config that has it."""

    name: str
    config: JobConfig

    def gpus(self, role: Role) -> str:
        """The role's GPUs in the notation of the config."""
        text: str = getattr(self.config.cluster.component_placement, role.value)
        return text

    def keys(self) -> dict[str, dict[str, Any]]:
        """The sections of a config with all keys that make this placement."""
        static = self.config.scheduler.static
        return {
            "cluster": {"component_placement": {role.value: self.gpus(role) for role in Role}},
            "actor": {"layout": self.config.actor.layout.model_dump()},
            "inference": {"layout": self.config.inference.layout.model_dump()},
            "scheduler": {"static": {"collocated": static.collocated, "order": static.order.value}},
        }


def placed_only(scenario: Scenario) -> Scenario:
    """The scenario of a cluster with no other GPUs than those of the placement."""
    own = {role: gpus_of(scenario, role) for role in Role}
    placed = sorted(index for indices in own.values() for index in indices)
    renamed = {index: at for at, index in enumerate(placed)}
    gpus = scenario.cluster.gpus()
    node_of = [name for name, count in scenario.cluster.nodes.items() for _ in range(count)]
    if len(placed) == len(gpus):
        return scenario
    texts = {role.value: gpu_list([renamed[index] for index in indices]) for role, indices in own.items()}
    nodes = dict(Counter(node_of[index] for index in placed))
    cluster = ClusterSection(nodes=nodes, placement=PlacementSection(**texts))
    return scenario.model_copy(update={"cluster": cluster})


def best_start(config: JobConfig, scenario: Scenario) -> tuple[BestSplit, Start]:
    """The best split of `scenario`, which is `placed_only` of the job's.

    ScenarioError: a component has no GPUs in the placement.
    """

    def is_legal(split: Scenario) -> bool:
        try:
            _resplit(config, split)
        except ConfigError:
            # No job can have this layout, so the search passes over it.
            return False
        return True

    found = best_split(scenario, effort=EFFORT, is_legal=is_legal)
    static = {"collocated": False, "order": found.order.value}
    return found, Start(BEST_SPLIT, _resplit(config, found.scenario, static))


def _resplit(config: JobConfig, split: Scenario, static: Mapping[str, Any] | None = None) -> JobConfig:
    """The config with the split's sizes on its own GPUs, and with these rules of `static`. ConfigError: it is not
    valid."""
    index_of = {gpu: index for index, gpu in enumerate(config.cluster.gpus())}
    placed = sorted(index_of[gpu] for role in Role for gpu in config.placement(role))
    texts = {role.value: gpu_list([placed[at] for at in gpus_of(split, role)]) for role in Role}
    assert split.actor_layout is not None, "the search sets it"
    inference = config.inference.layout.layout()
    num_inference, size = len(gpus_of(split, Role.INFERENCE)), inference.num_ranks // inference.dp
    if num_inference % size:
        raise ConfigError(f"{num_inference} GPUs make no whole copies of {size} for the inference")
    values: dict[str, Any] = config.model_dump(mode="json")
    values["cluster"]["component_placement"] = texts
    values["actor"]["layout"] = split.actor_layout.model_dump()
    values["inference"]["layout"]["dp"] = num_inference // size
    values["scheduler"]["static"] |= static or {}
    return parse_config(values)
