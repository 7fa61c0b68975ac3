"""A store consists of tables of cells that are read together and written by compare-and-set, under a session.

`tidegate.adapters.cell_store` implements all ports of `tidegate.ports.store` on top of this, so a server's adapter
implements only `Cells`.

Invariants of an implementation:
- One `read` shows one moment of the server. [test_store_ownership: commit_and_an_abort]
- One `swap` happens entirely or not at all, and only if every cell is as expected. The same holds for `open`.
  [test_store_records: many_states_saved_at_once]
- `read` and `swap` raise StoreNotAdopted unless the session has the server's run id and the term of its adoption.
  [test_store_adoption: refused_after_the_server_restarted]
- A call without an answer raises StoreUnavailable. A `swap` or `open` may then have happened, or may happen later, but
  only on the cells that it expects. [test_store_lost_answers: saved_state_whose_answer_is_lost]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tidegate.ports.store import Identity


class Cell(NamedTuple):
    """The place of one value."""

    table: str
    field: str


Writes = Mapping[Cell, bytes | None]
"""The new values. None empties a cell."""


@dataclass(frozen=True, slots=True)
class Session:
    """The server and the term that a client makes every call under."""

    run_id: str
    term: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The values that were read, None for an empty cell, and the store's clock at that moment."""

    now_unix_ms: int
    tables: Mapping[str, Mapping[str, bytes]]
    cells: Mapping[Cell, bytes | None]


class Cells(Protocol):
    async def identity(self) -> Identity: ...

    async def read(
        self, session: Session | None, *, tables: tuple[str, ...] = (), cells: tuple[Cell, ...] = ()
    ) -> Reading:
        """Only adoption reads without a session: then nothing is refused."""
        ...

    async def swap(self, session: Session, *, expected: Mapping[Cell, bytes | None], writes: Writes) -> bool:
        """False, with nothing written, when a cell is not as expected."""
        ...

    async def open(self, expected: Identity, *, term: int, writes: Writes) -> bool:
        """Adopts the server under `term`. False, with nothing written, when its identity is not as expected."""
        ...

    async def shut(self, expected: Identity) -> bool:
        """Refuses all sessions until the server is adopted. False where its identity is not as expected."""
        ...

    async def aclose(self) -> None: ...


def not_adopted(session: Session, found: Identity) -> str:
    """The text of StoreNotAdopted: the caller's session and the server's identity."""
    return (
        f"the store is not open under run id {session.run_id[:12]} and term {session.term}: it is run id "
        f"{found.run_id[:12]}, adopted as {(found.adopted_run_id or 'none')[:12]} under term {found.term}; "
        "adopt it where it restarted, then attach again and rebuild from it"
    )
