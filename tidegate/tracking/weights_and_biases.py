"""Rows as a Weights & Biases run: one a start of the job, all of a job in one group; `iteration` is their x axis.

Who logs in where is W&B's own business (WANDB_API_KEY, WANDB_BASE_URL, `wandb login`): no key is in the job's config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.config.sections.record import WandbSection
from tidegate.tracking.metrics import Row


class WandbSink:
    """`config` is shown with the run, so it holds no secret. Files go to `<folder>/wandb`."""

    def __init__(
        self, section: WandbSection, folder: Path, *, job: str, attempt: int, boot: int, config: Mapping[str, Any]
    ) -> None:
        # Here, for it is installed only where somebody asks for it.
        import wandb

        self._run = wandb.init(
            project=section.project,
            entity=section.entity or None,
            group=job,
            name=f"{job}/{attempt}",
            id=f"{job}-{boot}",
            tags=section.tags,
            dir=folder,
            mode=section.mode,
            config=dict(config),
            # It is no terminal's, and takes no notice of the code around it.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self._teardown = wandb.teardown
        self._run.define_metric("iteration", hidden=True)
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: Row) -> None:
        self._run.log({**row.values, "iteration": row.step, "incarnation": row.incarnation})

    def close(self) -> None:
        self._run.finish()
        # Only W&B's own process writes the run's file, and is not done when the run is.
        self._teardown()
