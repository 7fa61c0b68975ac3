"""The config, the launcher and the rollout know the same engines."""

from __future__ import annotations

from typing import get_args

import pytest

from services.rollout.engines import STARTS, STARTS_ASLEEP
from tidegate.config.engines.embedded import Embedded
from tidegate.config.engines.registry import DECIDES_SAMPLES, KINDS, RolloutSection, deciding, kind_of
from tidegate.config.engines.sglang import SglangSection


def test_every_engine_of_the_config_has_a_kind_and_a_start() -> None:
    named = get_args(RolloutSection.model_fields["engine"].annotation)
    assert sorted(KINDS) == sorted(STARTS) == sorted(STARTS_ASLEEP) == sorted(named)
    assert set(DECIDES_SAMPLES) <= set(named)


@pytest.mark.parametrize(("name", "want"), [("embedded", Embedded), ("sglang", SglangSection)])
def test_a_section_has_the_kind_that_it_names(name: str, want: type) -> None:
    assert type(kind_of(RolloutSection.model_validate({"engine": name}))) is want


@pytest.mark.parametrize(("name", "want"), [("embedded", None), ("sglang", "float32")])
def test_samples_depend_on_the_keys_of_the_named_engine_alone(name: str, want: str | None) -> None:
    rollout = RolloutSection.model_validate({"engine": name, "sglang": {"dtype": "float32"}})
    assert deciding(rollout) == {"engine": name, "length_law": None, "sglang": {"dtype": want}}


def test_samples_depend_on_the_law_of_their_lengths() -> None:
    law = {"median_tokens": 9.0, "sigma_prompt": 1.0, "sigma_group": 0.6, "seed": 2}
    assert deciding(RolloutSection.model_validate({"length_law": law}))["length_law"] == law
