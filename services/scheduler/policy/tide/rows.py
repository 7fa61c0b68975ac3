"""Values along the rows of a matrix, each row at its own places: a plan's times over the grid of steps. Pure.

Invariant: along a row that grows, `places_of` is the inverse of `values_at`.
[test_rows: places_are_where_its_values_are]
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.scheduler.state.observed import Floats, Ints


def alike(*keys: Iterable[float]) -> tuple[Ints, Ints]:
    """Which rows have the same value of each key: the first row of each kind, and by row the place of its kind."""
    places: dict[tuple[float, ...], int] = {}
    of_row = np.array([places.setdefault(key, len(places)) for key in zip(*keys, strict=True)], dtype=np.int64)
    first = np.empty(len(places), dtype=np.int64)
    # Of several rows the last one that is written counts.
    first[of_row[::-1]] = np.arange(of_row.size)[::-1]
    return first, of_row


def in_order(rows: Floats, order: Ints) -> Floats:
    """Each row in its own order."""
    ordered: Floats = rows.ravel().take(order + rows.shape[1] * np.arange(len(rows))[:, None])
    return ordered


def values_at(rows: Floats, places: Floats) -> Floats:
    """Each row's values at its own places, in intervals of the grid. Beyond its end a row has its last value, and
    before its beginning it goes on as in its first interval."""
    width = rows.shape[1]
    inside = np.minimum(places, width - 1)
    low = np.minimum(np.maximum(inside, 0.0).astype(np.int64), width - 2)
    at, flat = low + width * np.arange(len(rows))[:, None], rows.ravel()
    first = flat.take(at)
    at += 1
    values: Floats = flat.take(at)
    values -= first
    inside -= low
    values *= inside
    values += first
    return values


def places_of(rows: Floats, values: Floats) -> Floats:
    """The inverse of `values_at`, for one value a row. Each row only grows."""
    low = np.minimum(np.maximum((rows <= values[:, None]).sum(axis=1) - 1, 0), rows.shape[1] - 2)
    at = np.arange(len(rows))
    first, second = rows[at, low], rows[at, low + 1]
    part = (values - first) / np.maximum(second - first, 1e-12)
    places: Floats = low + np.minimum(part, 1.0)
    return places
