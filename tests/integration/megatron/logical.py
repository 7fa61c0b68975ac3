"""Puts the logical tensors together again from what the ranks hold."""

from __future__ import annotations

import numpy as np
import torch

from tests.ranks import Results


def logical_tensors(results: list[Results], kind: str, *, tied_copies: bool = False) -> dict[str, torch.Tensor]:
    """`kind` is the prefix of the arrays; what one rank has as NaN another must have; AssertionError on a hole."""
    whole: Results = {}
    for rank in results:
        for key, local in rank.items():
            label = key.removeprefix(f"{kind}/")
            name = label.removesuffix("/tied")
            if label == key or (name != label) != tied_copies:
                continue
            target = whole.setdefault(name, np.full(rank[f"shape/{name}"], np.nan, dtype=local.dtype))
            dim = int(rank[f"dim/{name}"])
            for start, logical, size in rank[f"pieces/{name}"]:
                part = np.take(local, range(start, start + size), axis=dim)
                place = (slice(None),) * dim + (slice(logical, logical + size),)
                target[place] = np.where(np.isnan(part), target[place], part)
    holes = [name for name, tensor in whole.items() if np.isnan(tensor).any()]
    assert not holes, f"no rank holds all of {holes}"
    return {name: torch.from_numpy(tensor) for name, tensor in whole.items()}
