"""How `benchmarks.ablation` leaves parts of `tide` out, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from benchmarks import iteration_grid, tide_parts, told_wrong
from benchmarks.ablation import REPORTED, SETTINGS, TUNING, Setting, case_of, figures_of
from benchmarks.ablation_parts import NOTHING, PARTS, Kind, Part
from benchmarks.contenders import ROOFLINE
from simulator.scenario import load_scenario
from tests.unit.benchmarks.small_iteration import SMALL


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_left_out_for_one_simulation_alone(name: str) -> None:
    part = PARTS[name]
    present = [vars(each.owner)[each.name] for each in part.instead]
    with part.left_out():
        assert all(vars(each.owner)[each.name] is not was for each, was in zip(part.instead, present, strict=True))
    assert [vars(each.owner)[each.name] for each in part.instead] == present


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_tried_in_some_setting(name: str) -> None:
    assert {setting.kind for setting in SETTINGS.values()} & set(PARTS[name].kinds)
    assert PARTS[name].instead or PARTS[name].rules


@pytest.mark.parametrize("name", PARTS)
def test_an_iteration_ends_without_each_part(name: str) -> None:
    small = Setting(Kind.SHORT, lambda: load_scenario(ROOFLINE, SMALL))
    assert small.seconds(PARTS[name], 1) > 0


def test_an_iteration_without_an_order_by_hints_is_another_one() -> None:
    small = Setting(Kind.SHORT, lambda: load_scenario(ROOFLINE, SMALL))
    as_it_is = small.seconds(Part(), 1)
    assert small.seconds(PARTS["an order by hints"], 1) != as_it_is
    assert small.seconds(Part(), 1) == as_it_is


def test_nothing_was_chosen_on_the_reported_seeds() -> None:
    others = {*TUNING, *tide_parts.REPORTED, *told_wrong.SEEDS}
    for cell in iteration_grid.CELLS:
        others.update(cell.seeds)
    assert not others & set(REPORTED)


def test_a_setting_counts_by_the_median_of_its_seeds_and_a_part_by_the_median_of_its_settings() -> None:
    case = case_of("an order by hints", {"a": [0.0, 0.01, 0.5], "b": [0.03, 0.05], "c": [-0.2, 0.0]})
    assert (case["gain"], case["gain_most"]) == pytest.approx((0.01, 0.04))
    assert (case["gains_most_in"], case["gain_min"], case["gain_max"]) == ("b", -0.2, 0.5)


def test_parts_of_little_worth_are_counted_but_for_those_kept_for_another_reason() -> None:
    def case(name: str, gains: Mapping[str, Sequence[float]], kept_for: str = "") -> dict[str, object]:
        return case_of(NOTHING, gains) | {"case": name, "kept_for": kept_for}

    found = figures_of(
        [
            case(NOTHING, {"a": [0.0]}),
            case("in one setting", {"a": [0.0], "b": [0.0], "c": [0.03]}),
            case("in the median", {"a": [0.006]}),
            case("little", {"a": [0.001], "b": [0.002], "c": [0.015]}),
            case("kept", {"a": [0.0]}, "it is an invariant"),
        ]
    )
    assert found["num_parts_of_little_worth"] == 1
    assert found["gain_most_little"] == pytest.approx(0.015)
