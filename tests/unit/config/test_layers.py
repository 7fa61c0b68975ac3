"""Files and overrides make one config, and a fault names the file or the override of its value."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.configs import small
from tests.unit.config.config_files import written
from tidegate.config.files import SourcedConfig, Sources, load_sources
from tidegate.config.job_config import ConfigError
from tidegate.config.reading.layers import Layer, Origin, apply_override, is_override, merge_layers, parse_override
from tidegate.types import Role


def loaded(tmp_path: Path, *overrides: str, over: dict[str, Any] | str | None = None, **changes: Any) -> SourcedConfig:
    """Load the small config, `over` above it, and the overrides."""
    files = [written(tmp_path, "small.yaml", small(tmp_path, **changes))]
    if over is not None:
        files.append(written(tmp_path, "over.yaml", over))
    return load_sources(Sources(files, overrides, folder=tmp_path / "here"))


def test_a_later_layer_takes_precedence_and_sections_are_merged_key_by_key(tmp_path: Path) -> None:
    over = {"algorithm": {"iterations": 5, "group_size": 6}, "seed": 1}
    config = loaded(tmp_path, "algorithm.group_size=8", "seed=2", "seed=3", over=over).config
    algorithm = config.algorithm
    assert (algorithm.iterations, algorithm.group_size, algorithm.prompts_per_iteration) == (5, 8, 2)
    assert config.seed == 3


def test_lists_and_mappings_of_names_are_replaced_whole(tmp_path: Path) -> None:
    over = {"cluster": {"nodes": {"big": 4}}}
    assert loaded(tmp_path, over=over).config.cluster.nodes == {"big": 4}
    assert loaded(tmp_path, "cluster.nodes={a: 2, b: 2}").config.cluster.nodes == {"a": 2, "b": 2}
    assert loaded(tmp_path, "cluster.nodes.more=1").config.cluster.nodes == {"n0": 3, "more": 1}


def test_null_in_a_later_layer_removes_a_section(tmp_path: Path) -> None:
    data = {"train": str(tmp_path / "train.jsonl"), "answer_key": "answer"}
    over = {"task": None, "data": data, "rewards": [{"name": "exact_match"}], "model": {"tokenizer": "words.json"}}
    config = loaded(tmp_path, "rewards.0.weight=2", over=over).config
    assert config.task is None
    assert config.rewards[0].weight == 2


VALUES = {
    "a number": ("algorithm.clip_high=0.28", "algorithm.clip_high", 0.28),
    "a number with an exponent and no point": ("actor.learning_rate=1e-6", "actor.learning_rate", 1e-6),
    "a word": ("algorithm.minibatch_order=arrival", "algorithm.minibatch_order", "arrival"),
    "a truth": ("algorithm.mask_truncated=true", "algorithm.mask_truncated", True),
    "none": ("algorithm.importance_cap=null", "algorithm.importance_cap", None),
    "an empty text": ("model.tokenizer=''", "model.tokenizer", ""),
    "one GPU": ("cluster.component_placement.inference=2", "cluster.component_placement.inference", "2"),
    "a range of GPUs": ("cluster.component_placement.inference=2-2", "cluster.component_placement.inference", "2-2"),
    "an equals sign": ("servers.nats_url=nats://h:1?a=b", "servers.nats_url", "nats://h:1?a=b"),
    "a section": ("actor.warm_up={steps: 3, batch_size: 4}", "actor.warm_up.batch_size", 4),
}


@pytest.mark.parametrize("case", VALUES)
def test_the_value_of_an_override_is_read_as_yaml(case: str, tmp_path: Path) -> None:
    text, key, want = VALUES[case]
    value: Any = loaded(tmp_path, text).config
    for part in key.split("."):
        value = getattr(value, part)
    assert value == want


@pytest.mark.parametrize(
    ("word", "want"),
    [
        ("a.yaml", False),
        ("seed=1", True),
        ("a=b/c", True),
        ("runs/lr=1.yaml", False),
        ("./x=1.yaml", False),
        ("=1", True),
    ],
)
def test_a_word_with_an_equals_sign_before_any_slash_is_an_override(word: str, want: bool) -> None:
    assert is_override(word) == want


MALFORMED = {
    "no key": ("=8", "override '=8': '' is no key; write section.key=value, such as algorithm.group_size=8"),
    "a key with a hole": ("algorithm..group_size=8", "'algorithm..group_size' is no key"),
    "a sign before the key": ("+seed=1", "'+seed' is no key"),
    "no value": ("seed=", "override 'seed=' has no value: write seed=null for none, seed=\"''\" for an empty text"),
    "a value that is no YAML": (
        "cluster.nodes={a: 1",
        "override 'cluster.nodes={a: 1': the value is not YAML (line 1, column 6: expected ',' or '}'",
    ),
    "a key twice": ("cluster.nodes={a: 1, a: 2}", "key 'a' occurs twice"),
    "lists without end": (f"seed={'[' * 5000}", "sections and lists are nested too deep to be read"),
    "a key below a value": ("seed.low=1", "override 'seed.low=1': seed is 0, which holds no key 'low'"),
    "no place of a list": (
        "rewards.first.weight=1",
        "rewards has the items 0 to 0; to set the whole list write rewards=[..",
    ),
    "a place that is not there": ("rewards.1.weight=1", "rewards has the items 0 to 0"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_override_is_refused_with_the_correct_form(case: str, tmp_path: Path) -> None:
    text, want = MALFORMED[case]
    with pytest.raises(ConfigError, match=re.escape(want)):
        loaded(tmp_path, text, over={"rewards": [{"name": "exact_match"}], "seed": 0})


ORIGINS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "a wrong value in the upper file": ((), "algorithm:\n  group_size: -1\n", r"group_size=-1: .* \[over.yaml:2\]$"),
    "an unknown key in the upper file": (
        (),
        "algorithm:\n  iterations: 2\n  group_sise: 3\n",
        r"unknown key 'algorithm.group_sise'; the nearest known key is 'group_size' .* \[over.yaml:3\]$",
    ),
    "an unknown key in an override": (
        ("algorithm.group_sise=3",),
        "seed: 1\n",
        r"unknown key 'algorithm.group_sise'; the nearest .* \[override algorithm.group_sise\]$",
    ),
    "a wrong value in the lower file": ((), "seed: 1\n", r"actor.clip_grad=0: .* \[small.yaml:\d+\]$"),
    "a wrong value in an override of a section": (
        ("actor.warm_up={steps: -3}", "actor.clip_grad=1"),
        "seed: 1\n",
        r"actor.warm_up.steps=-3: .* \[override actor.warm_up\]$",
    ),
    "two keys that do not fit, from two places": (
        ("algorithm.n_minibatches=5", "actor.clip_grad=1"),
        "algorithm:\n  prompts_per_iteration: 4\n",
        r"n_minibatches=5 does not divide .* \[algorithm.n_minibatches: override algorithm.n_minibatches, "
        r"algorithm.prompts_per_iteration: over.yaml:2\]$",
    ),
    "a key that stands alone": (
        ("job=My", "actor.clip_grad=1"),
        "seed: 1\n",
        r"job name 'My' must .* \[override job\]$",
    ),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_a_fault_names_the_file_and_line_or_the_override_of_its_values(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, over, want = ORIGINS[case]
    monkeypatch.chdir(tmp_path)
    actor = {"learning_rate": 1e-3, "clip_grad": 0}
    files = [written(Path(), "small.yaml", small(tmp_path, actor=actor)), written(Path(), "over.yaml", over)]
    with pytest.raises(ConfigError, match=re.compile(want, re.MULTILINE)):
        load_sources(Sources(files, overrides))


def test_a_missing_key_names_the_section_that_lacks_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"key 'actor.learning_rate' is missing: it has no default \[.*over.yaml:1\]$"
    ):
        loaded(tmp_path, over="actor:\n  clip_grad: 2\n", actor=None)


def test_the_origin_of_an_override_does_not_show_its_password(tmp_path: Path) -> None:
    layer = loaded(tmp_path, "servers.redis_url=redis://me:hunter2@host").layer
    assert "hunter2" not in " ".join(origin.place for origin in layer.origins.values())


def test_merging_changes_no_layer() -> None:
    def origin(number: int) -> Origin:
        return Origin(f"{number}.yaml", Path(), number)

    low = Layer({"actor": {"clip_grad": 1, "layout": {"dp": 2}}}, {("actor", "clip_grad"): origin(0)})
    high = Layer({"actor": {"layout": {"dp": 4}}}, {("actor", "layout", "dp"): origin(1)})
    before = copy.deepcopy((low, high))
    merged = apply_override(merge_layers(low, high, whole=()), parse_override("actor.clip_grad=3"), origin(2), whole=())
    assert merged.values == {"actor": {"clip_grad": 3, "layout": {"dp": 4}}}
    assert (low, high) == before


def test_a_relative_path_counts_from_the_folder_of_the_layer_that_sets_it(tmp_path: Path) -> None:
    data = {"train": "train.jsonl", "answer_key": "answer", "chat_template": "tokenizer"}
    rewards = [{"name": "function", "path": "grading:one"}]
    below = small(tmp_path, task=None, data=data, rewards=rewards)
    below["model"]["tokenizer"] = "words.json"
    above = {"data": {"chat_template": "chat.jinja"}}
    files = [written(tmp_path, "a/small.yaml", below), written(tmp_path, "b/over.yaml", above)]
    overrides = ["data.train=mine.jsonl"]
    config = load_sources(Sources(files, overrides, folder=tmp_path / "here")).config
    assert config.data is not None
    assert config.model.tokenizer == str(tmp_path / "a" / "words.json")
    assert config.data.chat_template == str(tmp_path / "b" / "chat.jinja")
    assert config.data.train == str(tmp_path / "here" / "mine.jsonl")
    assert config.rewards[0].import_from == str(tmp_path / "a")
    lower = load_sources(Sources(files[:1])).config
    assert lower.data is not None
    assert lower.data.chat_template == "tokenizer", "a word, not a path"


def test_a_placement_may_be_a_number_in_every_layer(tmp_path: Path) -> None:
    config = loaded(tmp_path, "actor.standby=3", "cluster.nodes.n0=4").config
    assert config.standby() == ("n0/3",)
    assert config.placement(Role.ACTOR) == ("n0/0",)


def test_an_anchor_that_contains_itself_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "cyclic.yaml", "data: &a\n  chat_template_kwargs: *a\n")
    with pytest.raises(ConfigError, match=r"cyclic.yaml: the value that begins in line \d contains an alias of itself"):
        load_sources(Sources([path]))
