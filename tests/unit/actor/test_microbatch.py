"""Samples that cannot be trained are refused. Each number is at the position of its token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from services.actor.microbatch import Demonstration, TrainSample, packed_samples, train_batches
from tidegate.megatron.batching import BatchLimits, ReplicaPlace

SAMPLE = TrainSample(
    prompt_tokens=(5, 6),
    response_tokens=(7, 8, 9),
    advantage=0.5,
    old_log_probs=(-1.0, -2.0, -3.0),
    reference_log_probs=(-1.5, -2.5, -3.5),
    engine_log_probs=(-1.25, -2.25, -3.25),
)


def test_each_number_is_at_the_position_of_its_token() -> None:
    (batch,) = train_batches([SAMPLE], [0.25], packed_samples([SAMPLE], BatchLimits(pad_multiple=4)))
    assert batch.batch.tokens_BS.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert batch.mask_BS.tolist() == [[0, 0, 1, 1, 1, 0, 0, 0]]
    assert batch.token_weight_BS.tolist() == [[0, 0, 0.25, 0.25, 0.25, 0, 0, 0]]
    assert batch.advantage_BS.tolist() == [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0]]
    assert batch.old_log_probs_BS.tolist() == [[0, 0, -1, -2, -3, 0, 0, 0]]
    assert batch.reference_log_probs_BS.tolist() == [[0, 0, -1.5, -2.5, -3.5, 0, 0, 0]]
    assert batch.engine_log_probs_BS.tolist() == [[0, 0, -1.25, -2.25, -3.25, 0, 0, 0]]


def test_masked_samples_and_fillers_weigh_nothing() -> None:
    samples = [dataclasses.replace(SAMPLE, masked=True)]
    for replica in (0, 1):
        (batch,) = train_batches(samples, [1.0], packed_samples(samples, BatchLimits(), ReplicaPlace(replica, 2)))
        assert not batch.mask_BS.any()
        assert not batch.token_weight_BS.any()


def test_each_weight_stays_with_its_sample_in_the_micro_batches() -> None:
    longer = dataclasses.replace(SAMPLE, prompt_tokens=(1, 2, 3, 4))
    samples = [SAMPLE, longer]
    (batch,) = train_batches(samples, [0.1, 0.2], packed_samples(samples, BatchLimits()))
    assert batch.batch.sequences == (1, 0)
    assert batch.token_weight_BS.max(axis=1).tolist() == pytest.approx([0.2, 0.1])


SHORT: dict[str, Callable[[], TrainSample]] = {
    "old_log_probs": lambda: dataclasses.replace(SAMPLE, old_log_probs=(-1.0,)),
    "reference_log_probs": lambda: dataclasses.replace(SAMPLE, reference_log_probs=(-1.0,)),
    "engine_log_probs": lambda: dataclasses.replace(SAMPLE, engine_log_probs=(-1.0,)),
}


@pytest.mark.parametrize(("field", "make"), SHORT.items(), ids=SHORT)
def test_a_sample_with_too_few_log_probabilities_is_refused(field: str, make: Callable[[], TrainSample]) -> None:
    with pytest.raises(ValueError, match=f"sample has 1 {field} for 3 response tokens"):
        make()


def test_a_sample_without_a_response_is_refused() -> None:
    with pytest.raises(ValueError, match="2 prompt and 0 response tokens"):
        dataclasses.replace(SAMPLE, response_tokens=())


def test_a_demonstration_needs_a_mask_entry_for_each_token() -> None:
    with pytest.raises(ValueError, match="3 tokens with 2 mask entries"):
        Demonstration(tokens=(1, 2, 3), loss_mask=(True, True))
