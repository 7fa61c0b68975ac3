"""The sections of a scenario, and `ScenarioSections`: all of them as one value, before they are checked together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simulator.assumptions import Source
from simulator.costs import Costs
from simulator.happenings import What
from simulator.lengths import LengthSection
from simulator.model import ModelSection
from tidegate.config.base import Count, GpuList, Nodes, NonNegativeFloat, Positive, Section
from tidegate.config.sections.job import LayoutSection
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.types import GpuId, MinibatchOrder, NodeId, gpu_id


class PlacementSection(Section):
    """GPUs at the iteration's beginning, counted over the nodes in order; what nobody has is free."""

    actor: GpuList = ""
    rollout: GpuList
    inference: GpuList = ""


class ClusterSection(Section):
    nodes: Nodes
    placement: PlacementSection

    def gpus(self) -> tuple[GpuId, ...]:
        return tuple(gpu_id(NodeId(node), index) for node, count in self.nodes.items() for index in range(count))


class AlgorithmSection(Section):
    """The defaults are the published 7B GRPO job's."""

    prompts_per_iteration: Positive = 512
    group_size: Positive = 16
    n_minibatches: Positive = 4
    minibatch_order: MinibatchOrder = MinibatchOrder.ARRIVAL
    streams: bool = True
    """Whether a minibatch starts with its first group, not with its last."""
    prompt_tokens: Annotated[Count, Source("A: prompts of mathematics, at most 1,024")] = 200


class FaultSection(Section):
    """`gpu` loses one, `node` all of a node's and its services, `engine` loses an engine's process, `late` holds the
    first such happening back."""

    at_s: NonNegativeFloat
    kind: Literal["gpu", "node", "engine", "late"]
    gpu: Count | None = None
    node: str | None = None
    back_after_s: NonNegativeFloat | None = None
    """Of `gpu` and `node`: until it can be had again; None: not in this iteration."""
    engine: Count | None = None
    what: What | None = None
    late_s: NonNegativeFloat = 0.0


class ScenarioSections(Section):
    """All of one simulated iteration but the policy."""

    name: str = "scenario"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    cluster: ClusterSection
    actor_layout: LayoutSection | None = None
    """Of the GPUs that the actor begins with; None: tp 1, pp 1 and dp as many as they are."""
    actor_num_logical_shards: Positive | None = None
    """Of a reproducible actor, by a job's `actor.num_logical_shards`; None: any dp will do."""
    model: ModelSection | None = None
    """What the trainer's reshards move; None: each takes `costs.switch.reshard_s`."""
    algorithm: AlgorithmSection = AlgorithmSection()
    lengths: LengthSection = LengthSection()
    costs: Costs = Costs()
    scheduler: SchedulerSection = SchedulerSection()
    """The policy where none is named, and the rules of each; costs and lengths that it assumes are not read: what a
    policy knows of them here is what earlier iterations would have measured."""
    faults: tuple[FaultSection, ...] = ()
