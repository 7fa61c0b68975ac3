"""The embedded engine keeps the contract of every engine."""

from __future__ import annotations

import pytest

from tests.contract.engine_suite import EngineSuite, Subject
from tests.unit.rollout.tiny_models import TINY, engine_of, random_weights


class TestEmbeddedEngine(EngineSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(
            engine=engine_of(TINY, max_running_requests=3, weights_seed=1),
            config=TINY,
            weights=lambda seed: random_weights(TINY, seed=seed),
            num_slots=3,
        )
