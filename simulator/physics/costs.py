"""The costs of an iteration from the physics of its model and GPUs. Pure.

A duration of a move or of the sync that the scenario's `costs` sets counts. All others are computed:

    release_s       = sleep_s
    acquire_s       = wake_s + weights of the engine's GPU / host_bytes_per_s
    engine_cold_s   = cold_s + weights / disk_bytes_per_s
    trainer_warm_s  = trainer_wake_s + weights and optimizer of a rank / host_bytes_per_s
    reshard_s       = setup + communicators + weights and optimizer of a rank / reshard_bytes_per_s
    sync            = publish_s + weights / (publish_bytes_per_s * nodes of one data-parallel copy)

`reshard_s` is for models whose reshards are not planned: those with experts.

Invariant: nothing depends on the lengths of the iteration itself. [test_scenario_physics: know_no_length]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from simulator.cost_model import Costs, EngineCosts, InferenceCosts, SwitchCosts, SyncCosts
from simulator.physics.decode import engine_costs
from simulator.physics.memory import Memory
from simulator.physics.sections import PhysicsSection
from simulator.physics.shapes import WEIGHT_BYTES
from simulator.physics.trainer import ExpectedWork, RooflineTrainer
from tidegate.types import Layout

COMPUTED = {
    "engine": (
        "step_floor_s",
        "step_base_s",
        "step_per_sequence_s",
        "step_per_kv_token_s",
        "step_experts_s",
        "expert_share",
        "kv_capacity_tokens",
        "prefill_tokens_per_s",
    ),
    "trainer": ("fixed_s", "rate_tokens_per_s", "rate_gpus", "exponent", "layout_efficiency"),
    "inference": ("rate_tokens_per_s", "gpus_per_copy"),
}
"""By section of `costs`: the fields that a scenario cannot set beside a physics that computes them."""


@dataclass(frozen=True, slots=True)
class ComputedCosts:
    """The counterpart of `Costs`."""

    engine: EngineCosts
    trainer: RooflineTrainer
    inference: InferenceCosts
    switch: SwitchCosts
    sync: SyncCosts


def computed_costs(
    physics: PhysicsSection,
    given: Costs,
    memory: Memory,
    work: ExpectedWork,
    *,
    home: Layout,
    layouts: tuple[Layout, ...],
) -> ComputedCosts:
    """`layouts` are those that the trainer may have, `home` the one that it begins with."""
    trainer = RooflineTrainer(physics.trainer, memory.shape, memory.gpu, work, layouts)
    return ComputedCosts(
        engine=engine_costs(physics, given.engine, memory, context_tokens=work.mean_tokens),
        trainer=trainer,
        inference=InferenceCosts(
            rate_tokens_per_s=trainer.inference_tokens_per_s, gpus_per_copy=memory.inference_copy_gpus()
        ),
        switch=_switch(physics, given, memory, home),
        sync=_sync(physics, given, memory, home),
    )


def _switch(physics: PhysicsSection, given: Costs, memory: Memory, home: Layout) -> SwitchCosts:
    own, weights, switch = physics.moves, memory.shape.weight_bytes, given.switch
    rank_bytes = memory.kept_bytes(home)
    computed = {
        "release_s": own.sleep_s,
        "acquire_s": own.wake_s + weights / given.engine.gpus_per_engine / own.host_bytes_per_s,
        "engine_cold_s": own.cold_s + weights / own.disk_bytes_per_s,
        "trainer_warm_s": own.trainer_wake_s + rank_bytes / own.host_bytes_per_s,
        "reshard_s": switch.reshard_setup_s + switch.communicators_s + rank_bytes / switch.reshard_bytes_per_s,
    }
    return switch.model_copy(update=_unless_set(computed, switch.model_fields_set))


def _sync(physics: PhysicsSection, given: Costs, memory: Memory, home: Layout) -> SyncCosts:
    own, num_nodes = physics.moves, math.ceil(home.tp * home.pp * home.cp / memory.gpu.gpus_per_node)
    computed = {
        "fixed_s": own.publish_s,
        "weight_bytes": WEIGHT_BYTES * memory.shape.num_parameters,
        "bytes_per_s": own.publish_bytes_per_s * num_nodes,
    }
    return given.sync.model_copy(update=_unless_set(computed, given.sync.model_fields_set))


def _unless_set(computed: Mapping[str, float], given: set[str]) -> dict[str, float]:
    return {name: value for name, value in computed.items() if name not in given}
