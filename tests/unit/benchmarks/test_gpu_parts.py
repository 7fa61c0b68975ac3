"""The table of the parts of `make gpu`."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.gpu.part import module_of
from benchmarks.gpu.parts import MOST_S, Part, chosen, parts
from benchmarks.gpu.sglang import decode_costs, further_options
from simulator.cost_model import EngineCosts


def test_the_parts_take_ten_minutes_at_most() -> None:
    assert sum(part.limit_s for part in parts("cuda")) <= MOST_S


@pytest.mark.parametrize("part", parts("cuda"), ids=lambda part: part.name)
def test_every_part_has_a_module_that_measures(part: Part) -> None:
    assert callable(importlib.import_module(module_of(part.name)).measure)


def test_one_part_is_chosen_by_its_name_and_all_without_one() -> None:
    assert [part.name for part in chosen(parts("cuda"), "demo")] == ["demo"]
    assert chosen(parts("cuda"), "") == parts("cuda")


def test_an_unknown_part_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"'dcotor': give PART=doctor\|tests\|reshard"):
        chosen(parts("cuda"), "dcotor")


@pytest.mark.parametrize(
    ("rates", "base_s", "per_sequence_s"),
    [
        ({1: 1 / 0.011, 4: 4 / 0.014, 16: 16 / 0.026}, 0.010, 0.001),
        ({1: 1 / 0.03, 4: 4 / 0.02, 16: 16 / 0.01}, 0.02, 0.0),
        ({1: 1 / 0.001, 4: 4 / 0.1}, 1e-9, 0.033),
    ],
    ids=["a step that grows with its batch", "a step that shrinks has a mean", "a step is not free"],
)
def test_the_simulator_takes_the_decode_costs_of_tokens_a_second_by_batch(
    rates: dict[int, float], base_s: float, per_sequence_s: float
) -> None:
    found = {key.removeprefix("costs.engine."): value for key, value in decode_costs(rates).items()}
    costs = EngineCosts.model_validate(found)
    assert costs.step_base_s == pytest.approx(base_s)
    assert costs.step_per_sequence_s == pytest.approx(per_sequence_s)
    assert costs.decode_s(running=8, kv_tokens=10**6, steps=1) == pytest.approx(base_s + 8 * per_sequence_s)


def test_further_options_of_sglang_are_a_json_object() -> None:
    assert further_options("") == {}
    assert further_options('{"attention-backend": "triton"}') == {"attention-backend": "triton"}


@pytest.mark.parametrize(
    ("text", "want"),
    [("[1]", "is not a JSON object"), ("triton", "Expecting value"), ('{"port": 1}', "Tidegate sets")],
)
def test_other_options_of_sglang_are_refused(text: str, want: str) -> None:
    with pytest.raises(ValueError, match=want):
        further_options(text)
