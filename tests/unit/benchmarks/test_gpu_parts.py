"""The table of the parts of `make gpu`."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.gpu.part import module_of
from benchmarks.gpu.parts import MOST_S, Part, chosen, parts


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
