"""A checkpoint's logits equal transformers' own, on one rank and in other layouts, and its weights are
exported unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.hugging_face import CONFIGS, save
from tests.integration.megatron.actor_trainer_ranks import state_files
from tests.integration.megatron.hugging_face_ranks import PADDED_VOCAB
from tests.ranks import RankServer, Results
from tidegate.huggingface.checkpoint import SINGLE_FILE, open_checkpoint
from tidegate.huggingface.export import export
from tidegate.megatron.family import model_parameters

TOLERANCE = 1e-4
NUM_RANKS = 4
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
}
EVERYDAY = ("one rank", "tp2 pp2")
"""In every run of the tests. The other layouts are long."""
EXPERT_LAYOUTS: dict[str, dict[str, int]] = LAYOUTS | {"ep2 dp2": {"ep": 2, "dp": 2}}
TOKENS = [[(7 * i + 3 * j) % 61 for i in range(64)] for j in range(2)]


def layouts_of(name: str) -> dict[str, dict[str, int]]:
    return EXPERT_LAYOUTS if "MoE" in name else LAYOUTS


CASES = [(name, layout) for name in CONFIGS for layout in layouts_of(name)]
Saved = dict[str, tuple[Path, npt.NDArray[Any]]]
"""By family: a checkpoint, and transformers' logits of it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    found = {}
    for name in CONFIGS:
        folder = tmp_path_factory.mktemp("checkpoint")
        model = save(folder, name)
        with torch.inference_mode():
            found[name] = (folder, model(torch.tensor(TOKENS)).logits.numpy())
    return found


@pytest.fixture(scope="module")
def everyday(ranks: RankServer, folders: Saved) -> list[Results]:
    return _run(ranks, folders, [case for case in CASES if case[1] in EVERYDAY])


@pytest.fixture(scope="module")
def rest(ranks: RankServer, folders: Saved) -> list[Results]:
    return _run(ranks, folders, [case for case in CASES if case[1] not in EVERYDAY])


@pytest.fixture
def results(request: pytest.FixtureRequest, layout: str) -> list[Results]:
    found: list[Results] = request.getfixturevalue("everyday" if layout in EVERYDAY else "rest")
    return found


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*case, marks=() if case[1] in EVERYDAY else pytest.mark.long) for case in CASES]
)
def test_logits_are_those_of_transformers(results: list[Results], folders: Saved, name: str, layout: str) -> None:
    want = folders[name][1]
    tp = layouts_of(name)[layout].get("tp", 1)
    parts = [rank[f"{name}, {layout}"] for rank in results if f"{name}, {layout}" in rank]
    for first in range(0, len(parts), tp):
        got = np.concatenate(parts[first : first + tp], axis=-1)[..., : want.shape[-1]]
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen2.5", {"tp": 2, "pp": 2}),
        pytest.param("Llama 3.2", {"dp": 2, "pp": 2}, marks=pytest.mark.long),
        pytest.param("Qwen3 MoE", {"tp": 2, "dp": 2}, marks=pytest.mark.long),
    ],
)
def test_a_trainer_s_untrained_state_is_exported_bit_for_bit(
    ranks: RankServer, tmp_path: Path, name: str, layout: dict[str, int]
) -> None:
    source = tmp_path / "source"
    save(source, name, dtype=torch.bfloat16)
    arguments = {"checkpoint": str(source), "layout": layout, "folder": str(tmp_path)}
    results = ranks.run("tests.integration.megatron.hugging_face_ranks:saved", NUM_RANKS, arguments)
    assert all(rank["committed"] for rank in results)
    checkpoint = open_checkpoint(source)
    parameters = model_parameters(checkpoint.model, padded_vocab=PADDED_VOCAB)
    for state in ("untrained", "trained"):
        weights = state_files(tmp_path / state).read_whole(parameters)
        export(tmp_path / f"{state} out", checkpoint.model, parameters, weights, source=checkpoint)
    want, untrained, trained = (
        (tmp_path / folder / SINGLE_FILE).read_bytes() for folder in ("source", "untrained out", "trained out")
    )
    assert untrained == want
    assert trained != want
    assert len(trained) == len(want)


def _run(ranks: RankServer, folders: Saved, cases: list[tuple[str, str]]) -> list[Results]:
    cases_by_name = {
        f"{name}, {layout}": {"folder": str(folders[name][0]), "layout": layouts_of(name)[layout], "tokens": TOKENS}
        for name, layout in cases
    }
    target = "tests.integration.megatron.hugging_face_ranks:logits"
    return ranks.run(target, NUM_RANKS, {"cases": cases_by_name}, timeout_s=120.0)
