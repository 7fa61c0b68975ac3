"""Slots on CUDA devices: their memory, their traffic and their engine. Needs CUDA."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import Response, SamplingParams
from tests.ranks import RankServer
from tests.unit.rollout.tiny_models import TINY, engine_of, finish, random_weights, request_of

pytestmark = pytest.mark.gpu

RANKS = "tests.gpu.slot_ranks:"
TOLERANCE = 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_on_one_gpu_exchange_what_ranks_on_cpus_do(ranks: RankServer, cuda: str, dtype: str) -> None:
    arguments = {"slot_device": "n0/cpu:0", "dtype": dtype}
    staged = "tests.integration.elastic.staged_ranks:every_operation"
    on_cpus = ranks.run(staged, 3, arguments)
    on_one_gpu = ranks.run(staged, 3, arguments | {"device": cuda}, timeout_s=100.0)

    for of_rank, want in zip(on_one_gpu, on_cpus, strict=True):
        assert bool(of_rank["is staged"])
        for name, array in want.items():
            np.testing.assert_array_equal(of_rank[name], array, err_msg=name)


@pytest.mark.parametrize("maps", [True, False], ids=["mapped", "sent, as one rank cannot map"])
def test_ranks_on_one_gpu_copy_out_of_each_others_tensors(ranks: RankServer, maps: bool) -> None:
    switches = [
        ({"dp": 4}, [0, 1, 2, 3]),
        ({"tp": 2, "dp": 2}, [0, 1, 2, 3]),
        ({"tp": 2, "pp": 2, "vpp": 2}, [3, 1, 0, 2]),
        ({"tp": 2}, [0, 1]),
    ]
    found = ranks.run(
        RANKS + "switches_over_device_memory", 4, {"switches": list(pairwise(switches)), "maps": maps}, timeout_s=100.0
    )

    for of_rank in found:
        assert set(of_rank["answers"]) == ({""} if maps else {"", "it cannot"})
        assert int(of_rank["kept_bytes"]) < 16 << 20


def test_a_rank_alone_in_its_world_uses_nccl(ranks: RankServer) -> None:
    (found,) = ranks.run(RANKS + "alone", 1, timeout_s=100.0)

    assert str(found["backend"]) == "nccl"
    assert found["summed"].tolist() == [3.0, 3.0]


def test_a_slot_allocates_its_part_of_the_memory_and_no_more(ranks: RankServer) -> None:
    (found,) = ranks.run(RANKS + "fills_its_slot", 1, {"slots_per_gpu": 4}, timeout_s=100.0)

    assert 0 < int(found["memory_bytes"]) < int(found["total_bytes"]) / 4
    assert found["fits"].tolist() == [True, False]


def generated(engine: EmbeddedEngine) -> dict[str, Response]:
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        sampling = SamplingParams(max_new_tokens=32, temperature=temperature, seed=7)
        engine.submit(request_of(name, sampling=sampling))
    return {name: generation.response for name, generation in finish(engine).items()}


def test_an_engine_on_cuda_gives_the_tokens_and_log_probabilities_of_one_on_a_cpu(cuda: str) -> None:
    on_cuda = EmbeddedEngine(TINY, max_running_requests=8, device=torch.device(cuda))
    on_cuda.update_weights(1, random_weights(TINY))
    found, want = generated(on_cuda), generated(engine_of())

    for name, response in want.items():
        assert found[name].tokens == response.tokens
        assert found[name].log_probs == pytest.approx(response.log_probs, abs=TOLERANCE)
