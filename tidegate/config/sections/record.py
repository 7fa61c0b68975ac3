"""The config's sections on a job's records for people: samples in the job's folder, metrics in trackers."""

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
    """Samples of each iteration that are kept: whole groups, spread evenly over the prompts. None: every sample."""


class WandbSection(Section):
    """Weights & Biases. The config has no key for it: set WANDB_API_KEY, or run `wandb login`."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "tidegate"
    entity: str = ""
    """Empty: the owner of the API key."""
    tags: tuple[str, ...] = ()

    @property
    def is_on(self) -> bool:
        return self.mode != "disabled"


class TrackingSection(Section):
    """Trackers that get the metrics of iterations. A separate process writes to them; training never waits for it."""

    tensorboard: bool = False
    wandb: WandbSection = WandbSection()
    queue_size: Positive = 1000
    """Rows that may wait for one tracker. Further rows are dropped and counted."""
    close_timeout_s: PositiveFloat = 10.0
    """The limit, at the end of a run, for the rows that still wait."""

    @property
    def is_on(self) -> bool:
        return self.tensorboard or self.wandb.is_on


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def tracking_faults(tracking: TrackingSection, *, has: Callable[[str], bool] = is_installed) -> list[str]:
    """Trackers that the config turns on but this machine does not have. Each text is one fault."""
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
