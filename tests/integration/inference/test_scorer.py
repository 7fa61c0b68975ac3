"""The scorer and the actor agree: to the bit in the same layout, and within 1e-4 across layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests import effort
from tests.integration.inference.scoring import groups
from tests.ranks import RankServer, Results
from tidegate.types import Layout

SCORING = "tests.integration.inference.scoring"
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "pp2 vpp2 with experts": {"pp": 2, "vpp": 2},
    "ep2 cp2 with experts": {"ep": 2, "cp": 2},
    "tp2 in bf16": {"tp": 2},
}
TOLERANCE = 1e-4
"""The tolerance in fp32 across layouts, in which sums have another order."""

QUICK = ("one rank", "tp2", "ep2 cp2 with experts", "tp2 in bf16")
by_layout = pytest.mark.parametrize("layout", effort.cases(LAYOUTS, always=QUICK))

Published = Callable[[str], tuple[Path, Results]]


@pytest.fixture(scope="module")
def published(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A layout's published snapshots, and the results of its actor and of a scorer beside it. Each run is made once."""

    @cache
    def run(name: str) -> tuple[Path, Results]:
        layout = LAYOUTS[name]
        folder = tmp_path_factory.mktemp("snapshots")
        precision = "bf16" if name.endswith("bf16") else "fp32"
        experts = name.endswith("experts")
        arguments = {"layout": layout, "folder": str(folder), "precision": precision, "experts": experts}
        got = ranks.run(f"{SCORING}:beside_the_actor", Layout(**layout).num_ranks, arguments)
        return folder, merged(got)

    return run


def merged(ranks_got: list[Results]) -> Results:
    """The results of all ranks. Ranks with the same values must agree to the bit."""
    whole: Results = {}
    for results in ranks_got:
        for key, values in results.items():
            assert key not in whole or np.array_equal(whole[key], values), f"{key} differs between ranks"
            whole[key] = values
    return whole


def of(results: Results, what: str) -> Results:
    """One kind of log-probabilities, by group and sample."""
    found = {key.removeprefix(f"{what}/"): values for key, values in results.items() if key.startswith(f"{what}/")}
    want = {f"{number}/{sample}": len(seq) for number, group in enumerate(groups()) for sample, seq in enumerate(group)}
    assert {key: len(values) for key, values in found.items()} == want
    return found


def same_bits(one: Results, other: Results) -> bool:
    return all(one[key].tobytes() == other[key].tobytes() for key in one)


def distance(one: Results, other: Results) -> float:
    return max(float(np.abs(one[key] - other[key]).max()) for key in one)


@by_layout
def test_in_the_actors_layout_and_padding_log_probabilities_are_the_actors_to_the_bit(
    published: Published, layout: str
) -> None:
    _, results = published(layout)
    assert same_bits(of(results, "alone"), of(results, "actor-1"))
    assert same_bits(of(results, "reference"), of(results, "actor-0"))


@by_layout
def test_a_samples_bits_do_not_depend_on_the_groups_beside_its_own(published: Published, layout: str) -> None:
    _, results = published(layout)
    assert same_bits(of(results, "alone"), of(results, "together"))
    assert same_bits(of(results, "alone"), of(results, "reversed"))


@pytest.mark.parametrize("layout", effort.cases([name for name in LAYOUTS if not name.endswith("bf16")], always=QUICK))
def test_a_response_scored_apart_from_its_group_differs_by_rounding_alone(published: Published, layout: str) -> None:
    _, results = published(layout)
    assert distance(of(results, "apart"), of(results, "alone")) <= 1e-5


@by_layout
def test_the_reference_is_kept_apart_from_the_policy(published: Published, layout: str) -> None:
    _, results = published(layout)
    assert distance(of(results, "reference"), of(results, "together")) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("writer", "reader"),
    effort.cases(
        [("one rank", "tp2"), ("one rank", "pp2"), ("one rank", "dp2"), ("tp2", "one rank"), ("pp2", "tp2")],
        always=[("one rank", "pp2"), ("tp2", "one rank")],
    ),
)
def test_a_snapshot_of_another_layout_gives_the_same_log_probabilities(
    ranks: RankServer, published: Published, writer: str, reader: str
) -> None:
    folder, want = published(writer)
    layout = LAYOUTS[reader]
    arguments = {"layout": layout, "folder": str(folder)}
    got = merged(ranks.run(f"{SCORING}:from_snapshot", Layout(**layout).num_ranks, arguments))
    assert distance(of(got, "policy"), of(want, "actor-1")) <= TOLERANCE
    assert distance(of(got, "policy-again"), of(want, "actor-0")) <= TOLERANCE
    assert same_bits(of(got, "reference"), of(got, "policy-again")), "a policy that loads leaves the reference alone"
    assert str(got["refusal"]) == "the inference has no policy weights; load a version first"
    assert (bool(got["had_reference"]), int(got["version"])) == (False, 3)
