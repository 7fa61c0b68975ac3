"""The store in memory, for tests and simulations: one `MemoryServer`, any number of clients, a clock that tests move.

It keeps the invariants of `tidegate.adapters.cells`. Time stands still except for `pass_ms`. A restart keeps the data
and changes the run id, like a Redis that restarts from its append-only file.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Cell, Reading, Session, not_adopted
from tidegate.adapters.tables import RUN_ID, TERM, read_identity
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable
from tidegate.ports.store import Identity


class MemoryServer:
    """The state that all clients share. The next `num_answers_to_lose` swaps happen, but their answers get lost."""

    def __init__(self, *, now_unix_ms: int = 1_000_000) -> None:
        self.now_unix_ms = now_unix_ms
        self.num_answers_to_lose = 0
        self.tables: dict[str, dict[str, bytes]] = {}
        self._starts = 1

    @property
    def identity(self) -> Identity:
        adopted_run_id, term = self.read_cell(RUN_ID), self.read_cell(TERM)
        return read_identity(self._run_id, adopted_run_id or b"", b"0" if term is None else term)

    @property
    def _run_id(self) -> str:
        return f"memory-{self._starts}"

    def pass_ms(self, duration_ms: int) -> None:
        self.now_unix_ms += duration_ms

    def restart(self) -> None:
        self._starts += 1

    def lose_data(self) -> None:
        """A restart without the data."""
        self.tables.clear()
        self.restart()

    def refuse(self, session: Session) -> None:
        found = self.identity
        if not found.is_open or session != Session(found.run_id, found.term):
            raise StoreNotAdopted(not_adopted(session, found))

    def read_cell(self, cell: Cell) -> bytes | None:
        return self.tables.get(cell.table, {}).get(cell.field)

    def write(self, writes: Mapping[Cell, bytes | None]) -> None:
        for cell, value in writes.items():
            if value is None:
                self.tables.get(cell.table, {}).pop(cell.field, None)
            else:
                self.tables.setdefault(cell.table, {})[cell.field] = value

    def adopt(self, term: int) -> None:
        self.write({RUN_ID: self._run_id.encode(), TERM: b"%d" % term})

    def shut(self) -> None:
        self.write({RUN_ID: b""})


class MemoryCells:
    """`Cells` of a `MemoryServer`. No method awaits between its check and its write, so each one is atomic."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def identity(self) -> Identity:
        return self._server.identity

    async def read(
        self, session: Session | None, *, tables: tuple[str, ...] = (), cells: tuple[Cell, ...] = ()
    ) -> Reading:
        if session is not None:
            self._server.refuse(session)
        return Reading(
            now_unix_ms=self._server.now_unix_ms,
            tables={table: dict(self._server.tables.get(table, {})) for table in tables},
            cells={cell: self._server.read_cell(cell) for cell in cells},
        )

    async def swap(
        self, session: Session, *, expected: Mapping[Cell, bytes | None], writes: Mapping[Cell, bytes | None]
    ) -> bool:
        self._server.refuse(session)
        if any(self._server.read_cell(cell) != value for cell, value in expected.items()):
            return False
        self._server.write(writes)
        if self._server.num_answers_to_lose:
            self._server.num_answers_to_lose -= 1
            raise StoreUnavailable("the answer was lost on its way: call again")
        return True

    async def open(self, expected: Identity, *, term: int, writes: Mapping[Cell, bytes | None]) -> bool:
        found = self._server.identity
        if found != expected or found.is_open or term <= found.term:
            return False
        self._server.write(writes)
        self._server.adopt(term)
        return True

    async def shut(self, expected: Identity) -> bool:
        if self._server.identity != expected:
            return False
        self._server.shut()
        return True

    async def aclose(self) -> None:
        """Does nothing: there is no connection."""


def memory_store(server: MemoryServer) -> CellStore:
    return CellStore(MemoryCells(server))
