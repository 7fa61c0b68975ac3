"""What a scenario's physics computes, which layouts have room, and the faults of both. Each line is one fault.

The trainer may have copies like those of its home, and the layouts of `actor_layouts`: those with room for the model.

Invariant: no layout without room is offered to a policy. [test_scenario_physics: is_offered_to_no_policy]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from simulator.physics.costs import COMPUTED, ComputedCosts, computed_costs
from simulator.physics.memory import Memory
from simulator.physics.sections import PhysicsLaw, PhysicsSection
from simulator.physics.trainer import ExpectedWork
from simulator.scenario_checks import gpus_of, sharing
from simulator.scenario_sections import ScenarioSections
from simulator.workload import Workload
from tidegate.config.checks.actor_layouts import allowed_layouts
from tidegate.types import Layout, Role

_AS_GIVEN = f"physics.law={PhysicsLaw.PUBLISHED_FIT}"


def home_layout(scenario: ScenarioSections) -> Layout:
    """The actor's layout in the placement."""
    if scenario.actor_layout:
        return scenario.actor_layout.layout()
    return Layout(dp=max(1, len(gpus_of(scenario, Role.ACTOR))))


def memory_of(scenario: ScenarioSections) -> Memory:
    own = scenario.lengths
    observed = math.ceil((own.mean_turns - 1) * own.observation_tokens)
    return Memory.of(scenario.physics, longest_tokens=scenario.algorithm.prompt_tokens + own.max_tokens + observed)


def fewest_copies(scenario: ScenarioSections) -> int:
    """The fewest copies of the actor's home that have room. 1 where no physics says how much they need."""
    if not scenario.is_computed:
        return 1
    home = home_layout(scenario)
    return memory_of(scenario).fewest_copies(home, most=home.dp) or home.dp


def other_layouts(scenario: ScenarioSections) -> tuple[Layout, ...]:
    """The layouts besides the home's that a policy may choose."""
    num_gpus = len(scenario.cluster.gpus())
    others = allowed_layouts(scenario.actor_layouts, num_gpus=num_gpus, **sharing(scenario))
    return tuple(filter(memory_of(scenario).fits, others)) if scenario.is_computed else others


def computed_laws(scenario: ScenarioSections, work: ExpectedWork) -> ComputedCosts:
    home = home_layout(scenario)
    fewest, size = fewest_copies(scenario), home.num_ranks // home.dp
    most = max(home.dp, min(len(scenario.cluster.gpus()) // size, sharing(scenario)["num_samples"]))
    copies = [replace(home, dp=dp) for dp in range(fewest, most + 1) if dp * home.cp % home.ep == 0]
    layouts = (*copies, *other_layouts(scenario))
    return computed_costs(scenario.physics, scenario.costs, memory_of(scenario), work, home=home, layouts=layouts)


def expected_work(workload: Workload, update_sequences: float) -> ExpectedWork:
    """The work of updates of `update_sequences` with lengths such as those of `workload`."""
    lengths = [each for group in range(workload.num_groups) for each in workload.sequence_tokens(group)]
    mean = sum(lengths) / len(lengths)
    return ExpectedWork(update_sequences * mean, mean, sum(length * length for length in lengths) / sum(lengths))


def physics_faults(scenario: ScenarioSections) -> list[str]:
    if not scenario.is_computed:
        return [*_idle_faults(scenario)]
    return [*_set_faults(scenario)] or [*_room_faults(scenario), *_copy_faults(scenario)]


def _idle_faults(scenario: ScenarioSections) -> Iterator[str]:
    """A scenario that another one was dumped into has all keys, so those with their defaults are let pass."""
    for name, usual in PhysicsSection():
        if name == "law" or getattr(scenario.physics, name) == usual:
            continue
        yield (
            f"physics.{name} is set, and physics.law={scenario.physics.law} takes the times of costs: set "
            f"physics.law=roofline, or leave physics.{name} out"
        )


def _set_faults(scenario: ScenarioSections) -> Iterator[str]:
    """Values that the physics computes, and that the scenario sets."""
    for section, computed in COMPUTED.items():
        given = getattr(scenario.costs, section).model_fields_set
        for name in computed:
            if name in given:
                yield (
                    f"costs.{section}.{name} is set, and physics.law=roofline computes it: leave it out, or set "
                    f"{_AS_GIVEN}"
                )
    if scenario.model is not None:
        yield (
            "model.num_layers and the other keys of model are set, and physics.law=roofline has the model "
            f"{scenario.physics.model}: leave model out, and name it in physics.model or physics.shape"
        )


def _room_faults(scenario: ScenarioSections) -> Iterator[str]:
    memory, home = memory_of(scenario), home_layout(scenario)
    if gpus_of(scenario, Role.ACTOR) and (why := memory.refusal(home)):
        own = "" if "physics" in scenario.model_fields_set else f"; or set {_AS_GIVEN} for the times of costs"
        yield f"actor_layout.tp={home.tp}, pp={home.pp}, dp={home.dp} has no room for the model: {why}{own}"
    for at, section in enumerate(scenario.actor_layouts):
        layout = section.layout()
        most = len(scenario.cluster.gpus()) * layout.dp // layout.num_ranks
        if section.dp is not None and (why := memory.refusal(layout)):
            yield f"actor_layouts.{at} has no room for the model: {why}"
        elif section.dp is None and memory.fewest_copies(layout, most=most) is None:
            yield f"actor_layouts.{at} has no room for the model: {memory.refusal(replace(layout, dp=max(1, most)))}"
    if why := memory.engine_refusal(scenario.costs.engine.gpus_per_engine):
        yield why


def _copy_faults(scenario: ScenarioSections) -> Iterator[str]:
    """The inference has whole copies, and experts divide."""
    size, num_gpus = memory_of(scenario).inference_copy_gpus(), len(gpus_of(scenario, Role.INFERENCE))
    if num_gpus % size:
        yield (
            f"cluster.placement.inference has {num_gpus} GPUs, which make no whole copies of {size}, the fewest that "
            f"hold the model: leave {num_gpus % size} out, or add {size - num_gpus % size}"
        )
    home, num_experts = home_layout(scenario), memory_of(scenario).shape.num_experts
    if home.ep > 1 and num_experts % home.ep:
        yield f"actor_layout.ep={home.ep} does not divide the {num_experts} experts of the model: lower it"
