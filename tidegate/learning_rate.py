"""The learning rate: constant after a linear warm-up, a pure function of the count of trained samples.

Invariants: the rate of an update is that of the progress before it; it is assigned, never stepped, so that a resume or
another batching cannot make it drift; each parameter group keeps its own multiplier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def learning_rate(trained_samples: int, *, peak: float, warm_up_samples: int) -> float:
    """`peak` from `warm_up_samples` on, before it in proportion; 0 at the start of a warm-up."""
    if trained_samples >= warm_up_samples:
        return peak
    return peak * trained_samples / warm_up_samples


def assign_learning_rate(param_groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set each group's `lr` to `rate` times its `lr_mult`."""
    for group in param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
