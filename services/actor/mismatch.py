"""The difference between the engine's and the trainer's log-probabilities of an update's tokens. Pure numpy.

Both describe the same token under the same version of the weights. With equal kernels all figures are only rounding;
they grow where the engine computes something differently. All figures are in fp64.

Invariant: the figures cover the trained tokens, and each token counts the same. [test_grpo: mismatch_is_of_the_trained]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.actor.microbatch import TrainSample


def mismatch(samples: Sequence[TrainSample], *, importance_cap: float | None) -> dict[str, float]:
    """The figures by name; all are 0 where no token is trained.

    With r = p_trainer / p_engine of a token:
    - mismatch_mean, mismatch_max: the mean and the maximum of |log r|.
    - mismatch_kl: the mean of (r - 1 - log r). This is the k3 estimate of KL(engine || trainer), because the engine
      drew the tokens (http://joschu.net/blog/kl-approx.html).
    - mismatch_truncated, only with a cap: the share of tokens with r > importance_cap.
    """
    trained = [sample for sample in samples if not sample.masked]
    log_ratio = np.concatenate(
        [np.asarray(sample.old_log_probs) - np.asarray(sample.engine_log_probs) for sample in trained] or [np.zeros(1)]
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
