"""Predictions for a person: relative to static as configured, and why a policy is slower."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.simulation.plan_report import advice, against, rows, slower_rows
from simulator.planning.predictions import Prediction
from simulator.planning.starts import AS_CONFIGURED, Start
from tests.unit.cli.configs import small_config
from tests.unit.simulator.runs import run


def predicted(tmp_path: Path, **seconds: float) -> list[Prediction]:
    """Predictions by policy, all from the placement as configured."""
    start = Start(AS_CONFIGURED, small_config(tmp_path))
    return [Prediction(start, policy, run(policy, end_s=end_s)) for policy, end_s in seconds.items()]


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (10.0, "the same"),
        (10.0049, "the same"),
        (9.9951, "the same"),
        (5.96, "40.4 % saved"),
        (12.28, "22.8 % slower"),
        (19.9, "99.0 % slower"),
        (40.0, "4.0 times as long"),
        (12345.0, "1,234.5 times as long"),
    ],
)
def test_times_are_relative_to_static_and_without_a_sign(seconds: float, want: str) -> None:
    assert against(seconds, 10.0) == want


def test_every_row_that_can_run_is_relative_to_the_first(tmp_path: Path) -> None:
    found = predicted(tmp_path, static=10.0, tide=8.0)
    found.append(Prediction(found[0].start, "rlinf", None, "dp=3 does not divide 4"))
    assert [row["against_static"] for row in rows(found)] == ["the same", "20.0 % saved", None]


def test_a_slower_policy_shows_what_its_gpus_do(tmp_path: Path) -> None:
    """`run` makes two GPUs that work, switch for a sixth and work, one that waits, and one that infers for 1 s."""
    static, slow = slower_rows(predicted(tmp_path, static=10.0, tide=8.0, dynarl=36.0))
    assert (static["policy"], slow["policy"]) == ("static", "dynarl")
    want = {"seconds": 36.0, "moves": 1, "working_s": 15.25, "switching_s": 3.0, "idle_s": 17.75}
    assert {key: slow[key] for key in want} == want
    assert slow["working_s"] + slow["switching_s"] + slow["idle_s"] == slow["seconds"]


def test_policies_that_are_as_fast_have_no_row_of_slower_ones(tmp_path: Path) -> None:
    assert slower_rows(predicted(tmp_path, static=10.0, tide=10.4, dynarl=9.0)) == []


def test_where_no_policy_gains_one_line_says_what_to_start_from(tmp_path: Path) -> None:
    (line,) = advice(predicted(tmp_path, static=10.0, tide=20.0))
    assert line == "start from the placement as configured under static: 10 s an iteration, as it is"
    moving, still = advice(predicted(tmp_path, static=10.0, tide=5.0))
    assert moving.endswith("under tide: 5 s an iteration, 50.0 % saved against static as configured, 10 s")
    assert still.startswith("without moves, start from ")
