"""The sections of a scenario, and `ScenarioSections`: all sections as one value, before the checks between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from simulator.assumptions import Source
from simulator.cost_model import Costs
from simulator.drift import DriftSection
from simulator.happenings import What
from simulator.lengths import LengthSection
from simulator.model import ModelSection
from simulator.noise import NoiseSection
from simulator.physics.sections import PhysicsLaw, PhysicsSection
from tidegate.config.base import Count, GpuList, Nodes, NonNegativeFloat, Positive, Section
from tidegate.config.sections.job import AllowedLayoutSection, LayoutSection
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.megatron.batching import BatchLimits, Limits
from tidegate.megatron.packing import PAD_MULTIPLE, PASS_POSITIONS, TokenCap
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


class MicroBatchSection(Section):
    """The limits of the trainer's micro-batches, one of the first two. As in a job's section `actor`."""

    max_tokens: Annotated[int, Field(ge=PAD_MULTIPLE)] | None = None
    """As `actor.max_tokens_per_microbatch`."""
    max_sequences: Positive | None = None
    """As `actor.micro_batch_size`."""
    token_cost: Count = 0
    """With `max_tokens`: what a row costs, by the model (`tidegate.megatron.packing`). 0: the model is not known, and
    there are no more micro-batches than the cap needs."""

    @model_validator(mode="after")
    def _has_one_limit(self) -> MicroBatchSection:
        if (self.max_tokens is None) == (self.max_sequences is None):
            raise ValueError("micro_batches needs one of max_tokens and max_sequences: set one of them")
        return self

    def limits(self) -> Limits:
        if self.max_tokens is None:
            return BatchLimits(max_sequences=self.max_sequences)
        pass_cost = PASS_POSITIONS * self.token_cost if self.token_cost else None
        return TokenCap(self.max_tokens, self.token_cost, pass_cost)


class AlgorithmSection(Section):
    """The defaults are those of the published 7B GRPO job."""

    prompts_per_iteration: Positive = 512
    group_size: Positive = 16
    n_minibatches: Positive = 4
    minibatch_order: MinibatchOrder = MinibatchOrder.ARRIVAL
    streams: bool = True
    """Whether a minibatch starts when its first group arrives, instead of its last."""
    prompt_tokens: Annotated[Count, Source("A: prompts of mathematics, at most 1,024")] = 200
    micro_batches: MicroBatchSection | None = None
    """None: a trainer that streams trains each group at once, and shares its tokens evenly. Else a portion waits until
    each replica gets a full micro-batch, and the replica with the most tokens sets its time."""


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
    """For `gpu` and `node`: the time until it is available again. None: never."""
    iteration: Count | None = None
    """The iteration from whose beginning `at_s` counts. None: from the job's beginning."""
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
    """The model that the trainer's reshards move. None: each reshard takes `costs.switch.reshard_s`. Under
    `physics.law: roofline` it is the model of the physics."""
    algorithm: AlgorithmSection = AlgorithmSection()
    lengths: LengthSection = LengthSection()
    physics: PhysicsSection = PhysicsSection()
    """The law of all times. With `roofline` it computes those of `costs` that depend on the model and the GPU."""
    noise: NoiseSection = NoiseSection()
    drift: DriftSection = DriftSection()
    """How the lengths change over the iterations of a job. One iteration alone has those of `lengths`."""
    costs: Costs = Costs()
    scheduler: SchedulerSection = SchedulerSection()
    """The default policy and the rules of each policy. In a simulation a policy knows the costs and lengths that
    earlier iterations would have measured, so the assumptions of a config have no counterpart here."""
    faults: tuple[FaultSection, ...] = ()

    @property
    def carries_gradients(self) -> bool:
        """As `actor.carries_gradients` of a job."""
        return self.algorithm.streams and self.actor_num_logical_shards is None

    @property
    def reshard_model(self) -> ModelSection | None:
        """The model that reshards move. None: each of them takes `reshard_s`."""
        return self.physics.named_shape().reshard_model() if self.is_computed else self.model

    @property
    def is_computed(self) -> bool:
        """Whether the physics computes the times."""
        return self.physics.law is PhysicsLaw.ROOFLINE

    @property
    def scores_ahead(self) -> bool:
        """As `scores_ahead` of a job."""
        return self.actor_num_logical_shards is None
