"""An embedded engine computes on the device that it was given, and its slot has room for it."""

from __future__ import annotations

import re

import pytest
import torch

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.embedded.start import check_room
from services.rollout.engine import EngineFailed, Generation, SamplingParams
from tests.unit.rollout.tiny_models import TINY, engine_of, finish, random_weights, request_of

REQUESTS = (
    request_of("greedy", sampling=SamplingParams(max_new_tokens=8, temperature=0.0)),
    request_of("drawn", prompt=range(1, 60), sampling=SamplingParams(max_new_tokens=8, seed=3, top_p=0.9)),
)


def generated(engine: EmbeddedEngine) -> dict[str, Generation]:
    for request in REQUESTS:
        engine.submit(request)
    return finish(engine)


def test_an_engine_makes_every_tensor_on_its_own_device() -> None:
    want, weights = generated(engine_of()), random_weights(TINY)
    # Here a tensor that is made without a device is on `meta`: it has no values, and mixes with no other device's.
    with torch.device("meta"):
        engine = EmbeddedEngine(TINY, max_running_requests=8, device=torch.device("cpu"))
        engine.update_weights(1, weights)
        assert generated(engine) == want


def test_a_slot_that_cannot_hold_the_cache_is_refused_with_the_numbers_and_the_keys_to_lower() -> None:
    want = "rollout.max_running_requests=5 needs 0.0 GiB for keys and values beside 0.0 GiB for two versions"
    with pytest.raises(EngineFailed, match=re.escape(want)) as refusal:
        check_room(TINY, max_running_requests=5, memory_bytes=1 << 10)
    assert str(refusal.value).endswith("lower it, model.max_seq_len, or cluster.slots_per_gpu")


def test_an_engine_needs_what_its_cache_and_two_versions_of_the_weights_take() -> None:
    engine = EmbeddedEngine(TINY, max_running_requests=64)
    engine.update_weights(1, random_weights(TINY, padding_rows=0))
    assert engine._cache is not None
    assert engine._weights is not None
    cache_bytes = engine._cache.keys.nbytes + engine._cache.values.nbytes
    needed_bytes = cache_bytes + 2 * sum(tensor.nbytes for tensor in engine._weights.named.values())
    check_room(TINY, max_running_requests=64, memory_bytes=needed_bytes)
    with pytest.raises(EngineFailed):
        check_room(TINY, max_running_requests=64, memory_bytes=needed_bytes - 1)
