"""Parts of the physics for tests: a section for a model on a GPU, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.cost_model import EngineCosts
from simulator.physics.decode import engine_costs
from simulator.physics.memory import Memory
from simulator.physics.sections import PhysicsSection
from simulator.physics.trainer import ExpectedWork, RooflineTrainer
from tidegate.types import Layout

LONGEST = 28_672


def physics(model: str = "Qwen2.5-7B", hardware: str = "H100", **sections: Mapping[str, Any]) -> PhysicsSection:
    return PhysicsSection.model_validate({"law": "roofline", "model": model, "hardware": hardware, **sections})


def memory(of: PhysicsSection) -> Memory:
    return Memory.of(of, longest_tokens=LONGEST)


def engine(of: PhysicsSection, num_gpus: int) -> EngineCosts:
    """Its cache holds at least a token, whatever the model needs."""
    roomy = of.model_copy(update={"gpu": of.named_gpu().model_copy(update={"memory_bytes": 1e12})})
    return engine_costs(of, EngineCosts(gpus_per_engine=num_gpus), memory(roomy), context_tokens=4096)


def trainer(of: PhysicsSection, work: ExpectedWork, *layouts: Layout) -> RooflineTrainer:
    return RooflineTrainer(of.trainer, of.named_shape(), of.named_gpu(), work, layouts)
