"""The answers of a plan for people: the figures of the JSON value, and words for what is not known."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cli.simulation import plan_answers
from cli.simulation.plan_answers import Physics
from simulator.planning.ahead import Ahead
from simulator.planning.gains import Gains
from simulator.planning.needs import Need
from simulator.planning.plan import JobPlan, plan_of
from tests.unit.simulator.plans import basis, job

NEEDS = [Need("snapshots", "host of a node", 2.5e9, "2 versions")]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> JobPlan:
    config, steps = job(tmp_path_factory.mktemp("plan")), list[str]()
    answers = plan_of(config, basis(config), staleness=1, told=steps.append)
    assert len(steps) == 4
    return answers


def test_the_table_and_the_json_value_have_the_same_figures(answers: JobPlan, tmp_path: Path) -> None:
    value = plan_answers.as_json(answers, NEEDS, Physics(basis(job(tmp_path)), None), spare=0)
    split, gain, ahead, needs = plan_answers.sections(answers, NEEDS, spare=0)
    keys = yaml.safe_load(split.partition("\n")[2])
    assert keys == value["best_split"]["keys"]
    low, high = value["gain"]["low"], value["gain"]["high"]
    assert f"{value['gain']['median']:.2f} times as fast in the median, {low:.2f} to {high:.2f}" in gain
    for row in value["gain"]["cases"]:
        (line,) = [line for line in gain.splitlines() if line.startswith(row["case"] + " ")]
        assert float(line.split()[-1]) == pytest.approx(row["gain"], abs=0.001)
    for way in value["asynchrony"]["ways"]:
        (line,) = [line for line in ahead.splitlines() if line.startswith(way["way"] + " ")]
        assert "/".join(map(str, way["gpus"])) in line
    assert "2.5" in needs.splitlines()[2].split()


def test_what_is_not_known_has_its_reason(answers: JobPlan) -> None:
    unknown = JobPlan(answers.found, answers.split, answers.best, Gains(refused="no dp"), Ahead(2, refused="no shards"))
    _, gain, ahead, _ = plan_answers.sections(unknown, [], spare=3)
    assert gain.endswith("not known, no dp")
    assert ahead.endswith("not compared, no shards")


def test_the_source_of_the_times_is_named(tmp_path: Path) -> None:
    assert [*Physics(basis(job(tmp_path)), None).lines()] == ["Times: assumptions.costs of the config."]
