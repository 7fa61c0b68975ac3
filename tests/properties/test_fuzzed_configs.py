"""Whatever text comes as a config, an override or a scenario: a config that reads back as itself, or a ConfigError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from services.scheduler.shell.codecs.state_codec import job_spec
from simulator.scenario import ScenarioError, load_scenario, parse_scenario
from tests.properties.fuzzing import TEXTS, damaged_bytes, damaged_json, damaged_values, fuzzed, value_or_refusal
from tidegate.config.files import Sources, load_sources
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.config.reading.layers import EMPTY_LAYER, Layer, Origin, parse_override, paths_in
from tidegate.config.reading.yaml_text import AmbiguousYaml, read_yaml
from tidegate.rlinf.references import without_references

PIPELINED = Path(__file__).parents[1] / "unit" / "rlinf" / "pipelined.yaml"
EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = (*sorted(EXAMPLES.glob("*.yaml")), EXAMPLES / "own_data" / "job.yaml", PIPELINED)
CONFIGS = tuple(path.read_bytes() for path in FILES)
SCENARIOS = tuple(path.read_bytes() for path in sorted((EXAMPLES / "scenarios").glob("*.yaml")))
RAW_CONFIGS = tuple(map(yaml.safe_load, CONFIGS))
RAW_SCENARIOS = tuple(map(yaml.safe_load, SCENARIOS))

TAGS = (
    "int",
    "float",
    "bool",
    "null",
    "timestamp",
    "binary",
    "str",
    "set",
    "omap",
    "pairs",
    "seq",
    "map",
    "merge",
    "x",
)
SCALARS = st.sampled_from(
    [
        "2020-99-99",
        "0x_",
        "0b_",
        "1" + ":00" * 200 + ".0",
        "1" * 5000,
        "",
        "''",
        "~",
        "=",
        "<<",
        "*a",
        "&a",
        ".inf",
        "+",
    ]
) | st.text("0123456789-:_.xXbeE+tT~", max_size=12)


@st.composite
def yaml_texts(draw: st.DrawFn) -> str:
    """A small YAML text with tags, aliases, merges and scalars that look like numbers or dates."""
    lines = []
    for number in range(draw(st.integers(1, 5))):
        tag = draw(st.sampled_from(["", *(f"!!{tag} " for tag in TAGS)]))
        scalar = draw(SCALARS | TEXTS)
        form = draw(st.sampled_from(["k{n}: {t}{s}", "k{n}: &k{n} {t}[{s}, *k0]", "k{n}: {t}{{{s}: 1}}", "- {t}{s}"]))
        lines.append(form.format(n=number, t=tag, s=scalar))
    return "\n".join(lines)


ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])


@fuzzed
@given(yaml_texts())
@example("a: 2020-99-99")
@example("a: !!bool x")
@example('a: "\\ud83d\\ude00"')
@example('a: "\\ud83d"')
@example("a: !!int ''")
@example("a: !!timestamp x")
@example("a: 1" + ":00" * 200 + ".0")
@example("[" * 10_000)
@example(ALIASES)
def test_any_yaml_reads_or_is_refused(text: str) -> None:
    document = value_or_refusal(read_yaml, text, AmbiguousYaml, yaml.YAMLError)
    if document is not None:
        assert all(line <= 1 + len(text.splitlines()) for line in document.lines.values())


@fuzzed
@given(st.text("abc._-=[]{}&*!:,'\"0123456789 \n", max_size=20) | TEXTS)
@example("a=!!bool x")
@example("a=2020-99-99")
def test_any_override_is_a_key_and_a_value_or_is_refused(text: str) -> None:
    override = value_or_refusal(parse_override, text, ValueError)
    if override is not None:
        assert text.startswith(".".join(override.path) + "=")


def file_of(tmp_path: Path, content: bytes, name: str = "job.yaml") -> Path:
    (path := tmp_path / name).write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"cluster": True}, "cluster=True holds no keys: remove one"),
        ({"model": "\ud800"}, "is no str"),
    ],
)
def test_a_config_of_rlinfs_with_a_wrong_value_is_refused(tmp_path: Path, change: dict[str, Any], want: str) -> None:
    raw = yaml.safe_load(PIPELINED.read_bytes())
    with pytest.raises(ConfigError) as refused:
        load_sources(Sources([file_of(tmp_path, written(raw | change))]))
    assert want in str(refused.value)


def test_a_node_without_its_number_of_gpus_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.nodes\.n0=None: "):
        parse_config(RAW_CONFIGS[0] | {"cluster": {"nodes": {"n0": None}}})


def assert_same_again(config: JobConfig) -> None:
    """Every process reads the config from its JSON, and the scheduler makes its part of the job of it."""
    assert JobConfig.from_json(config.to_json()) == config
    assert job_spec(config)


def written(value: Any) -> bytes:
    return json.dumps(value).encode()


@fuzzed
@given(content=damaged_bytes(CONFIGS) | damaged_values(RAW_CONFIGS).map(written))
def test_a_config_file_of_any_bytes_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = file_of(tmp_path, content)
    sourced = value_or_refusal(load_sources, Sources([path]), ConfigError)
    if sourced is not None:
        assert_same_again(sourced.config)


@fuzzed
@given(damaged_json(RAW_CONFIGS).map(lambda content: content.decode(errors="replace")))
@example('{"job": ' + "1" * 5000 + "}")
@example('{"job":' * 10_000)
def test_a_config_in_an_event_is_read_or_refused(text: str) -> None:
    config = value_or_refusal(JobConfig.from_json, text, ConfigError)
    if config is not None:
        assert_same_again(config)


@fuzzed
@given(damaged_values(RAW_CONFIGS))
def test_any_values_are_a_config_or_are_refused(values: Any) -> None:
    config = value_or_refusal(parse_config, values, ConfigError)
    if config is not None:
        assert_same_again(config)


@fuzzed
@given(content=damaged_bytes(SCENARIOS) | damaged_values(RAW_SCENARIOS).map(written))
def test_a_scenario_of_any_bytes_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    value_or_refusal(load_scenario, file_of(tmp_path, content, "scenario.yaml"), ScenarioError)


@fuzzed
@given(damaged_values(RAW_SCENARIOS))
def test_any_values_are_a_scenario_or_are_refused(values: Any) -> None:
    value_or_refusal(parse_scenario, values, ScenarioError)


REFERENCES = st.recursive(
    st.sampled_from(["${b}", "${.c}", "${..a}", "${}", "${a.b", "${x:1}", "1", "x", "${multiply:3,4}", "${not:true}"]),
    lambda inner: (
        st.builds("${{{}:{},{}}}".format, st.sampled_from(["multiply", "int_div", "subtract"]), inner, inner)
        | st.builds("{}{}".format, inner, inner)
        | st.builds("${{{}}}".format, inner)
    ),
    max_leaves=6,
)


def layer_of(values: dict[str, Any]) -> Layer:
    return Layer(values, dict.fromkeys(paths_in(values, ()), Origin("r.yaml:7", Path(), 0)))


@fuzzed
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), REFERENCES | st.lists(REFERENCES, max_size=2), max_size=3))
@example({"a": "${multiply:[,1}"})
def test_references_have_values_or_are_refused(values: dict[str, Any]) -> None:
    assert value_or_refusal(without_references, layer_of(values), ValueError) is not EMPTY_LAYER


def chain(link: Callable[[int], Any], last: Any) -> dict[str, Any]:
    return {f"k{number}": link(number + 1) for number in range(60)} | {"k60": last}


BOMBS: dict[str, dict[str, Any]] = {
    "a text of references that doubles": chain(lambda n: f"${{k{n}}}${{k{n}}}", "x"),
    "a list of references that doubles": chain(lambda n: [f"${{k{n}}}", f"${{k{n}}}"], "x"),
    "a number that is squared": chain(lambda n: f"${{multiply:${{k{n}}},${{k{n}}}}}", 7),
    "a text times a number": {"a": "${multiply:x,1000000000000}"},
    "a list times a number": {"a": "${multiply:[1],1000000000000}"},
    "a chain that is too long": {f"k{n}": f"${{k{n + 1}}}" for n in range(2000)},
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_references_cannot_be_blown_up(bomb: str) -> None:
    with pytest.raises(ValueError, match=r"values|text|bits|numbers|recursion"):
        without_references(layer_of(BOMBS[bomb]))
