"""For any config: each key has its origin after layers are merged, and the printed config reads as the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.config_text import yaml_with_origins
from tidegate.config.job_config import parse_config
from tidegate.config.reading.layers import EMPTY_LAYER, Layer, Origin, merge_layers, paths_in

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
KEYS = st.sampled_from(["a", "b", "whole"])
SECTIONS = st.recursive(
    st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
WHOLE = {("whole",), ("a", "whole")}


def layer(number: int, values: dict[str, Any]) -> Layer:
    origin = Origin(f"{number}.yaml", Path(), number)
    return Layer(values, dict.fromkeys(paths_in(values, ()), origin))


@given(st.lists(st.dictionaries(KEYS, SECTIONS, max_size=3), min_size=2, max_size=2))
def test_every_key_has_the_origin_of_the_last_layer_that_sets_it(layers: list[dict[str, Any]]) -> None:
    low, high = (layer(number, values) for number, values in enumerate(layers))
    both = merge_layers(low, high, whole=WHOLE)
    assert set(both.origins) == set(paths_in(both.values, ()))
    for path, origin in both.origins.items():
        assert origin.layer == int(path in high.origins)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=3))
def test_a_printed_config_reads_as_the_same_config(kwargs: dict[str, Any]) -> None:
    raw = {
        "job": "printed",
        "cluster": {"nodes": {"n0": 3}, "component_placement": {"actor": 0, "rollout": 1, "inference": 2}},
        "model": dict.fromkeys(("num_layers", "ffn_hidden_size", "num_heads", "num_kv_heads"), 2)
        | {"hidden_size": 16, "head_dim": 8, "max_seq_len": 64, "tokenizer": "words.json"},
        "data": {"train": "train.jsonl", "answer_key": "answer", "chat_template_kwargs": kwargs},
        "rewards": [{"name": "exact_match"}],
        "algorithm": {"iterations": 1, "prompts_per_iteration": 1, "group_size": 2, "max_new_tokens": 8},
        "actor": {"learning_rate": 1e-6},
    }
    config = parse_config(raw)
    printed = yaml_with_origins(config, layer(0, raw))
    assert parse_config(yaml.safe_load(printed)) == config
    assert yaml_with_origins(config, EMPTY_LAYER).count("# ") <= 1 + str(kwargs).count("# ")
