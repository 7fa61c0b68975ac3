"""A person who gives a running job commands: `scale`, `migrate`, `drain`, `cancel`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Self

from tests.chaos.faults.fault import Fault
from tests.chaos.variants import Variant
from tests.chaos.world import BadAnswer, World

_ANSWERS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class ByHand(Fault):
    """Commands one after the other. The job may refuse each: then it says so."""

    weight: ClassVar[int] = 4
    commands: tuple[tuple[str, ...], ...]

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        return cls(tuple(_drawn_command(rng, variant) for _ in range(rng.choice([1, 1, 2, 3]))))

    @property
    def may_stop(self) -> bool:
        return any(verb == "cancel" for verb, *_ in self.commands)

    async def inflict(self, world: World) -> str:
        world.running()
        done = []
        for verb, *rest in self.commands:
            code, text = await world.command(verb, world.name, *rest)
            if "Traceback" in text or code not in _ANSWERS:
                raise BadAnswer(f"tidegate {verb} {' '.join(rest)} ended with {code}: {text[-2000:]}")
            done.append(f"{verb} {' '.join(rest)}: {code} ({text.strip().split(chr(10))[-1][:120]})")
        return "; ".join(done)


def _drawn_command(rng: random.Random, variant: Variant) -> tuple[str, ...]:
    verb = rng.choice(["scale", "scale", "scale", "migrate", "migrate", "drain", "drain", "layout", "cancel"])
    if verb == "scale":
        parts = rng.sample(["--actor", "--rollout", "--inference"], rng.randint(1, 3))
        return ("scale", *(word for part in parts for word in (part, str(rng.randint(1, 3)))))
    if verb == "layout":
        return ("scale", "--layout", f"dp={rng.choice([1, 2, 4])}")
    if verb == "migrate":
        return ("migrate", "--from", rng.choice(variant.gpus), "--to", rng.choice(variant.gpus))
    if verb == "drain":
        return ("drain", rng.choice([*variant.gpus, rng.choice(variant.nodes)]), *rng.choice([(), ("--undo",)]))
    return ("cancel",)
