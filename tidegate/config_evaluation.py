"""The config's section on evaluation: how often, on which prompts, how they are sampled, what counts as right.

`evaluation_faults` names all that must hold between this section and the others, one fault a text. Invariant: a job on
data names data to evaluate on, and a built-in task has prompts of its own, so that what is trained on is never meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tidegate.config_base import ConfigPath, Finite, NonNegativeFloat, Positive, Section

if TYPE_CHECKING:
    from tidegate.config import JobConfig


class EvaluationSection(Section):
    """Held-out prompts, answered by the weights of every so many iterations, and by the last."""

    every: Positive
    """Iterations; the weights before the first one are evaluated too."""
    data: ConfigPath = ""
    """Of a job on data: a file, or a folder as `data.train`; relative to the config's folder."""
    split: str = "test"
    """Of a folder: the files that are named for it."""
    num_prompts: Positive | None = None
    """The first so many; None: all. A built-in task has no end of them."""
    samples_per_prompt: Positive = 1
    pass_at: tuple[Positive, ...] = (1,)
    """Each k of pass@k."""
    pass_from: Finite = 1.0
    """A response passes a reward that gives it at least this much, before the reward's weight."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive | None = None
    """None: as `algorithm.max_new_tokens`."""
    checksum: str = ""
    """As `data.checksum`."""


def evaluation_faults(config: JobConfig) -> list[str]:
    evaluation = config.evaluation
    if evaluation is None:
        return []
    return [*_prompt_faults(config, evaluation), *_sampling_faults(config, evaluation)]


def longest_evaluated(config: JobConfig) -> int:
    """Tokens of the longest response to a held-out prompt."""
    own = config.evaluation.max_new_tokens if config.evaluation else None
    return own or config.algorithm.max_new_tokens


def _prompt_faults(config: JobConfig, evaluation: EvaluationSection) -> list[str]:
    if config.data is not None:
        lacks = "evaluation.data is empty: name a file, or a folder, whose prompts are not trained on"
        return [] if evaluation.data else [lacks]
    faults = []
    if evaluation.data:
        faults.append("evaluation.data is given, and a built-in task has held-out prompts of its own: remove it")
    if evaluation.num_prompts is None:
        faults.append("evaluation.num_prompts is missing: a built-in task's held-out prompts have no end; set it to 64")
    return faults


def _sampling_faults(config: JobConfig, evaluation: EvaluationSection) -> list[str]:
    faults = []
    num_samples, longest, limit = evaluation.samples_per_prompt, longest_evaluated(config), config.model.max_seq_len
    if not evaluation.pass_at or max(evaluation.pass_at) > num_samples:
        faults.append(
            f"evaluation.pass_at={list(evaluation.pass_at)} needs numbers of 1 to evaluation.samples_per_prompt="
            f"{num_samples}: pass@k is estimated from k responses to a prompt, or more"
        )
    if evaluation.temperature == 0 and num_samples > 1:
        faults.append(
            f"evaluation.samples_per_prompt={num_samples} with evaluation.temperature=0 makes the same response "
            f"{num_samples} times: set the temperature to that of the training, {config.algorithm.temperature:g}, or "
            "the samples to 1"
        )
    if longest >= limit:
        faults.append(
            f"evaluation.max_new_tokens={longest} leaves no token for the prompt: it must be less than "
            f"model.max_seq_len={limit}"
        )
    return faults
