"""The embedded engine and Megatron compute the same log-probabilities from the same tensors."""

from __future__ import annotations

import numpy as np
import pytest

from tests import effort
from tests.ranks import RankServer

NUM_PROMPTS, TOLERANCE = 3, 1e-4


@pytest.mark.parametrize(("tied", "temperature"), effort.cases([(False, 1.0), (True, 0.7)], always=[(True, 0.7)]))
def test_log_probabilities_of_the_engine_are_those_of_the_trainer(
    ranks: RankServer, tied: bool, temperature: float
) -> None:
    arguments = {"tied": tied, "temperature": temperature}
    (got,) = ranks.run("tests.integration.rollout.scoring:generate_and_score", 1, arguments)
    assert len(got) == 2 * NUM_PROMPTS
    for index in range(NUM_PROMPTS):
        engine, trainer = got[f"engine/{index}"], got[f"trainer/{index}"]
        assert len(engine) == len(trainer) == 60
        np.testing.assert_allclose(engine, trainer, atol=TOLERANCE, rtol=0)
