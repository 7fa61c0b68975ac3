"""How far the engine's log-probabilities of an update's tokens are from the trainer's. Pure numpy.

Both are of the same token under the same version of the weights, so that with equal kernels all figures are rounding;
they grow with what the engine computes differently. Invariant: figures are in fp64, over the tokens that are trained,
each of which counts alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.actor.microbatch import TrainSample


def mismatch(samples: Sequence[TrainSample], *, importance_cap: float | None) -> dict[str, float]:
    """Of |log p_trainer - log p_engine| the mean and the maximum; the k3 estimate of KL(engine || trainer), since the
    engine drew the tokens (http://joschu.net/blog/kl-approx.html); with a cap, the share of weights that it truncates,
    p_trainer / p_engine. All are 0 where no token is trained."""
    counted = [sample for sample in samples if not sample.masked]
    log_ratio = np.concatenate(
        [np.asarray(sample.old_log_probs) - np.asarray(sample.engine_log_probs) for sample in counted] or [np.zeros(1)]
    )
    ratio = np.exp(log_ratio)
    figures = {
        "mismatch_mean": np.abs(log_ratio).mean(),
        "mismatch_max": np.abs(log_ratio).max(),
        "mismatch_kl": (np.expm1(log_ratio) - log_ratio).mean(),
    }
    if importance_cap is not None:
        figures["mismatch_truncated"] = (ratio > importance_cap).mean()
    return {name: float(figure) for name, figure in figures.items()}
