"""The parts of `make gpu`: what each one runs, in which order, and for how long at most.

A part is a command. It gets the path of its report (`report.py`) as its last argument.

Invariant: all limits together are at most ten minutes. [test_gpu_parts: parts_take_ten_minutes_at_most]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_S = 600.0
_CPU_FACTOR = 5.0
"""A CPU starts each part's processes several times slower, and nobody waits for its figures."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    limit_s: float
    about: str
    command: tuple[str, ...]


def parts(device: str) -> tuple[Part, ...]:
    """All parts in their order. On `cpu` each one has the same code, a tiny size and more time."""
    factor = 1.0 if device == "cuda" else _CPU_FACTOR
    return tuple(
        Part(name, factor * limit_s, about, ("-m", "benchmarks.gpu.part", name, "--device", device))
        for name, limit_s, about in _PARTS
    )


def chosen(known: Sequence[Part], name: str | None) -> tuple[Part, ...]:
    """The part of that name; all parts where there is no name. ValueError for an unknown name."""
    if not name:
        return tuple(known)
    found = tuple(part for part in known if part.name == name)
    if not found:
        raise ValueError(f"no part is called {name!r}: give PART={'|'.join(part.name for part in known)}")
    return found


_PARTS = (
    ("doctor", 20.0, "driver, memory, copy bandwidth, what this machine lacks"),
    ("tests", 80.0, "the tests marked gpu"),
    ("reshard", 110.0, "another layout for a model with Adam, on 4 and 8 ranks of the card, against torch's DCP"),
    ("snapshot", 40.0, "weights from the device into a snapshot, and back"),
    ("demo", 90.0, "the demo's job from start to end on slots of the card"),
    ("deaths", 90.0, "the same job, of which ranks, an engine and services are killed"),
    ("cluster", 80.0, "a cluster on slots of the card, and three jobs for it"),
    ("sglang", 90.0, "SGLang where it is installed: start, weight update, sleep, tokens a second by batch"),
)
