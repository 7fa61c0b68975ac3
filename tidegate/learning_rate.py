"""The learning rate: constant after a linear warm-up, a pure function of the count of trained samples.

Invariant: the rate of an update is that of the progress before it.
"""

from __future__ import annotations


def learning_rate(trained_samples: int, *, peak: float, warm_up_samples: int) -> float:
    """`peak` from `warm_up_samples` on, before it in proportion; 0 at the start of a warm-up."""
    if trained_samples >= warm_up_samples:
        return peak
    return peak * trained_samples / warm_up_samples
