"""Values along the rows of a matrix, each row at its own places: a plan's times over the grid of steps. Pure.

Invariant: along a row that grows, `places_of` is the inverse of `values_at`.
[test_rows: places_are_where_its_values_are]
"""

from __future__ import annotations

import numpy as np

from services.scheduler.state.observed import Floats, Ints


def in_order(rows: Floats, order: Ints) -> Floats:
    """Each row in its own order."""
    ordered: Floats = rows.ravel().take(order + rows.shape[1] * np.arange(len(rows))[:, None])
    return ordered


def values_at(rows: Floats, places: Floats) -> Floats:
    """Each row's values at its own places, in intervals of the grid. Beyond its end a row has its last value."""
    width = rows.shape[1]
    inside = np.minimum(np.maximum(places, 0.0), width - 1)
    low = np.minimum(inside.astype(np.int64), width - 2)
    at, flat = low + width * np.arange(len(rows))[:, None], rows.ravel()
    first = flat.take(at)
    values: Floats = first + (inside - low) * (flat.take(at + 1) - first)
    return values


def places_of(rows: Floats, values: Floats) -> Floats:
    """The inverse of `values_at`, for one value a row. Each row only grows."""
    low = np.clip((rows <= values[:, None]).sum(axis=1) - 1, 0, rows.shape[1] - 2)
    at = np.arange(len(rows))
    first, second = rows[at, low], rows[at, low + 1]
    places: Floats = low + np.clip((values - first) / np.maximum(second - first, 1e-12), 0.0, 1.0)
    return places
