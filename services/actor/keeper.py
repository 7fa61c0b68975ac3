"""A worker's calls of a suspension: it keeps the state in host memory, gives its device back, and measures both.

No call waits for a peer, so that members of a spent epoch can be suspended too. Only the proof of a switch just made
needs the other ranks; without them it stays open.

Invariant: a repeated call has the result of the first. [test_worker: gives_its_memory_back_and_trains_on]
"""

from __future__ import annotations

import gc

import psutil
import torch

from tidegate.elastic.trainer import ElasticTrainer
from tidegate.runtime.free_memory import held_device_bytes
from tidegate.runtime.worker import CallRefused
from tidegate.v1 import workers_pb2 as wire


class Keeper:
    """Does the calls of one worker, one suspension after another."""

    def __init__(self) -> None:
        self._prepared = ""
        self._last_committed = ""
        self._last = wire.Suspended()

    def prepare(self, name: str, trainer: ElasticTrainer) -> None:
        """Raises CallRefused; the state then is as it was."""
        try:
            trainer.prepare_suspension()
        # After any error the copy that it began is given back, and the state is as it was.
        except Exception as error:
            raise CallRefused(f"suspension {name}: {type(error).__name__}: {error}") from error
        self._prepared = name

    def commit(self, name: str, trainer: ElasticTrainer) -> wire.Suspended:
        if name == self._last_committed:
            return self._last
        if name != self._prepared:
            raise CallRefused(f"suspension {name} is not prepared here; open: {self._prepared or 'none'}")
        device = trainer.world.device
        before = used_bytes(device)
        trainer.suspend()
        held = used_bytes(device)
        self._last = wire.Suspended(freed_bytes=max(0, before - held), held_bytes=held, kept_bytes=trainer.kept_bytes)
        self._prepared, self._last_committed = "", name
        return self._last

    def abort(self, name: str, trainer: ElasticTrainer) -> None:
        if name == self._last_committed:
            raise CallRefused(f"suspension {name} is committed and cannot be aborted")
        trainer.abort_suspension()
        self._prepared = ""


def used_bytes(device: torch.device) -> int:
    """The device memory that this process has taken from the driver, without its context; on a CPU its private memory.

    What torch has cached and nothing uses is given back first.
    """
    if device.type == "cuda":
        return held_device_bytes()
    gc.collect()
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
