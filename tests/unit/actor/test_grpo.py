"""GRPO's advantages, token weights and metrics, and its loss token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.actor.grpo import (
    Aggregation,
    GrpoSettings,
    OldLogProbs,
    check_samples,
    group_advantages,
    iteration_metrics,
    minibatch_scale,
    token_weights,
    update_metrics,
)
from services.actor.grpo_loss import grpo_loss
from services.actor.microbatch import TrainBatch, TrainSample, packed_samples, train_batches
from services.actor.mismatch import mismatch
from tidegate.megatron.batching import BatchLimits, TokenBatch


def sample(num_tokens: int, *, masked: bool = False, reference: bool = True) -> TrainSample:
    return TrainSample(
        prompt_tokens=(1,),
        response_tokens=(2,) * num_tokens,
        advantage=1.0,
        old_log_probs=(-1.0,) * num_tokens,
        reference_log_probs=(-1.5,) * num_tokens if reference else (),
        engine_log_probs=(-1.25,) * num_tokens,
        masked=masked,
    )


def test_advantages_are_centred_and_divided_by_the_population_std() -> None:
    want = np.array([-1.0, 1.0, 0.0]) / (math.sqrt(2 / 3) + 1e-6)
    assert group_advantages([1.0, 3.0, 2.0]) == pytest.approx(want, rel=1e-12)


def test_advantages_are_only_centred_without_normalisation() -> None:
    assert group_advantages([1.0, 3.0, 2.0], normalize_std=False).tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize("rewards", [[0.1] * 3, [5.0], []], ids=["equal rewards", "a group of one", "an empty group"])
def test_groups_without_spread_have_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards).tolist() == [0.0] * len(rewards)


WEIGHTS = {  # in the loss of the minibatch, times its scale
    Aggregation.TOKEN_MEAN: [1 / 5, 1 / 5, 0.0],
    Aggregation.SEQ_MEAN_TOKEN_MEAN: [1 / 2, 1 / 8, 0.0],
    Aggregation.SEQ_MEAN_TOKEN_SUM: [1 / 2, 1 / 2, 0.0],
    Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: [1 / 20, 1 / 20, 0.0],
}


@pytest.mark.parametrize(("aggregation", "want"), WEIGHTS.items(), ids=WEIGHTS)
def test_weights_hold_the_denominators_of_the_whole_minibatch(aggregation: Aggregation, want: list[float]) -> None:
    settings = GrpoSettings(aggregation=aggregation, max_new_tokens=10)
    assert scaled_weights([sample(1), sample(4), sample(7, masked=True)], settings) == pytest.approx(want)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_samples_have_the_same_weights_whichever_portion_they_are_in(aggregation: Aggregation) -> None:
    settings = GrpoSettings(aggregation=aggregation, max_new_tokens=10)
    samples = [sample(1), sample(4), sample(7, masked=True), sample(2)]
    for cut in range(len(samples) + 1):
        portions = samples[:cut], samples[cut:]
        assert [each for portion in portions for each in token_weights(portion, settings)] == token_weights(
            samples, settings
        )


def scaled_weights(samples: list[TrainSample], settings: GrpoSettings) -> list[float]:
    return [weight * minibatch_scale(samples, settings) for weight in token_weights(samples, settings)]


def test_a_sample_of_zero_advantage_stays_in_the_denominators() -> None:
    samples = [sample(1), replace(sample(4), advantage=0.0)]
    assert scaled_weights(samples, GrpoSettings()) == pytest.approx([1 / 5, 1 / 5])


@pytest.mark.parametrize("aggregation", Aggregation)
def test_a_minibatch_whose_samples_are_all_masked_weighs_nothing(aggregation: Aggregation) -> None:
    settings = GrpoSettings(aggregation=aggregation, max_new_tokens=10)
    assert scaled_weights([sample(2, masked=True)], settings) == [0.0]


def test_an_aggregation_with_a_constant_divisor_needs_max_new_tokens() -> None:
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm divides by max_new_tokens"):
        GrpoSettings(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM)


def test_a_kl_penalty_without_reference_log_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 samples have none"):
        check_samples([sample(1), sample(1, reference=False)], GrpoSettings(kl_coefficient=0.1))
    check_samples([sample(1, reference=False)], GrpoSettings())


def test_metrics_are_means_over_the_tokens_that_count() -> None:
    samples = [sample(1), sample(3), sample(5, masked=True)]
    got = update_metrics(samples, [9.0, 2.0, 1.0, 6.0, 2.0], scale=0.25, importance_cap=None)
    want = {
        "kl": 0.5,
        "clip_fraction": 0.25,
        "ratio": 1.5,
        "absolute_terms": 0.5,
        "num_tokens": 4.0,
        "mismatch_mean": 0.25,
        "mismatch_max": 0.25,
        "mismatch_kl": math.exp(0.25) - 1.25,
    }
    assert got == pytest.approx(want)


def test_the_mismatch_is_of_the_trained_tokens_and_includes_the_share_of_truncated_weights() -> None:
    near = replace(sample(3), engine_log_probs=(-1.0, -0.9, -1.1))
    far = replace(sample(5, masked=True), engine_log_probs=(-9.0,) * 5)
    exact = [0.0, -0.1, 0.1]
    want = {
        "mismatch_mean": 0.2 / 3,
        "mismatch_max": 0.1,
        "mismatch_kl": sum(math.exp(x) - 1 - x for x in exact) / 3,
        "mismatch_truncated": 1 / 3,
    }
    assert mismatch([near, far], importance_cap=1.1) == pytest.approx(want)
    assert set(mismatch([far], importance_cap=1.1).values()) == {0.0}


def one_token(*, advantage: float, old: float, engine: float = -1.0, reference: float = -1.0) -> TrainBatch:
    """Position 1 counts with weight 1. Position 2 is padding, whose numbers must not matter."""

    def row(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.array([[0.0, value, 0.0]], dtype=np.float32)

    batch = TokenBatch((0,), np.zeros((1, 3), dtype=np.int64))
    return TrainBatch(batch, row(1.0), row(1.0), row(advantage), row(old), row(reference), row(engine))


LOG = math.log
TOKENS: dict[str, tuple[TrainBatch, GrpoSettings, float, float]] = {
    "on-policy the loss is minus the advantage": (one_token(advantage=2.0, old=-1.0), GrpoSettings(), -2.0, -2.0),
    "a gain is capped above": (one_token(advantage=1.0, old=-1.0 - LOG(2)), GrpoSettings(clip_high=0.3), -1.3, 0.0),
    "a loss is not capped above": (one_token(advantage=-1.0, old=-1.0 - LOG(2)), GrpoSettings(clip_high=0.3), 2.0, 2.0),
    "a loss is capped below": (one_token(advantage=-1.0, old=-1.0 + LOG(2)), GrpoSettings(clip_low=0.1), 0.9, 0.0),
    "the ratio is to the engine where the settings ask for it": (
        one_token(advantage=1.0, old=5.0, engine=-1.0 - LOG(1.1)),
        GrpoSettings(old_log_probs=OldLogProbs.ENGINE),
        -1.1,
        -1.1,
    ),
    "importance weights are capped": (
        one_token(advantage=1.0, old=-1.0, engine=-1.0 - LOG(4)),
        GrpoSettings(importance_cap=2.0),
        -2.0,
        -2.0,
    ),
    "the penalty is k3": (
        one_token(advantage=0.0, old=-1.0, reference=-1.0 + LOG(2)),
        GrpoSettings(kl_coefficient=0.5),
        0.5 * (2 - LOG(2) - 1),
        0.5 * (1 - 2),
    ),
}


@pytest.mark.parametrize(("batch", "settings", "want_loss", "want_gradient"), TOKENS.values(), ids=TOKENS)
def test_the_loss_of_a_token_and_its_derivative(
    batch: TrainBatch, settings: GrpoSettings, want_loss: float, want_gradient: float
) -> None:
    log_probs_BS = torch.tensor([[0.0, -1.0, -300.0]], requires_grad=True)
    terms = grpo_loss(log_probs_BS, batch, settings)
    (gradient_BS,) = torch.autograd.grad(terms.loss, log_probs_BS)
    assert float(terms.loss.detach()) == pytest.approx(want_loss, abs=1e-6)
    assert gradient_BS.tolist()[0] == pytest.approx([0.0, want_gradient, 0.0], abs=1e-6)


def test_a_filler_adds_nothing_to_the_loss() -> None:
    zeros = np.zeros((1, 3), dtype=np.float32)
    filler = TrainBatch(TokenBatch((), np.zeros((1, 3), dtype=np.int64)), zeros, zeros, zeros, zeros, zeros, zeros)
    log_probs_BS = torch.tensor([[0.0, -1.0, -300.0]], requires_grad=True)
    terms = grpo_loss(log_probs_BS, filler, GrpoSettings(kl_coefficient=0.5, importance_cap=2.0))
    (gradient_BS,) = torch.autograd.grad(terms.loss, log_probs_BS)
    assert terms.sums.tolist() == [0.0] * 5
    assert gradient_BS.tolist() == [[0.0, 0.0, 0.0]]


def test_the_losses_of_micro_batches_add_up_to_the_updates_loss() -> None:
    samples = [sample(1), replace(sample(3), advantage=-2.0), sample(2)]
    settings = GrpoSettings(kl_coefficient=0.5)

    def losses(max_sequences: int) -> list[float]:
        batches = train_batches(
            samples, token_weights(samples, settings), packed_samples(samples, BatchLimits(max_sequences))
        )
        return [float(grpo_loss(torch.full(each.mask_BS.shape, -1.1), each, settings).loss) for each in batches]

    (want,) = losses(3)
    assert len(losses(1)) == 3
    assert sum(losses(1)) == pytest.approx(want)


def test_an_iterations_token_means_are_over_all_its_tokens() -> None:
    updates = [{"kl": 1.0, "loss": 1.0, "num_tokens": 10.0}, {"kl": 4.0, "loss": 2.0, "num_tokens": 20.0}]
    assert iteration_metrics(updates) == {"kl": 3.0, "loss": 1.5, "num_tokens": 30.0}
    assert iteration_metrics([{"kl": 1.0}, {"kl": 4.0}]) == {"kl": 2.5}


def test_an_iterations_metrics_combine_the_finite_metrics_of_all_its_updates() -> None:
    first = {"loss": 1.0, "num_tokens": 10.0, "mismatch_max": 0.5, "lr": 1e-3}
    second = {"loss": 3.0, "num_tokens": 20.0, "mismatch_max": 0.25, "lr": 2e-3}
    broken = {"loss": math.nan, "num_tokens": 5.0, "mismatch_max": 0.0, "lr": 3e-3}
    want = {"loss": 2.0, "num_tokens": 35.0, "mismatch_max": 0.5, "lr": 3e-3}
    assert iteration_metrics([first, second, broken]) == want
    assert iteration_metrics([{"dropped_tokens": 7.0}, {"dropped_tokens": 0.0}]) == {"dropped_tokens": 7.0}
    assert iteration_metrics([]) == {}
