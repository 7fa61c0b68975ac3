"""The sections of a scenario, and `ScenarioSections`: all sections as one value, before the checks between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simulator.assumptions import Source
from simulator.cost_model import Costs
from simulator.happenings import What
from simulator.lengths import LengthSection
from simulator.model import ModelSection
from tidegate.config.base import Count, GpuList, Nodes, NonNegativeFloat, Positive, Section
from tidegate.config.sections.job import AllowedLayoutSection, LayoutSection
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.types import GpuId, MinibatchOrder, NodeId, gpu_id


class PlacementSection(Section):
    """GPUs at the iteration's beginning, counted over the nodes in order. All others are free."""

    actor: GpuList = ""
    rollout: GpuList
    inference: GpuList = ""


class ClusterSection(Section):
    nodes: Nodes
    placement: PlacementSection

    def gpus(self) -> tuple[GpuId, ...]:
        return tuple(gpu_id(NodeId(node), index) for node, count in self.nodes.items() for index in range(count))


class AlgorithmSection(Section):
    """The defaults are those of the published 7B GRPO job."""

    prompts_per_iteration: Positive = 512
    group_size: Positive = 16
    n_minibatches: Positive = 4
    minibatch_order: MinibatchOrder = MinibatchOrder.ARRIVAL
    streams: bool = True
    """Whether a minibatch starts when its first group arrives, instead of its last."""
    prompt_tokens: Annotated[Count, Source("A: prompts of mathematics, at most 1,024")] = 200


class FaultSection(Section):
    """One fault.

    - `gpu` loses one GPU.
    - `node` loses all GPUs and services of a node.
    - `engine` loses an engine's process.
    - `late` delays the report of the first happening of a kind.
    """

    at_s: NonNegativeFloat
    kind: Literal["gpu", "node", "engine", "late"]
    gpu: Count | None = None
    node: str | None = None
    back_after_s: NonNegativeFloat | None = None
    """For `gpu` and `node`: the time until it is available again. None: not in this iteration."""
    engine: Count | None = None
    what: What | None = None
    late_s: NonNegativeFloat = 0.0


class ScenarioSections(Section):
    """All values of one simulated iteration, without the policy."""

    name: str = "scenario"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    cluster: ClusterSection
    actor_layout: LayoutSection | None = None
    """The layout on the actor's first GPUs. None: tp 1, pp 1, and dp is the number of GPUs."""
    actor_layouts: tuple[AllowedLayoutSection, ...] = ()
    """As `actor.layouts` of a job: what a policy may choose besides copies like those of `actor_layout`."""
    actor_num_logical_shards: Positive | None = None
    """For a reproducible actor: `actor.num_logical_shards` of a job. None: every dp is legal."""
    model: ModelSection | None = None
    """The model that the trainer's reshards move. None: each reshard takes `costs.switch.reshard_s`."""
    algorithm: AlgorithmSection = AlgorithmSection()
    lengths: LengthSection = LengthSection()
    costs: Costs = Costs()
    scheduler: SchedulerSection = SchedulerSection()
    """The default policy and the rules of each policy. In a simulation a policy knows the costs and lengths that
    earlier iterations would have measured, so the assumptions of a config have no counterpart here."""
    faults: tuple[FaultSection, ...] = ()

    @property
    def carries_gradients(self) -> bool:
        """As `actor.carries_gradients` of a job."""
        return self.algorithm.streams and self.actor_num_logical_shards is None
