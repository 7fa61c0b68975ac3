"""The config's sections on what a job records of itself for people: samples in its folder, metrics in trackers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

from tidegate.config.base import Count, Positive, PositiveFloat, Section

_TENSORBOARD = "tensorboardX"
_WANDB = "wandb"


class SamplesSection(Section):
    """Samples in the job's folder, with texts and rewards."""

    per_iteration: Count | None = 32
    """Of each iteration, in whole groups evenly over its prompts; 0 keeps none, none keeps all."""


class WandbSection(Section):
    """Weights & Biases. Its key is its own business (WANDB_API_KEY, `wandb login`)."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "tidegate"
    entity: str = ""
    """Empty: the one that the key belongs to."""
    tags: tuple[str, ...] = ()

    @property
    def is_on(self) -> bool:
        return self.mode != "disabled"


class TrackingSection(Section):
    """Who is told the metrics of iterations, by a process that training never waits for."""

    tensorboard: bool = False
    wandb: WandbSection = WandbSection()
    queue_size: Positive = 1000
    """Rows that wait for each; one more is dropped and counted."""
    close_timeout_s: PositiveFloat = 10.0
    """At the end of a run, for what still waits."""

    @property
    def is_on(self) -> bool:
        return self.tensorboard or self.wandb.is_on


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def tracking_faults(tracking: TrackingSection, *, has: Callable[[str], bool] = is_installed) -> list[str]:
    """What is asked for and cannot be had on this machine, one a text."""
    faults = []
    if tracking.tensorboard and not has(_TENSORBOARD):
        faults.append(
            f"tracking.tensorboard needs the package {_TENSORBOARD}, which is not installed: install what "
            "requirements/base.txt lists, or set it to false"
        )
    if tracking.wandb.is_on and not has(_WANDB):
        faults.append(
            f"tracking.wandb.mode={tracking.wandb.mode} needs the package {_WANDB}, which is not installed: install "
            "what requirements/wandb.in lists, or set it to disabled"
        )
    return faults
