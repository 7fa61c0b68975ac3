"""Processes that are killed, or stopped for a while, one or two at once."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Self

import psutil

from tests.chaos.faults.fault import Fault
from tests.chaos.variants import ROLES, Variant
from tests.chaos.world import LAUNCHER, World

_SERVERS = ("nats-server", "valkey-server")


def drawn_victims(rng: random.Random, variant: Variant, *, with_servers: bool = True) -> tuple[str, ...]:
    """One process, or two that are struck at once. Several ways may name the same process."""
    with_servers = with_servers and not variant.has_own_servers
    found = [_drawn_victim(rng, variant, with_servers=with_servers)]
    if rng.random() < 0.3:
        found.append(_drawn_victim(rng, variant, with_servers=with_servers))
    return tuple(dict.fromkeys(found))


def _drawn_victim(rng: random.Random, variant: Variant, *, with_servers: bool) -> str:
    kinds = ["lead"] * 3 + ["service"] * 3 + ["worker"] * 5 + ["scheduler"] * 2 + ["forkserver", LAUNCHER]
    kind = rng.choice([*kinds, "server"] if with_servers else kinds)
    if kind == "lead":
        return f"lead {rng.choice(ROLES)}"
    if kind == "service":
        return f"{rng.choice(ROLES)}@{rng.choice(variant.nodes)}"
    if kind == "worker":
        # Where GPUs move, workers of several components are on each, most of them on standby.
        role = rng.choice(["", *ROLES]) if variant.moves_gpus else ""
        return " ".join(filter(None, ["worker", role, rng.choice(variant.gpus)]))
    if kind == "forkserver":
        return f"forkserver@{rng.choice(variant.nodes)}"
    return rng.choice(_SERVERS) if kind == "server" else kind


@dataclass(frozen=True, slots=True)
class Kill(Fault):
    """SIGKILL. The launcher gets a signal that it can handle as often as not."""

    weight: ClassVar[int] = 6
    victims: tuple[str, ...]
    number: int

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        return cls(drawn_victims(rng, variant), int(number))

    @property
    def may_stop(self) -> bool:
        return any(victim == LAUNCHER or victim in _SERVERS for victim in self.victims)

    async def inflict(self, world: World) -> str:
        done = []
        for victim, process in [(victim, world.process(victim)) for victim in self.victims]:
            # Others may take a request to leave as one, and stay away: only a kill is a fault of theirs.
            number = self.number if victim == LAUNCHER else signal.SIGKILL
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                done.append(f"{signal.Signals(number).name} to {victim} ({process.pid})")
        return ", ".join(done)


@dataclass(frozen=True, slots=True)
class Pause(Fault):
    """SIGSTOP, and SIGCONT some time later."""

    weight: ClassVar[int] = 4
    victims: tuple[str, ...]
    seconds: float

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        seconds = rng.choice([rng.uniform(0.1, 2.0), rng.uniform(2.0, 6.0), rng.uniform(6.0, 15.0)])
        return cls(drawn_victims(rng, variant), round(seconds, 2))

    async def inflict(self, world: World) -> str:
        struck = {victim: world.process(victim) for victim in self.victims}
        for process in struck.values():
            process.suspend()
        try:
            await asyncio.sleep(self.seconds)
        finally:
            for process in struck.values():
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        named = ", ".join(f"{victim} ({process.pid})" for victim, process in struck.items())
        return f"stopped {named} for {self.seconds:g} s"
