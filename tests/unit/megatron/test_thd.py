"""A micro-batch without its padding: each token, position and label is where its row had it."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.extensions import transformer_engine

from services.actor.microbatch import TrainSample, packed_samples, train_batches
from tidegate.megatron.batching import ReplicaPlace, TokenBatch, replica_batches
from tidegate.megatron.packing import Packing, TokenCap
from tidegate.megatron.thd import Unpadded, check_unpadded, te_attention

CPU = torch.device("cpu")
THD = TokenCap(96, token_cost=30, packing=Packing.THD)
LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=12)


def taken_out(batch: TokenBatch) -> Unpadded:
    assert batch.lengths is not None
    return Unpadded.of(batch.lengths, batch.shape, CPU)


@given(lengths=LENGTHS, num_replicas=st.integers(1, 3), alike=st.booleans())
def test_sequences_follow_each_other_with_their_own_positions(
    lengths: list[int], num_replicas: int, alike: bool
) -> None:
    sequences = [[100 * index + place for place in range(length)] for index, length in enumerate(lengths)]
    for replica in range(num_replicas):
        for batch in replica_batches(sequences, THD, ReplicaPlace(replica, num_replicas, alike=alike)):
            rows = taken_out(batch)
            tokens_1T = rows.taken_out(torch.from_numpy(batch.tokens_BS))
            if not batch.sequences:
                assert tokens_1T.tolist() == [[0, 0]]
                continue
            own = [sequences[index] for index in batch.sequences]
            assert tokens_1T.tolist() == [[token for sequence in own for token in sequence]]
            assert rows.position_ids_1T.tolist() == [[place for sequence in own for place in range(len(sequence))]]
            params = rows.params
            want_bounds = [0, *accumulate(map(len, own))]
            assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == want_bounds
            assert (params.cu_seqlens_q.dtype, params.qkv_format) == (torch.int32, "thd")
            assert params.max_seqlen_q == params.max_seqlen_kv == max(map(len, own))


@given(lengths=LENGTHS)
def test_logits_put_back_into_rows_fit_the_labels_and_the_mask_of_the_padded_batch(lengths: list[int]) -> None:
    samples = [
        TrainSample((7,), tuple(range(1, length)), 0.5, *[(-1.0,) * (length - 1)] * 3)  # type: ignore[arg-type]  # three of one kind
        for length in lengths
    ]
    thd, padded = (
        train_batches(samples, [0.25] * len(samples), packed_samples(samples, cap))
        for cap in (THD, TokenCap(96, token_cost=30))
    )
    for batch, want in zip(thd, padded, strict=True):
        assert (batch.mask_BS == want.mask_BS).all()
        assert (batch.token_weight_BS == want.token_weight_BS).all()
        tokens_BS = torch.from_numpy(batch.batch.tokens_BS)
        assert torch.equal(tokens_BS, torch.from_numpy(want.batch.tokens_BS))
        rows = taken_out(batch.batch)
        # Instead of a model: each token and its position, plus 1 so that 0 means padding.
        answered_1T2 = torch.stack([rows.taken_out(tokens_BS) + 1, rows.position_ids_1T + 1], dim=-1)
        back_BS2 = rows.put_back(answered_1T2)
        held_BS = back_BS2[..., 1] > 0
        assert held_BS.sum(1).tolist() == [lengths[index] for index in batch.batch.sequences]
        assert torch.equal(back_BS2[..., 0], torch.where(held_BS, tokens_BS + 1, 0))
        assert torch.equal(back_BS2[..., 1], torch.where(held_BS, torch.arange(tokens_BS.size(1)) + 1, 0))
        assert held_BS[torch.from_numpy(batch.mask_BS) > 0].all()


def test_gradients_of_logits_put_back_into_rows_are_those_of_the_tokens_alone() -> None:
    rows = Unpadded.of((2, 3), (2, 4), CPU)
    logits_1TV = torch.arange(10.0).reshape(1, 5, 2).requires_grad_()
    (gradient,) = torch.autograd.grad((rows.put_back(logits_1TV) * 3).sum(), [logits_1TV])
    assert gradient.tolist() == [[[3.0, 3.0]] * 5]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "context parallelism": ({"context_parallel_size": 2}, "does not support context parallelism, which"),
    "experts with tensor parallelism": (
        {"expert_model_parallel_size": 2, "sequence_parallel": True},
        "does not support expert parallelism and sequence parallelism, which",
    ),
}


@pytest.mark.parametrize(("has", "want"), REFUSED.values(), ids=REFUSED)
def test_a_layout_that_cuts_rows_is_refused(has: dict[str, Any], want: str) -> None:
    plain = {"context_parallel_size": 1, "expert_model_parallel_size": 1, "sequence_parallel": False}
    check_unpadded(SimpleNamespace(**plain))
    with pytest.raises(ValueError, match=want):
        check_unpadded(SimpleNamespace(**(plain | has)))


@pytest.mark.skipif(transformer_engine.HAVE_TE, reason="Transformer Engine is installed")
def test_without_transformer_engine_its_attention_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"needs the attention of Transformer Engine, .*, or use packing=padded"):
        te_attention()
