"""The config's section on evaluation: its interval, its prompts, its sampling, and the reward that counts as a pass."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.config.base import ConfigPath, Finite, NonNegativeFloat, Positive, Section


class EvaluationSection(Section):
    """Every `every` iterations and after the last one, the current weights answer held-out prompts."""

    every: Positive
    """A number of iterations. The weights before the first iteration are evaluated too."""
    data: ConfigPath = ""
    """For a job on data: a file, or a folder as `data.train`, relative to the config's folder."""
    split: str = "test"
    """For a folder: the files with this name."""
    num_prompts: Positive | None = None
    """Only the first `num_prompts` are used. None: all. A built-in task has an endless number of prompts."""
    samples_per_prompt: Positive = 1
    pass_at: tuple[Positive, ...] = (1,)
    """Each k of pass@k."""
    pass_from: Finite = 1.0
    """A response passes a reward that gives it at least this much, before the reward's weight."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive | None = None
    """None: `algorithm.max_new_tokens`."""
    checksum: str = ""
    """The counterpart of `data.checksum`."""
