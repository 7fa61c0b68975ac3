"""The editors' schema refuses the configs that the command refuses, and explains each key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.__main__ import main
from tests.unit.json_schema import complaints
from tidegate.config.base import ITEM, fields_of
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tools import schema

ROOT = Path(__file__).resolve().parents[3]
SCHEMA: dict[str, Any] = json.loads(schema.SCHEMA.read_text())
SCENARIOS = ROOT / "examples" / "scenarios"
"""Scenarios of the simulator, which follow another schema."""
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if not path.is_relative_to(SCENARIOS)]
CONFIGS = [ROOT / "tidegate" / "demo.yaml", *EXAMPLES]


def part(path: tuple[str, ...]) -> dict[str, Any]:
    """The schema of a key."""
    found = SCHEMA
    for name in path:
        options = [found, *found.get("anyOf", ())]
        section = next(each for each in options if ("items" if name == ITEM else "properties") in each)
        found = section["items"] if name == ITEM else section["properties"][name]
    return found


def test_the_committed_schema_is_the_one_that_the_code_and_the_page_generate() -> None:
    assert schema.SCHEMA.read_text() == schema.text(), "make schema writes it anew"


def test_every_key_has_a_description_in_the_schema() -> None:
    for path, _ in fields_of(JobConfig):
        assert part(path)["description"] == schema.meanings()[path], path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_config_that_comes_with_tidegate_names_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text()
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named is not None
    assert (path.parent / named.group(1)).resolve() == schema.SCHEMA
    assert list(complaints(yaml.safe_load(text), SCHEMA)) == []


def test_a_resolved_config_fits_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(ROOT / "examples" / "own_data" / "job.yaml"), "--dry-run"]) == 0
    assert list(complaints(yaml.safe_load(capsys.readouterr().out), SCHEMA)) == []


WRONG: dict[str, tuple[str, str]] = {
    "a key that is not known": ("algorithm: {group_sise: 2}", "algorithm.group_sise: additionalProperties"),
    "a key of another section": ("actor: {group_size: 2}", "actor.group_size: additionalProperties"),
    "a word that is no choice": ("algorithm: {minibatch_order: sorted}", "algorithm.minibatch_order: enum"),
    "a number below its range": ("algorithm: {group_size: 0}", "algorithm.group_size: minimum"),
    "a number at a bound that is outside": ("algorithm: {top_p: 0}", "algorithm.top_p: exclusiveMinimum"),
    "a number above its range": ("algorithm: {top_p: 1.5}", "algorithm.top_p: maximum"),
    "a text for a number": ("cluster: {nodes: {n0: many}}", "cluster.nodes.n0: type"),
    "a value for a section": ("model: small", "model: type"),
    "one reward for a list": ("rewards: {name: exact_match}", "rewards: type"),
    "a reward that there is not": ("rewards: [{name: exact}]", "rewards.0.name: enum"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_the_schema_refuses_is_refused_by_the_command(case: str) -> None:
    text, want = WRONG[case]
    raw = yaml.safe_load((ROOT / "tidegate" / "demo.yaml").read_text())
    for section, changes in yaml.safe_load(text).items():
        is_section = isinstance(changes, dict) and isinstance(raw.get(section), dict)
        raw[section] = raw[section] | changes if is_section else changes
    assert list(complaints(raw, SCHEMA)) == [want]
    with pytest.raises(ConfigError):
        parse_config(raw)


@pytest.mark.parametrize("path", [("job",), ("actor", "learning_rate"), ("cluster", "component_placement", "actor")])
def test_a_key_without_a_default_is_required_by_the_schema(path: tuple[str, ...]) -> None:
    raw = yaml.safe_load((ROOT / "tidegate" / "demo.yaml").read_text())
    section = raw
    for name in path[:-1]:
        section = section[name]
    del section[path[-1]]
    assert list(complaints(raw, SCHEMA)) == [f"{'.'.join(path[:-1]) or 'config'}: required {path[-1]}"]


def test_a_job_without_task_and_data_is_refused_by_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    raw = yaml.safe_load((ROOT / "tidegate" / "demo.yaml").read_text())
    del raw["task"]
    assert list(complaints(raw, SCHEMA)) == ["config: anyOf"]


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
