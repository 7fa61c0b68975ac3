"""The config's sections on what a job records of itself beside its checkpoints, for people."""

from __future__ import annotations

from tidegate.config_base import Count, Section


class SamplesSection(Section):
    """Samples in the job's folder, with texts and rewards."""

    per_iteration: Count | None = 32
    """Of each iteration, in whole groups evenly over its prompts; 0 keeps none, none keeps all."""
