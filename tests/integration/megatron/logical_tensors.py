"""Assembles the logical tensors from the ranks' parts."""

from __future__ import annotations

import numpy as np
import torch

from tests.ranks import Results


def logical_tensors(results: list[Results], kind: str) -> dict[str, torch.Tensor]:
    """`kind` is the prefix of the arrays. Elements that are NaN on one rank must exist on another; common elements must
    agree.

    Raises AssertionError on a hole or a disagreement.
    """
    whole: Results = {}
    for rank in results:
        for key, local in rank.items():
            name = key.removeprefix(f"{kind}/")
            if name == key:
                continue
            target = whole.setdefault(name, np.full(rank[f"shape/{name}"], np.nan, dtype=local.dtype))
            matrix = target.reshape(int(rank[f"rows/{name}"]), -1)
            for row, col, rows, cols, offset, stride in rank[f"blocks/{name}"]:
                place = matrix[row : row + rows, col : col + cols]
                strides = (stride * local.itemsize, local.itemsize)
                part = np.lib.stride_tricks.as_strided(local.reshape(-1)[offset:], (rows, cols), strides)
                common = ~np.isnan(place) & ~np.isnan(part)
                assert np.array_equal(place[common], part[common]), f"{name}: two ranks hold different values"
                np.copyto(place, part, where=~np.isnan(part))
    holes = [name for name, tensor in whole.items() if np.isnan(tensor).any()]
    assert not holes, f"no rank holds all of {holes}"
    return {name: torch.from_numpy(tensor) for name, tensor in whole.items()}
