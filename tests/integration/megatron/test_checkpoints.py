"""A checkpoint of one layout is the state of any other layout, bit for bit, and training continues from it."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.megatron import small_job
from tests.integration.megatron.actor_trainer_ranks import state_files
from tests.ranks import RankServer, Results
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import ADAM, PlainOptimizer, StateKind
from tidegate.megatron.family import model_parameters
from tidegate.types import Layout

JOB = "tests.integration.megatron.actor_trainer_ranks:checkpointed"
SAVED = {"tp": 2, "dp": 2}
OTHERS = {"pp2": {"pp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}, "one rank": {}}
TOLERANCE = 1e-5
SETTINGS = small_job.trainer_settings(tied=True)
PARAMETERS = model_parameters(SETTINGS.model, padded_vocab=SETTINGS.padded_vocab)


def logical_state(folder: Path) -> dict[TensorKey, torch.Tensor]:
    """The whole content of a checkpoint, unsharded."""
    kinds = tuple(tensor for tensor in ADAM if tensor.kind is not StateKind.MAIN_PARAM)
    whole = State(Mesh(Layout(), (0,), even_chunks(SETTINGS.model.num_layers, pp=1)), PlainOptimizer(kinds))
    padded = prod((SETTINGS.padded_vocab, SETTINGS.model.hidden_size))
    sizes = {parameter.name: prod(parameter.shape) for parameter in PARAMETERS} | {PARAMETERS[0].name: padded}
    found: dict[TensorKey, torch.Tensor] = {}
    for name, size in sizes.items():
        found |= {(name, kind): torch.zeros(size) for kind in (StateKind.WEIGHT, *(tensor.kind for tensor in kinds))}
        found[name, StateKind.STEP] = torch.zeros(1)
    state_files(folder).read(parameters=PARAMETERS, state=whole, me=0, targets=found)
    return found


def run(ranks: RankServer, layout: dict[str, int], first: int, last: int, folder: Path, source: str = "") -> Results:
    arguments = {"layout": layout, "first": first, "last": last, "folder": str(folder), "source": source}
    got: Results = ranks.run(JOB, prod(layout.values()), arguments)[0]
    return got


@pytest.fixture(scope="module")
def straight(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """Four updates without a break."""
    folder = tmp_path_factory.mktemp("straight")
    return run(ranks, SAVED, 0, 4, folder), folder / "trained"


@pytest.fixture(scope="module")
def saved(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint after two of the four updates."""
    folder = tmp_path_factory.mktemp("saved")
    run(ranks, SAVED, 0, 2, folder)
    return folder / "trained"


def test_training_continues_bit_for_bit_from_a_checkpoint_of_the_same_layout(
    ranks: RankServer, straight: tuple[Results, Path], saved: Path, tmp_path: Path
) -> None:
    run(ranks, SAVED, 2, 4, tmp_path, str(saved))
    got, want, before = (logical_state(folder) for folder in (tmp_path / "trained", straight[1], saved))
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
    assert not all(torch.equal(before[key], tensor) for key, tensor in want.items())
    assert {float(tensor) for (_, kind), tensor in got.items() if kind is StateKind.STEP} == {4.0}


@pytest.mark.parametrize("layout", OTHERS.values(), ids=OTHERS)
def test_another_layout_loads_the_same_state_bit_for_bit_and_continues(
    ranks: RankServer, straight: tuple[Results, Path], saved: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    got = run(ranks, layout, 2, 4, tmp_path, str(saved))
    want = logical_state(saved)
    loaded = logical_state(tmp_path / "loaded")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in want.items())
    assert got["progress"].tolist() == [2, 4]
    error = np.abs(got["loss"] - straight[0]["loss"][2:]) / straight[0]["absolute_terms"][2:]
    assert error.max() <= TOLERANCE
