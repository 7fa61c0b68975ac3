"""The assumptions that a scenario can use. All others are left out."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.assumptions import Assumption, assumptions_of
from simulator.scenario_sections import ScenarioSections

_OF_A_PLAN = frozenset(f"costs.switch.{name}" for name in ("reshard_setup_s", "communicators_s", "reshard_bytes_per_s"))
_WITHOUT_A_PLAN = frozenset({"costs.switch.reshard_s"})
_OF_A_DEATH = frozenset(f"costs.switch.{name}" for name in ("trainer_cold_s", "engine_cold_s", "detect_s"))
_OF_A_TAIL = frozenset({"lengths.tail_share", "lengths.tail_index"})
_OF_A_LAW = frozenset(f"lengths.{name}" for name in ("median_tokens", "sigma_prompt", "sigma_group", "min_tokens"))
_OF_TURNS = frozenset({"costs.engine.turn_prefill_share"})
_OF_A_TRANSFER = frozenset({"costs.sync.bytes_per_s"})


def used_assumptions(scenario: ScenarioSections) -> Iterator[Assumption]:
    """As `assumptions_of`, without the assumptions that this scenario cannot use."""
    unused = _unused(scenario)
    return (own for own in assumptions_of(scenario) if own.key not in unused)


def _unused(scenario: ScenarioSections) -> frozenset[str]:
    lengths, is_trace = scenario.lengths, scenario.lengths.law == "trace"
    when = {
        _OF_A_PLAN: scenario.model is None,
        _WITHOUT_A_PLAN: scenario.model is not None,
        _OF_A_DEATH: not scenario.faults,
        _OF_A_TAIL: lengths.law != "long_tailed",
        _OF_A_LAW: is_trace,
        _OF_TURNS: lengths.mean_turns == 1 and not is_trace,
        _OF_A_TRANSFER: scenario.costs.sync.weight_bytes == 0,
    }
    return frozenset(key for keys, is_idle in when.items() if is_idle for key in keys)
