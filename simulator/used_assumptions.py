"""The assumptions that a scenario can use. All others are left out.

Under `physics.law: roofline` these are the numbers of the physics, with the shape and the GPU that it names, and in
place of the costs that it computes their values.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.assumptions import Assumption, assumptions_of
from simulator.noise import NoiseSection
from simulator.physics.costs import COMPUTED
from simulator.scenario import Scenario

_OF_A_PLAN = frozenset(f"costs.switch.{name}" for name in ("reshard_setup_s", "communicators_s", "reshard_bytes_per_s"))
_WITHOUT_A_PLAN = frozenset({"costs.switch.reshard_s"})
_OF_A_DEATH = frozenset(f"costs.switch.{name}" for name in ("trainer_cold_s", "engine_cold_s", "detect_s"))
_OF_A_TAIL = frozenset({"lengths.tail_share", "lengths.tail_index"})
_OF_A_LAW = frozenset(f"lengths.{name}" for name in ("median_tokens", "sigma_prompt", "sigma_group", "min_tokens"))
_OF_TURNS = frozenset({"costs.engine.turn_prefill_share"})
_OF_EXPERTS = frozenset({"costs.engine.step_experts_s", "costs.engine.expert_share"})
_OF_COPIES = frozenset({"costs.inference.gpus_per_copy"})
_OF_NOISE = frozenset(f"noise.{name}" for name in NoiseSection.model_fields)
_COMPUTED = frozenset(f"costs.{section}.{name}" for section, names in COMPUTED.items() for name in names)
_COMPUTED_MOVES = frozenset(
    {
        *(
            f"costs.switch.{name}"
            for name in ("release_s", "acquire_s", "engine_cold_s", "trainer_warm_s", "reshard_s")
        ),
        *(f"costs.sync.{name}" for name in ("fixed_s", "weight_bytes", "bytes_per_s")),
    }
)
_OF_A_TRANSFER = frozenset({"costs.sync.bytes_per_s"})


def used_assumptions(scenario: Scenario) -> Iterator[Assumption]:
    """As `assumptions_of`, without the assumptions that this scenario cannot use."""
    unused = _unused(scenario)
    if scenario.is_computed:
        yield from (own for own in _of_physics(scenario) if own.key not in unused)
    else:
        yield from (own for own in assumptions_of(scenario) if own.key not in unused and not _is_physics(own))


def _of_physics(scenario: Scenario) -> Iterator[Assumption]:
    """All, with the named shape and GPU. A computed cost has its value, where it has one for all layouts."""
    own, laws = scenario.physics, scenario.laws()
    named = own.model_copy(update={"shape": own.named_shape(), "gpu": own.named_gpu()})
    for each in assumptions_of(scenario.model_copy(update={"physics": named})):
        section, name = each.key.split(".")[-2:]
        is_given = each.key in _COMPUTED_MOVES and name in getattr(scenario.costs, section).model_fields_set
        if each.key not in _COMPUTED | _COMPUTED_MOVES or is_given:
            yield each
        elif section != "trainer":
            value = getattr(getattr(laws, section), name)
            yield Assumption(each.key, value, value, f"computed by physics.law={own.law}")


def _is_physics(assumption: Assumption) -> bool:
    return assumption.key.startswith("physics.")


def _unused(scenario: Scenario) -> frozenset[str]:
    lengths, is_trace = scenario.lengths, scenario.lengths.law == "trace"
    when = {
        _OF_A_PLAN: scenario.reshard_model is None,
        _WITHOUT_A_PLAN: scenario.reshard_model is not None,
        _OF_A_DEATH: not scenario.faults,
        _OF_A_TAIL: lengths.law != "long_tailed",
        _OF_A_LAW: is_trace,
        _OF_TURNS: lengths.mean_turns == 1 and not is_trace,
        _OF_A_TRANSFER: scenario.costs.sync.weight_bytes == 0 and not scenario.is_computed,
        _OF_EXPERTS: scenario.costs.engine.step_experts_s == 0 and not scenario.is_computed,
        _OF_COPIES: scenario.costs.inference.gpus_per_copy == 1 and not scenario.is_computed,
        _OF_NOISE: all(spread == 0 for _, spread in scenario.noise),
    }
    return frozenset(key for keys, is_idle in when.items() if is_idle for key in keys)
