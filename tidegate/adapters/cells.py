"""What a store is made of: tables of cells that are read together and written by compare-and-set, under a session.

`tidegate.adapters.cell_store` puts all ports of `tidegate.ports.store` on top of this; a server's adapter is only this.
Invariants of an implementation:
- one `read` is one moment of the server, one `swap` happens entirely or not at all, and only if every cell it expects
  is as expected; `open` likewise;
- under a session whose run id or term is not the server's and the adopted one, both raise StoreNotAdopted;
- a call that got no answer raises StoreUnavailable: a `swap` or `open` may then have happened, or happen later, but
  only on the cells that it expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tidegate.ports.store import Identity


class Cell(NamedTuple):
    """One value's place."""

    table: str
    field: str


Writes = Mapping[Cell, bytes | None]
"""New values, None to empty a cell."""


@dataclass(frozen=True, slots=True)
class Session:
    """The server and the term that every call of a client is made under."""

    run_id: str
    term: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What was there, None for an empty cell, and when by the store's clock."""

    now_unix_ms: int
    tables: Mapping[str, Mapping[str, bytes]]
    cells: Mapping[Cell, bytes | None]


class Cells(Protocol):
    async def identity(self) -> Identity: ...

    async def read(
        self, session: Session | None, *, tables: tuple[str, ...] = (), cells: tuple[Cell, ...] = ()
    ) -> Reading:
        """Without a session (only adoption reads so) nothing is refused."""
        ...

    async def swap(self, session: Session, *, expected: Mapping[Cell, bytes | None], writes: Writes) -> bool:
        """False, with nothing written, when a cell is not as expected."""
        ...

    async def open(self, expected: Identity, *, term: int, writes: Writes) -> bool:
        """Adopts the server under `term`; False, with nothing written, when its identity is not as expected."""
        ...

    async def aclose(self) -> None: ...


def not_adopted(given: Session, found: Identity) -> str:
    """The text of StoreNotAdopted: what was asked under and what the server said."""
    return (
        f"the store is not open under run id {given.run_id[:12]} and term {given.term}: it is run id "
        f"{found.run_id[:12]}, adopted as {(found.adopted_run_id or 'none')[:12]} under term {found.term}; "
        "adopt it where it restarted, then attach again and rebuild from it"
    )
