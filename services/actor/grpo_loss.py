"""GRPO's loss of a micro-batch: the clipped policy gradient, truncated importance weights and a KL penalty.

Sources: the objective is that of DeepSeekMath (arXiv 2402.03300). The estimate of the KL divergence is k3 of
http://joschu.net/blog/kl-approx.html. Legend of shapes: B sequences of a micro-batch, S positions.

Invariants:
- Positions outside the mask add exactly 0. [test_grpo: loss_of_a_token]
- A filler adds exactly 0. [test_grpo: filler_adds_nothing]
- The losses of an update's micro-batches add up to its loss before the scale. [test_grpo: micro_batches_add_up]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.actor.grpo import GrpoSettings, OldLogProbs
from services.actor.microbatch import TrainBatch


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's part of the loss, and of the metrics that are sums over tokens."""

    loss: torch.Tensor
    sums: torch.Tensor
    """The sums in the order of `grpo.SUMS`, detached."""


def grpo_loss(log_probs_BS: torch.Tensor, batch: TrainBatch, settings: GrpoSettings) -> LossTerms:
    """The micro-batch's terms, from the log-probabilities of the policy that is trained."""
    trainer_BS, engine_BS, reference_BS, mask_BS, weight_BS, advantage_BS = (
        torch.from_numpy(array).to(log_probs_BS.device)
        for array in (
            batch.old_log_probs_BS,
            batch.engine_log_probs_BS,
            batch.reference_log_probs_BS,
            batch.mask_BS,
            batch.token_weight_BS,
            batch.advantage_BS,
        )
    )
    old_BS = trainer_BS if settings.old_log_probs is OldLogProbs.TRAINER else engine_BS
    # Set differences outside the mask to 0: avoid an infinity at a padding position, for 0 * infinity is NaN.
    ratio_BS = torch.exp((log_probs_BS - old_BS) * mask_BS)
    clipped_BS = ratio_BS.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    unclipped_gain_BS, clipped_gain_BS = ratio_BS * advantage_BS, clipped_BS * advantage_BS
    term_BS = -torch.minimum(unclipped_gain_BS, clipped_gain_BS)
    if settings.importance_cap is not None:
        term_BS = term_BS * torch.exp((old_BS - engine_BS) * mask_BS).clamp(max=settings.importance_cap)
    kl_BS = torch.zeros_like(log_probs_BS)
    if settings.kl_coefficient:
        difference_BS = (reference_BS - log_probs_BS) * mask_BS
        kl_BS = torch.exp(difference_BS) - difference_BS - 1.0
        term_BS = term_BS + settings.kl_coefficient * kl_BS
    weighted_BS = term_BS * weight_BS
    loss = weighted_BS.sum()
    with torch.no_grad():
        is_clipped_BS = (clipped_gain_BS < unclipped_gain_BS) * mask_BS
        sums = [loss, (kl_BS * mask_BS).sum(), is_clipped_BS.sum(), (ratio_BS * mask_BS).sum(), weighted_BS.abs().sum()]
        return LossTerms(loss, torch.stack(sums).detach())
