"""What is known of a run of the driver once it is over: the input of the oracles. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.record import Row
from tests.chaos.variants import Training

Tokens = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Sighting:
    """The gates while they stayed as they were: the highest token of each GPU that passed. They were read whole before
    `at_s`, and again, unchanged, after `until_s`."""

    at_s: float
    tokens: Tokens
    until_s: float


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that was inflicted, from its first to its last moment."""

    fault: str
    begin_s: float
    end_s: float
    may_stop: bool
    did: str
    may_refuse: bool = False
    wrong: str = ""
    """What a person's command gave that is no answer."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of the job and its end. `end` is that of `result.json`; None where the run wrote none."""

    options: tuple[str, ...]
    begin_s: float
    end_s: float
    exit_code: int
    end: str | None
    said: str
    left_behind: tuple[str, ...] = ()
    is_hung: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time of a slot, by the file of one component."""

    gpu: str
    role: str
    start_ns: int
    end_ns: int
    state: str


@dataclass(frozen=True, slots=True)
class Collected:
    """`reference`: the final weights of the undisturbed job. None where the weights depend on what happens."""

    training: Training
    reference: str | None
    attempts: Sequence[Attempt]
    strikes: Sequence[Strike]
    journal: Sequence[Row]
    events: Sequence[Row]
    result: Mapping[str, Any] | None
    sightings: Sequence[Sighting]
    progress_s: Sequence[float]
    spans: Sequence[Span] = field(default_factory=tuple)
    may_lose_records: bool = False
