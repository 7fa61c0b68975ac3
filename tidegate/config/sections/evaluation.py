"""The config's section on evaluation: how often, on which prompts, how they are sampled, what counts as right."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.config.base import ConfigPath, Finite, NonNegativeFloat, Positive, Section


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
