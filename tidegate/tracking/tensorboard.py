"""Writes rows to TensorBoard event files: one file for each start of the job, in one folder.

An incarnation's rows supersede earlier ones: its first row makes TensorBoard drop, from all files, that step and later
steps.

Invariant: a row is in the file when `write` returns. [test_tensorboard: read_before_the_next_one_comes]
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from tidegate.tracking.metrics import Row

_VERSION = "brain.Event:2"


class TensorBoardSink:
    """`boot` grows with each start. It orders the files by name, the order in which TensorBoard reads them."""

    def __init__(self, folder: Path, *, boot: int) -> None:
        folder.mkdir(exist_ok=True)
        self._incarnation: int | None = None
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{boot:010}.tidegate"))
        self._add(Event(wall_time=time.time(), file_version=_VERSION))
        self._records.flush()

    def write(self, row: Row) -> None:
        if row.incarnation != self._incarnation:
            self._incarnation = row.incarnation
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=row.unix_s, step=row.step, session_log=start))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(row.values.items())]
        self._add(Event(wall_time=row.unix_s, step=row.step, summary=Summary(value=values)))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
