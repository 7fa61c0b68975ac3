"""Writes rows to a Weights & Biases run: one run per start of the job, all in one group, with `iteration` as x axis.

W&B itself handles the login (WANDB_API_KEY, WANDB_BASE_URL, `wandb login`). The job's config has no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.config.sections.record import WandbSection
from tidegate.tracking.metrics import Row


class WandbSink:
    """W&B shows `config` with the run, so it must hold no secret. Files go to `<folder>/wandb`."""

    def __init__(
        self, section: WandbSection, folder: Path, *, job: str, attempt: int, boot: int, config: Mapping[str, Any]
    ) -> None:
        # Import it here: it is installed only where a config requests it.
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
            # Leave the terminal and the code repository alone.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self._teardown = wandb.teardown
        self._run.define_metric("iteration", hidden=True)
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: Row) -> None:
        self._run.log({**row.values, "iteration": row.step, "incarnation": row.incarnation})

    def close(self) -> None:
        self._run.finish()
        # Wait for W&B's own process: only it writes the run's file, and it ends after the run.
        self._teardown()
