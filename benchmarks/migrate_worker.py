"""The rollout's worker with a record of each sequence's tokens: when they came, and how long its prefill took.

It makes one engine step a turn, so that a token's time is that of its step. A step that gives a sequence its first
token on this engine is its prefill; sequences that were admitted together share it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from services.rollout.worker import EngineWorker
from tidegate.runtime.worker import Answer, WorkerChannel, run_worker
from tidegate.types import GpuId

RECORDS = "TIDEGATE_MIGRATE_RECORDS"
"""The environment variable that names the folder of the records, one file a GPU."""


class RecordingWorker(EngineWorker):
    def __init__(self, gpu: GpuId) -> None:
        super().__init__(gpu, step_wait_s=0.0)
        self._file = Path(os.environ[RECORDS]) / f"{gpu.replace('/', '-')}.json"
        self._first_ns: dict[str, int] = {}
        self._last_ns: dict[str, int] = {}
        self._prefill_s: dict[str, float] = {}
        self._num_tokens: dict[str, int] = {}

    def step(self) -> Iterator[Answer]:
        _, engine = self._started()
        before = dict(engine.lengths())
        began_ns = time.monotonic_ns()
        answers = list(super().step())
        now_ns = time.monotonic_ns()
        after = engine.lengths()
        # A sequence that is out had its last token in this step.
        for sequence in [each for each, length in before.items() if after.get(each, length + 1) > length]:
            if sequence not in self._first_ns:
                self._first_ns[sequence] = now_ns
                self._prefill_s[sequence] = (now_ns - began_ns) / 1e9
                self._num_tokens[sequence] = before[sequence]
            self._last_ns[sequence] = now_ns
        yield from answers

    def close(self) -> None:
        super().close()
        found = {
            "first_ns": self._first_ns,
            "last_ns": self._last_ns,
            "prefill_s": self._prefill_s,
            "num_brought": self._num_tokens,
        }
        self._file.write_text(json.dumps(found))


def main(channel: WorkerChannel) -> None:
    """The worker's entry."""
    worker = RecordingWorker(GpuId(channel.grant.gpu))
    try:
        run_worker(channel, worker, stepper=worker, waits_for="prompts")
    finally:
        worker.close()
