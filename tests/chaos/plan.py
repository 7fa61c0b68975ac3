"""Draws a run from its seed: the job, the faults, and the moment of each. Pure.

A plan that found something is kept as its record, since a new kind of fault changes what seeds draw.

Invariants:
- The same seed draws the same plan. [test_chaos_plan: same_seed]
- A plan is what its record says. [test_chaos_plan: read_back]
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.kinds import KINDS
from tests.chaos.moments import Moment, drawn_moment
from tests.chaos.variants import Training, Variant, drawn_variant

MOST_FAULTS = 4
_SHARE_OF_PAIRS = 0.25
"""How often a fault strikes in the moment of the one before it."""


@dataclass(frozen=True, slots=True)
class Planned:
    fault: Fault
    moment: Moment

    def record(self) -> dict[str, Any]:
        return {"moment": asdict(self.moment), **self.fault.record()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Planned:
        values = {name: _frozen(value) for name, value in record.items() if name not in ("kind", "moment")}
        return cls(KINDS[record["kind"]](**values), Moment(**record["moment"]))


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    variant: Variant
    faults: tuple[Planned, ...]

    @property
    def most_stops(self) -> int:
        """How often the run may end before it finishes."""
        return sum(each.fault.may_stop + each.fault.may_refuse for each in self.faults)

    @property
    def may_lose_records(self) -> bool:
        return any(each.fault.loses_records for each in self.faults)

    def record(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "variant": self.variant.record(),
            "faults": [each.record() for each in self.faults],
        }


def read_plan(record: Mapping[str, Any]) -> Plan:
    """The plan of a line of the driver's log."""
    variant = Variant(**dict(record["variant"]) | {"training": Training(**record["variant"]["training"])})
    return Plan(record["seed"], variant, tuple(map(Planned.of, record["faults"])))


def _frozen(value: Any) -> Any:
    """JSON has lists for tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def plan_of(seed: int, *, only: str | None = None) -> Plan:
    """`only`: the one kind of fault that is drawn. ValueError where there is no such kind."""
    if only is not None and only not in KINDS:
        raise ValueError(f"no kind of fault is called {only!r}; there are {', '.join(KINDS)}")
    rng = random.Random(f"chaos {seed}")
    variant = drawn_variant(rng)
    if only is not None and KINDS[only].needs != "any":
        variant = variant.on_servers(is_own=KINDS[only].needs == "own")
    kinds = [kind for name, kind in KINDS.items() if only in (None, name) and kind.needs in ("any", variant.servers)]
    faults: list[Planned] = []
    for _ in range(rng.randint(1, MOST_FAULTS)):
        (kind,) = rng.choices(kinds, weights=[each.weight for each in kinds])
        fault = kind.drawn(rng, variant)
        moment = drawn_moment(rng, iterations=variant.training.iterations, moves_gpus=variant.moves_gpus)
        if faults and rng.random() < _SHARE_OF_PAIRS:
            moment = faults[-1].moment
        faults.append(Planned(fault, moment))
    return Plan(seed, variant, tuple(faults))
