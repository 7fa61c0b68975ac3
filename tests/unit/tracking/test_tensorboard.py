"""TensorBoard's files, read by a reader of our own: the written rows, and those that a restart supersedes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tracking.job_events import ROLLOUT, begun, evaluation, event, rows
from tests.unit.tracking.rows import Scalar, a_row, read_scalars
from tidegate.tracking.tensorboard import TensorBoardSink
from tidegate.v1 import events_pb2


def test_rows_come_back_as_scalars_with_their_step_and_time(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard", boot=7)
    sink.write(a_row(0, iteration__loss=0.5, seconds__train=3.25))
    sink.write(a_row(300, iteration__loss=-0.125))
    sink.close()
    want = {
        "iteration/loss": [Scalar(0, 1000.0, 0.5), Scalar(300, 1300.0, -0.125)],
        "seconds/train": [Scalar(0, 1000.0, 3.25)],
    }
    assert read_scalars(tmp_path / "tensorboard") == want


def test_a_row_can_be_read_before_the_next_one_comes(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard", boot=7)
    for step in range(3):
        sink.write(a_row(step))
        assert [scalar.step for scalar in read_scalars(tmp_path / "tensorboard")["iteration/loss"]] == [
            *range(step + 1)
        ]
    sink.close()


def test_an_incarnations_rows_replace_earlier_ones_from_its_first_step_on(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, boot=7)
    for step in range(4):
        sink.write(a_row(step, loss=1.0))
    sink.write(a_row(2, incarnation=2, loss=2.0))
    sink.close()
    assert [(scalar.step, scalar.value) for scalar in read_scalars(tmp_path)["loss"]] == [(0, 1), (1, 1), (2, 2)]


def test_evaluations_are_read_back_by_version_those_of_the_weights_that_a_restart_begins_with_included(
    tmp_path: Path,
) -> None:
    generated = events_pb2.IterationReported()
    got = rows(
        *begun(),
        event(3.0, ROLLOUT, generated),
        *(evaluation(4.0 + version, version, {"countdown/pass@4": version / 4}) for version in range(4)),
        *begun(incarnation=2, at_s=20.0),
        event(24.0, ROLLOUT, generated, iteration=2, incarnation=2),
    )
    sink = TensorBoardSink(tmp_path, boot=7)
    for row in got:
        sink.write(row)
    sink.close()
    read = read_scalars(tmp_path)["evaluation/countdown/pass@4"]
    assert [(scalar.step, scalar.value) for scalar in read] == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_a_later_start_of_the_job_writes_a_file_of_its_own_and_goes_on_from_its_first_step(tmp_path: Path) -> None:
    for boot, steps in ((9, range(3)), (10, range(2, 4))):
        sink = TensorBoardSink(tmp_path, boot=boot)
        for step in steps:
            sink.write(a_row(step, incarnation=boot, loss=boot))
        sink.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [(scalar.step, scalar.value) for scalar in read_scalars(tmp_path)["loss"]] == [
        (0, 9),
        (1, 9),
        (2, 10),
        (3, 10),
    ]


def test_a_folder_that_cannot_be_created_is_an_error_of_the_sink(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file in the place of the folder")
    with pytest.raises(FileExistsError):
        TensorBoardSink(tmp_path / "tensorboard", boot=7)
