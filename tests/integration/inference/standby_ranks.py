"""The rank processes of the standby's tests: real call handlers of the inference, driven by a script that all share."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch.distributed as dist

from services.inference.worker import ScorerWorker
from tests.integration.inference.real_copies import generated
from tests.ranks import RankContext, Results
from tidegate.checksums import file_checksum
from tidegate.codec import encode_layout
from tidegate.elastic.epoch.rendezvous import listening_socket
from tidegate.runtime.slot_clock import SlotClock
from tidegate.runtime.worker import CallRefused, WorkerChannel
from tidegate.types import NO_TOKEN, GpuId, Grant, Layout
from tidegate.v1 import workers_pb2 as wire

NUM_MOVES = 6


class Rank:
    """One worker of a job with tp2 copies, and the socket on which it serves a store."""

    def __init__(self, context: RankContext, config: str, folder: str) -> None:
        self.me = context.rank
        listener = listening_socket() if context.listen_fd is None else socket.socket(fileno=os.dup(context.listen_fd))
        self.port: int = listener.getsockname()[1]
        ours, self._service_end = socket.socketpair()
        grant = Grant(GpuId(f"n0/{2 + context.rank}"), NO_TOKEN)
        channel = WorkerChannel(ours, grant=grant, clock=SlotClock(time.monotonic_ns), store_listener=listener)
        self._worker = ScorerWorker(channel)
        self._config, self._folder = config, Path(folder)

    def ask(self, call: wire.WorkerCall) -> Any:
        """Make the call. Returns the answer's body."""
        (answer,) = self._worker.handle(call)
        return answer.body

    def refusal(self, call: wire.WorkerCall) -> str:
        try:
            self.ask(call)
        except CallRefused as refused:
            return str(refused)
        raise AssertionError(f"{call.WhichOneof('body')} was not refused")

    def joining(self, world: str, *, rank: int, port: int, tp: int = 2, stands_by: bool = False) -> wire.WorkerCall:
        seat = wire.Rendezvous(rank=rank, world_size=tp, host="127.0.0.1", port=port, timeout_s=20.0)
        start = wire.StartScorer(
            rendezvous=seat,
            layout=encode_layout(Layout(tp=tp)),
            config_json=self._config,
            world=world,
            stands_by=stands_by,
        )
        return wire.WorkerCall(start_scorer=start)

    def load(self) -> None:
        files = sorted(self._folder.iterdir())
        shards = wire.LoadShards(
            version=0,
            folder=str(self._folder),
            files=[file.name for file in files],
            checksums=[file_checksum(file) for file in files],
        )
        self.ask(wire.WorkerCall(load_shards=shards))

    def bits(self) -> Results:
        """The log-probabilities that this rank computes, by sample."""
        scored = self.ask(SCORE)
        return {
            f"{group.prompt}/{sample.id.draw}": np.array(sample.old_log_probs, dtype=np.float32)
            for group in scored.groups
            for sample in group.samples
        }


SCORE = wire.WorkerCall(score=wire.Score(groups=[generated(prompt) for prompt in range(3)]))


def wake(world: str) -> wire.WorkerCall:
    return wire.WorkerCall(start_scorer=wire.StartScorer(world=world))


def rest(world: str) -> wire.WorkerCall:
    return wire.WorkerCall(start_scorer=wire.StartScorer(world=world, stands_by=True))


def life(context: RankContext, *, config: str, folder: str) -> Results:
    """At work, twice at rest and at work again in the same world, in another one with the ranks swapped, and alone.

    The bits in each, what was refused, the process's private bytes before and at rest, and its descriptors.
    """
    rank = Rank(context, config, folder)
    results: Results = {}

    def note(what: str) -> None:
        results.update({f"{what}/{sample}": values for sample, values in rank.bits().items()})

    def refused(what: str, call: wire.WorkerCall) -> None:
        results[f"refused/{what}"] = np.array(rank.refusal(call))

    refused("wake in no world", wake("a"))
    refused("start without a world", wire.WorkerCall(start_scorer=wire.StartScorer(config_json=config)))
    rank.ask(rank.joining("a", rank=rank.me, port=context.port))
    ports: list[int] = [0, 0]
    dist.all_gather_object(ports, rank.port)
    rank.load()
    note("first")
    refused("second start", wake("a"))
    refused("second start with a rendezvous", rank.joining("a", rank=rank.me, port=context.port))
    note("after the refusals")
    for number in range(2):
        before = psutil.Process().memory_info()
        rested = rank.ask(rest("a"))
        results[f"freed bytes/{number}"] = np.array(before.rss - before.shared - rested.memory_bytes)
        results[f"held bytes/{number}"] = np.array(rested.held_bytes)
        refused("score at rest", SCORE)
        refused("another world", wake("b"))
        rank.ask(wake("a"))
        refused("score without weights", SCORE)
        rank.load()
        note(f"again {number}")
    rank.ask(rest("a"))
    rank.ask(rank.joining("b", rank=1 - rank.me, port=ports[1]))
    rank.load()
    note("swapped")
    rank.ask(rank.joining("alone", rank=0, port=rank.port, tp=1, stands_by=True))
    rank.ask(wake("alone"))
    rank.load()
    note("alone")
    rank.ask(wire.WorkerCall(start_scorer=wire.StartScorer(config_json=config, stands_by=True)))
    refused("score in no world", SCORE)
    return results


def moves(context: RankContext, *, config: str, folder: str) -> Results:
    """One world after another: the descriptors and threads of the process in each."""
    rank = Rank(context, config, folder)
    me, num_descriptors, num_threads = psutil.Process(), [], []
    ports: list[int] = [context.port, 0]
    for number in range(NUM_MOVES):
        first = number % 2
        rank.ask(rank.joining(f"world {number}", rank=abs(first - rank.me), port=ports[first]))
        rank.load()
        rank.bits()
        if number == 0:
            dist.all_gather_object(ports, rank.port)
        num_descriptors.append(me.num_fds())
        num_threads.append(me.num_threads())
    return {"descriptors": np.array(num_descriptors), "threads": np.array(num_threads)}
