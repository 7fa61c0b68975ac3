"""What is assumed: fields of a scenario's sections, each with its value and the source of its default.

`P:` marks a source that is published, `F:` a value fitted to a published figure, `A:` an assumption.
Invariant: of a scenario those are left out that nothing in it can come to use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.config_base import Section, fields_of

if TYPE_CHECKING:
    from simulator.scenario import Scenario

_OF_A_PLAN = frozenset(f"costs.switch.{name}" for name in ("reshard_setup_s", "communicators_s", "reshard_bytes_per_s"))
_WITHOUT_A_PLAN = frozenset({"costs.switch.reshard_s"})
_OF_A_DEATH = frozenset(f"costs.switch.{name}" for name in ("trainer_cold_s", "engine_cold_s", "detect_s"))
_OF_A_TAIL = frozenset({"lengths.tail_share", "lengths.tail_index"})
_OF_A_LAW = frozenset(f"lengths.{name}" for name in ("median_tokens", "sigma_prompt", "sigma_group", "min_tokens"))
_OF_TURNS = frozenset({"costs.engine.turn_prefill_share"})
_OF_A_TRANSFER = frozenset({"costs.sync.bytes_per_s"})


@dataclass(frozen=True, slots=True)
class Source:
    """Where a field's default comes from; what has none is no assumption."""

    text: str


@dataclass(frozen=True, slots=True)
class Assumption:
    """A field as people read it; `source` is of the default."""

    key: str
    value: Any
    default: Any
    source: str


def assumptions_of(section: Section) -> Iterator[Assumption]:
    """In the order of the fields; of a section that is left out nothing is assumed."""
    for path, info in fields_of(type(section)):
        for mark in info.metadata:
            if isinstance(mark, Source) and (holder := _holder(section, path)) is not None:
                default = info.get_default(call_default_factory=True)
                yield Assumption(".".join(path), getattr(holder, path[-1]), default, mark.text)


def used_assumptions(scenario: Scenario) -> Iterator[Assumption]:
    """As `assumptions_of`, without what this scenario does not use."""
    unused = _unused(scenario)
    return (own for own in assumptions_of(scenario) if own.key not in unused)


def _unused(scenario: Scenario) -> frozenset[str]:
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


def _holder(section: Section, path: tuple[str, ...]) -> Section | None:
    """The section of the path's last key; None where it, or one above it, is left out."""
    holder: Section | None = section
    for key in path[:-1]:
        holder = getattr(holder, key, None)
    return holder
