"""A Weights & Biases run without a network, read from its file. It runs only where wandb is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tracking.rows import a_row, read_wandb_history
from tidegate.config.sections.record import WandbSection

pytest.importorskip("wandb", reason="what requirements/wandb.in lists is not installed")


def test_an_offline_run_has_every_row_by_its_iteration(tmp_path: Path) -> None:
    from tidegate.tracking.weights_and_biases import WandbSink

    section = WandbSection(mode="offline", tags=("tried",))
    sink = WandbSink(section, tmp_path, job="small", attempt=2, boot=7, config={"job": "small"})
    for step in (3, 4, 3):
        sink.write(a_row(step, iteration__loss=step / 4))
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*-small-7/*.wandb")
    got = [(row["iteration"], row["iteration/loss"]) for row in read_wandb_history(file)]
    assert got == [(3, 0.75), (4, 1.0), (3, 0.75)]
    assert b"small/2" in file.read_bytes()
