"""Which layouts the components of a job may be in. Pure.

The config's checks, the start of a job and `tidegate scale` ask these functions, so all of them refuse with the same
words. Which GPUs are there is decided elsewhere.

Invariant: `scale` refuses a layout with the words with which the start refuses it in a config.
[test_job: scale_and_the_config_refuse_a_layout_in_the_same_words]
"""

from __future__ import annotations

from tidegate.config.schedule import samples_per_update
from tidegate.config.sections.job import JobSections
from tidegate.megatron.family import check_layout
from tidegate.model_config import ModelConfig
from tidegate.types import Layout, Role


def layout_fault(
    config: JobSections, model: ModelConfig, layout: Layout, *, role: Role, padded_vocab: int
) -> str | None:
    """Why the actor or the inference can never be in this layout, with the legal sizes; None when it can."""
    try:
        check_layout(model, layout, padded_vocab=padded_vocab)
    except ValueError as error:
        return str(error)
    return _scoring_fault(layout) if role is Role.INFERENCE else _training_fault(config, model, layout)


def replicas_fault(layout: Layout, *, num_samples: int, num_shards: int | None) -> str | None:
    """Why the actor's replicas cannot share a minibatch of `num_samples`; None when they can.

    `num_shards`: the logical shards of a reproducible actor, a power of two."""
    if layout.dp > num_samples:
        return (
            f"layout {layout} does not fit: dp={layout.dp} replicas cannot share a minibatch of {num_samples} samples "
            f"(algorithm.prompts_per_iteration / n_minibatches * group_size); use {num_samples} replicas at most"
        )
    if num_shards is not None and num_shards % layout.dp:
        legal = ", ".join(str(1 << power) for power in range(num_shards.bit_length()))
        return (
            f"layout {layout} does not fit: dp={layout.dp} does not divide actor.num_logical_shards={num_shards}; "
            f"legal dp: {legal}"
        )
    return None


def _training_fault(config: JobSections, model: ModelConfig, layout: Layout) -> str | None:
    cuts = {
        "cp": layout.cp > 1,
        "ep": layout.ep > 1,
        "tp with experts": layout.tp > 1 and model.num_experts is not None,
    }
    if config.actor.packing == "thd" and (found := [axis for axis, is_cut in cuts.items() if is_cut]):
        return (
            f"layout {layout} does not fit: actor.packing=thd runs sequences without padding, which "
            f"{' and '.join(found)} cannot cut; set packing to padded, or these axes to 1"
        )
    num_samples, num_shards = samples_per_update(config), config.actor.num_logical_shards
    return replicas_fault(layout, num_samples=num_samples, num_shards=num_shards)


def _scoring_fault(layout: Layout) -> str | None:
    """Ranks that share experts exchange tokens in equal parts, and replicas of the inference have batches of other
    shapes."""
    if layout.cp % layout.ep:
        legal = ", ".join(str(ep) for ep in range(1, layout.cp + 1) if layout.cp % ep == 0)
        return (
            f"layout {layout} does not fit: cp % ep = {layout.cp} % {layout.ep} = {layout.cp % layout.ep}, must be 0, "
            f"because the inference's replicas have batches of other shapes and cannot share experts; legal ep: {legal}"
        )
    return None
