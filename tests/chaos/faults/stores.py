"""Stores of the driver's own that go away, and a network that fails in front of them."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from dataclasses import dataclass
from typing import ClassVar, Self

from tests.chaos.faults.fault import Fault
from tests.chaos.link import Trouble
from tests.chaos.stores import NAMES, Stores
from tests.chaos.variants import Variant
from tests.chaos.world import NotThere, World

LONGEST_STEP_S = 100_000.0
"""A time zone that was wrong is 43,200 s at most."""
WITH_DATA, OLDER, EMPTY = "with its data", "with older data", "empty"


def _drawn_names(rng: random.Random) -> tuple[str, ...]:
    return rng.choice([("nats",), ("valkey",), NAMES])


def _drawn_seconds(rng: random.Random, *, longest_s: float) -> float:
    """As often around 1 s as around 10 s."""
    return round(math.exp(rng.uniform(math.log(0.2), math.log(longest_s))), 2)


def _stores(world: World) -> Stores:
    assert world.stores is not None, "the kind is drawn for jobs on own servers alone"
    return world.stores


@dataclass(frozen=True, slots=True)
class StoresAway(Fault):
    """Servers are killed and come back. `age_s`: how much older the data is with which they do."""

    needs: ClassVar[str] = "own"
    weight: ClassVar[int] = 7
    names: tuple[str, ...]
    seconds: float
    comes_back: str
    age_s: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        comes_back = rng.choice([WITH_DATA, WITH_DATA, OLDER, EMPTY])
        age_s = round(rng.uniform(0.1, 8.0), 2) if comes_back == OLDER else 0.0
        return cls(_drawn_names(rng), _drawn_seconds(rng, longest_s=60.0), comes_back, age_s)

    @property
    def may_stop(self) -> bool:
        return "nats" in self.names and self.comes_back != WITH_DATA

    @property
    def loses_records(self) -> bool:
        # What Redis loses is made again, and the accounts come from the folder's events.
        return self.may_stop

    async def inflict(self, world: World) -> str:
        stores = _stores(world)
        async with stores.alone:
            older = world.folder / "older"
            if self.comes_back == OLDER:
                await asyncio.to_thread(stores.copy, self.names, older)
                await asyncio.sleep(self.age_s)
            await stores.kill(self.names)
            if self.comes_back != WITH_DATA:
                stores.lose(self.names, older=older if self.comes_back == OLDER else None)
                shutil.rmtree(older, ignore_errors=True)
            await asyncio.sleep(self.seconds)
            await stores.come_back()
        return f"{' and '.join(self.names)} came back {self.comes_back} after {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Network(Fault):
    """The link of the whole job to one or both servers."""

    needs: ClassVar[str] = "own"
    weight: ClassVar[int] = 6
    names: tuple[str, ...]
    trouble: Trouble
    seconds: float
    delay_s: float

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        trouble = rng.choice(list(Trouble))
        return cls(_drawn_names(rng), trouble, _drawn_seconds(rng, longest_s=30.0), round(rng.uniform(0.002, 0.1), 3))

    async def inflict(self, world: World) -> str:
        links = [_stores(world).links[name] for name in self.names]
        for link in links:
            link.suffer(Trouble(self.trouble), delay_s=self.delay_s)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            for link in links:
                link.suffer(None)
        return f"the link to {' and '.join(self.names)} was {self.trouble} for {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class ClockStep(Fault):
    """The clock of Redis is set back or forth, and stays so."""

    needs: ClassVar[str] = "own"
    weight: ClassVar[int] = 2
    ahead_s: int

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        return cls(rng.choice([-1, 1]) * round(math.exp(rng.uniform(0.0, math.log(LONGEST_STEP_S)))))

    async def inflict(self, world: World) -> str:
        stores = _stores(world)
        async with stores.alone:
            ahead_s = await stores.set_clock(self.ahead_s)
        if abs(ahead_s - self.ahead_s) > 1:
            raise NotThere(f"the clock of Redis is {ahead_s} s ahead: libfaketime does not work on this machine")
        return f"the clock of Redis is {ahead_s:+d} s from the machine's"
