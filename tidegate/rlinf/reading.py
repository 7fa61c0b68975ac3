"""A config with keys of RLinf's -> the same config in Tidegate's keys, with notes on the differences.

The config may have keys of both. Order:
1. References (`${...}`) are replaced by their values.
2. Each key with a rule of its own is translated.
3. The keys that need several others are derived.
4. All faults are raised together.

Invariants:
- Each key of RLinf's is translated, noted or refused. [test_rlinf: no_key_is_skipped_in_silence]
- A config in Tidegate's keys stays unchanged. [test_rlinf: a_config_in_our_keys_is_unchanged]
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.config.base import KeyPath
from tidegate.config.reading.layers import Layer, dotted
from tidegate.rlinf.derived import derive
from tidegate.rlinf.references import without_references
from tidegate.rlinf.rules import DERIVED, RULES, SAME_AS, WITHOUT_EFFECT, Becomes, OnlyAs, Rule
from tidegate.rlinf.translation import Translation

_LIKENESS = 0.6
"""The smallest ratio of difflib at which a fault names RLinf's nearest key."""
_REASONS = {key: reason for reason, keys in WITHOUT_EFFECT.items() for key in keys}
_KNOWN = frozenset([*RULES, *DERIVED, *SAME_AS, *_REASONS])
_SECTIONS = frozenset(key.rpartition(".")[0] for key in _KNOWN)


@dataclass(frozen=True, slots=True)
class Reading:
    layer: Layer
    notes: tuple[str, ...] = ()
    """One line for each difference, for the person who starts the job."""


def read_rlinf(given: Layer, ours: Collection[tuple[str, ...]]) -> Reading:
    """`ours` has Tidegate's keys. ValueError lists the values without a counterpart, one a line."""
    given = without_references(given)
    theirs = [key for key in _leaves(given.values, ()) if not _is_ours(key, ours)]
    if not any(_rule_of(dotted(path)) for path in theirs):
        return Reading(given)
    config = Translation(given)
    for path in theirs:
        _apply(config, dotted(path), ours)
    derive(config)
    if config.faults:
        raise ValueError("\n".join(config.faults))
    return Reading(config.layer, tuple(_note_line(note, keys) for note, keys in config.notes.items()))


def _note_line(note: str, keys: Sequence[str]) -> str:
    return f"{keys[0]}: {note}" if len(keys) == 1 else f"{note}: {', '.join(keys)}"


def _leaves(value: Any, at: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*at, str(key)))
    else:
        yield at


def _is_ours(path: KeyPath, ours: Collection[tuple[str, ...]]) -> bool:
    return any(path[:length] in ours for length in range(1, len(path) + 1))


def _rule_of(key: str) -> bool:
    return key in _KNOWN or _reason(key) is not None or key.startswith("cluster.component_placement.")


def _reason(key: str) -> str | None:
    """The reason why a key has no effect. None: it has one."""
    parts = key.split(".")
    stars = [f"{'.'.join(parts[:length])}.*" for length in range(len(parts) - 1, 0, -1)]
    return next((_REASONS[each] for each in (key, *stars) if each in _REASONS), None)


def _apply(config: Translation, key: str, ours: Collection[tuple[str, ...]]) -> None:
    if key in DERIVED or key in SAME_AS or key.startswith("cluster.component_placement."):
        return
    if key in RULES:
        _follow(config, key, RULES[key])
    elif (reason := _reason(key)) is not None:
        config.take(key)
        config.add_note(f"without effect here: {reason}", key)
    elif _is_in_a_section_of_theirs(key, ours):
        near = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=_LIKENESS)
        hint = f"; the nearest that RLinf has is {near[0]!r}" if near else ""
        config.refuse(key, f"unknown key {key!r}{hint}")


def _is_in_a_section_of_theirs(key: str, ours: Collection[tuple[str, ...]]) -> bool:
    """Whether an unknown key is in a section that only RLinf has.

    The later check of Tidegate's keys reports an unknown key in one of Tidegate's sections, with the known keys there.
    """
    parts = key.split(".")
    nearest = next((parts[:n] for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in _SECTIONS), None)
    return nearest is not None and not any(path[: len(nearest)] == tuple(nearest) for path in ours)


def _follow(config: Translation, key: str, rule: Rule) -> None:
    value = config.take(key)
    match rule:
        case Becomes(target, values, instead):
            ours = next((to for word, to in values.items() if _is_same(value, word)), None) if values else value
            if values and ours is None:
                config.refuse(key, f"{key}={value!r} is not supported: {instead}")
            else:
                config.put(target, ours, key)
        case OnlyAs(values, instead, at_least, notes):
            is_enough = at_least is not None and isinstance(value, int | float) and value >= at_least
            if not is_enough and not any(_is_same(value, each) for each in values):
                config.refuse(key, f"{key}={value!r} is not supported: {instead}")
            elif note := next((note for word, note in notes.items() if _is_same(value, word)), None):
                config.add_note(note, key)


def _is_same(value: Any, other: Any) -> bool:
    """Whether both are equal, where a bool never equals a number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
