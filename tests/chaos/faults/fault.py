"""What all kinds of faults have in common."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.chaos.variants import Variant
from tests.chaos.world import World


@dataclass(frozen=True, slots=True)
class Fault(ABC):
    """A kind of fault with its parameters.

    `needs`: "own" or "embedded" servers, or "any". `weight`: how often the kind is drawn.
    """

    needs: ClassVar[str] = "any"
    weight: ClassVar[int] = 1

    @classmethod
    @abstractmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        """One with parameters that fit the job."""

    @property
    def may_stop(self) -> bool:
        """Whether the run may end because of it, to be resumed. Else the job survives it."""
        return False

    @property
    def may_refuse(self) -> bool:
        """Whether the start after it may be refused, until a person has mended what it did."""
        return False

    def may_refuse_in(self, world: World) -> bool:
        """Whether the start after it may be refused, now that it has struck. At most where `may_refuse` says so."""
        return self.may_refuse

    @property
    def loses_records(self) -> bool:
        """Whether a store loses data: the accounts then begin anew with the next start."""
        return False

    def own_disk(self, folder: Path, job: str) -> Path | None:
        """The folder that has to be a file system of its own, in the run's `folder`."""
        return None

    @abstractmethod
    async def inflict(self, world: World) -> str:
        """Returns what was done once the fault is over. NotThere where it cannot be done now."""

    @property
    def kind(self) -> str:
        return type(self).__name__

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}
