"""The learning rate as a function of the samples trained."""

from __future__ import annotations

import pytest

from tidegate.learning_rate import learning_rate

WARM_UP = {
    "nothing at the start of a warm-up": (0, 100, 0.0),
    "half way": (50, 100, 1e-3),
    "the peak at its end": (100, 100, 2e-3),
    "the peak for good": (10_000, 100, 2e-3),
    "the peak at once without a warm-up": (0, 0, 2e-3),
}


@pytest.mark.parametrize(("trained", "warm_up", "want"), WARM_UP.values(), ids=WARM_UP)
def test_the_rate_grows_linearly_to_its_peak(trained: int, warm_up: int, want: float) -> None:
    assert learning_rate(trained, peak=2e-3, warm_up_samples=warm_up) == pytest.approx(want)
