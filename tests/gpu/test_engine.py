"""The embedded engine on a CUDA device: its tokens, and its log-probabilities against the trainer's there.

The bf16 tolerances are twice what an H200 gave, which is what a CPU gives: 0.116 nats at most and 0.017 on average.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.embedded.probe import REFERENCE_ROWS, probe_row_counts
from tests.ranks import RankServer
from tests.unit.rollout.tiny_models import TINY, random_weights
from tidegate.runtime.free_memory import held_device_bytes

pytestmark = pytest.mark.gpu
TOLERANCES = {"fp32": (1e-4, 1e-5), "bf16": (0.25, 0.035)}
"""In nats: of one token, and on average. The engine computes in fp32 from the trainer's weights, so bf16 has the
rounding of the trainer's layers."""


def test_greedy_tokens_are_those_of_transformers_generate(cuda: str) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    from tests.unit.rollout.against_transformers import SHAPES, check_greedy_tokens

    for config in SHAPES.values():
        check_greedy_tokens(config, device=torch.device(cuda))


@pytest.mark.parametrize(
    "shape",
    [(896, 4864, 14, 2, 64), (1536, 8960, 12, 2, 128), (3584, 18944, 28, 4, 128), (4096, 12288, 32, 8, 128)],
    ids=["0.5B", "1.5B", "7B", "8B"],
)
def test_a_sequence_is_the_same_at_any_place_in_models_of_real_widths(
    cuda: str, shape: tuple[int, int, int, int, int]
) -> None:
    """Of heads with 128 elements an H200 multiplies another number of rows with another kernel."""
    hidden_size, ffn_hidden_size, num_heads, num_kv_heads, head_dim = shape
    config = replace(
        TINY,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_seq_len=512,
    )
    found = probe_row_counts(config, torch.device(cuda))
    print(f"{shape}: {found}")
    assert REFERENCE_ROWS in found.counts


def test_an_engine_that_sleeps_gives_its_memory_back(cuda: str) -> None:
    config = replace(TINY, max_seq_len=4096)
    probe_row_counts(config, torch.device(cuda))  # libraries take their workspaces once
    before = held_device_bytes()
    engine = EmbeddedEngine(config, max_running_requests=256, device=torch.device(cuda))
    engine.update_weights(1, random_weights(config))
    assert held_device_bytes() > before + (64 << 20)

    engine.sleep()

    assert held_device_bytes() <= before


@pytest.mark.parametrize("precision", TOLERANCES)
def test_log_probabilities_of_the_engine_are_those_of_the_trainer(ranks: RankServer, cuda: str, precision: str) -> None:
    arguments = {"tied": False, "temperature": 1.0, "device": cuda, "precision": precision}
    (got,) = ranks.run("tests.integration.rollout.scoring:generate_and_score", 1, arguments)
    most, mean = TOLERANCES[precision]
    for name in [name for name in got if name.startswith("trainer/")]:
        engine = got[name.replace("trainer", "engine")]
        np.testing.assert_allclose(engine, got[name], atol=most, rtol=0, err_msg=name)
        assert np.abs(engine - got[name]).mean() <= mean, name
