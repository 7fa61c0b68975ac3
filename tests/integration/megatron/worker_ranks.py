"""The rank processes of the actor worker's tests: real call handlers, driven by a script that all processes share."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from services.actor.worker import TrainerWorker
from tests.component_bench import job_config
from tests.integration.megatron import small_job
from tests.ranks import RankContext, Results
from tidegate.codec import encode_layout
from tidegate.config.job_config import JobConfig
from tidegate.elastic.epoch.rendezvous import connect_store, listening_socket
from tidegate.job import load_job, state_folder
from tidegate.runtime.slot_clock import SlotClock
from tidegate.runtime.worker import CallRefused, WorkerChannel
from tidegate.types import NO_TOKEN, GpuId, Grant, Layout, NodeId
from tidegate.v1 import workers_pb2 as wire

GPUS = ("n0/0", "n0/1", "n1/0", "n1/1")


class Member:
    """One worker and its results. `losses` has NaN for updates in which it had no part."""

    def __init__(self, context: RankContext, config: JobConfig) -> None:
        self.config = config
        self.losses: list[float] = []
        self.me = context.rank
        self._context = context
        listener = None if context.listen_fd is None else socket.socket(fileno=context.listen_fd)
        ours, self._service_end = socket.socketpair()
        grant = Grant(GpuId(GPUS[context.rank]), NO_TOKEN)
        clock = SlotClock(time.monotonic_ns)
        self.worker = TrainerWorker(WorkerChannel(ours, grant=grant, clock=clock, store_listener=listener))

    def ask(self, call: wire.WorkerCall) -> Any:
        """Make the call. Returns the answer's body."""
        (answer,) = self.worker.handle(call)
        return answer.body

    def refusal(self, call: wire.WorkerCall) -> str:
        try:
            self.ask(call)
        except CallRefused as refused:
            return str(refused)
        raise AssertionError(f"{call.WhichOneof('body')} was not refused")

    def join(self, epoch: int, members: Sequence[int]) -> None:
        self.ask(self.joining(epoch, members, port=self._context.port, timeout_s=20.0))

    def joining(self, epoch: int, members: Sequence[int], *, port: int, timeout_s: float) -> wire.WorkerCall:
        joined = wire.JoinWorld(epoch=epoch, members=members, config_json=self.config.to_json())
        seat = wire.Rendezvous(
            rank=members.index(self.me), world_size=len(members), host="127.0.0.1", port=port, timeout_s=timeout_s
        )
        joined.rendezvous.CopyFrom(seat)
        return wire.WorkerCall(join_world=joined)

    def start(self, ranks: Sequence[int], checkpoint: str = "", **layout: int) -> None:
        start = wire.StartActor(layout=encode_layout(Layout(**layout)), ranks=ranks, checkpoint_dir=checkpoint)
        self.ask(wire.WorkerCall(start_actor=start))

    def train(self, ranks: Sequence[int]) -> None:
        """Make the call twice, as after a death that interrupted another member's call."""
        loss = math.nan
        if self.me in ranks:
            report, again = (self.ask(self.training(len(self.losses))) for _ in range(2))
            assert report == again
            assert report.learning_rates == [learning_rate(len(self.losses))]
            loss = report.loss
        self.losses.append(loss)

    def training(self, update: int, *, lr_before: str | None = None) -> wire.WorkerCall:
        samples = [
            wire.TrainSample(
                prompt_tokens=sample.prompt_tokens,
                response_tokens=sample.response_tokens,
                advantage=sample.advantage,
                old_log_probs=sample.old_log_probs,
                reference_log_probs=sample.reference_log_probs,
                engine_log_probs=sample.engine_log_probs,
                masked=sample.masked,
            )
            for sample in small_job.recorded_samples(seed=update)
        ]
        train = wire.Train(update_id=f"1.0.{update}", samples=samples, learning_rate=learning_rate(update))
        train.lr_before = lr_mark(update) if lr_before is None else lr_before
        train.lr_after = lr_mark(update + 1)
        return wire.WorkerCall(train=train)

    def repeated_loss(self) -> float:
        """The loss of the last update when it is requested again. The state already includes that update."""
        report = self.ask(self.training(len(self.losses) - 1))
        assert report.committed
        assert report.lr_mark == lr_mark(len(self.losses))
        assert report.learning_rates == [learning_rate(len(self.losses) - 1)], (
            "the rates are the optimizer's, also on a later member"
        )
        return float(report.loss)

    def meet(self, at: str, members: Sequence[int]) -> None:
        """Return once all of these have reached this point."""
        store = connect_store(self._context.port, timeout_s=20.0, host="127.0.0.1")
        store.set(f"{at}/{self.me}", "")
        store.wait([f"{at}/{member}" for member in members])

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare(
        self, name: str, ranks: Sequence[int], portions: Sequence[wire.WorkerCall] = (), /, **layout: int
    ) -> wire.WorkerCall:
        request = wire.PrepareReshard(id=name, layout=encode_layout(Layout(**layout)), ranks=ranks)
        request.portions.extend(portion.accumulate for portion in portions)
        return wire.WorkerCall(prepare_reshard=request)

    def reshard(
        self, name: str, ranks: Sequence[int], portions: Sequence[wire.WorkerCall] = (), /, **layout: int
    ) -> Any:
        """The report of the first phase, then the second phase. Both calls are made twice, as by a caller without an
        answer.
        """
        report, again = (self.ask(self.prepare(name, ranks, portions, **layout)) for _ in range(2))
        assert report == again
        for _ in range(2):
            self.ask(wire.WorkerCall(commit_reshard=wire.CommitReshard(id=name)))
        return report


def learning_rate(update: int) -> float:
    """A different rate for each update."""
    return 1e-3 * 0.9**update


def lr_mark(num_updates: int) -> str:
    """A mark of learning-rate progress, as a ledger writes it."""
    return f"{num_updates} steps after {num_updates} updates" if num_updates else ""


def _config(folder: str, memory: str, *, slots_per_gpu: int = 1) -> JobConfig:
    actor = {"learning_rate": 1e-3, "layout": {"dp": 2}, "standby": "4-5"}
    cluster = {"slots_per_gpu": slots_per_gpu}
    config = job_config(Path(folder), actor=actor, cluster=cluster, runtime={"host_memory_root": memory})
    load_job(config)
    return config


def fixed(context: RankContext, *, folder: str, memory: str, num_updates: int) -> Results:
    """The losses of one rank that is never resized."""
    member = Member(context, _config(folder, memory))
    member.join(1, [0])
    member.start([0])
    for _ in range(num_updates):
        member.train([0])
    member.worker.close()
    return {"losses": np.array(member.losses)}


def resized(context: RankContext, *, folder: str, memory: str, slots_per_gpu: int = 1) -> Results:
    """Starts on 2 of 4 members, grows, moves, aborts, and shrinks in an epoch without one member. Updates lie
    between.
    """
    member = Member(context, _config(folder, memory, slots_per_gpu=slots_per_gpu))
    everyone = [0, 1, 2, 3]
    refusals, certificates, moved, again = [], [], [], []
    member.join(1, everyone)
    backend = dist.get_backend()
    member.start([0, 1], dp=2)
    member.train([0, 1])
    member.train([0, 1])
    if member.me == 3:
        refusals.append(member.refusal(member.training(len(member.losses))))
    for name, ranks, layout in (("grow", everyone, {"pp": 2, "dp": 2}), ("move", [3, 2], {"pp": 2})):
        report = member.reshard(name, ranks, **layout)
        certificates.append(report.certificate)
        moved.append((report.moved_bytes, report.minimum_bytes))
        again.append(member.repeated_loss() if member.me in ranks else math.nan)
        member.train(ranks)
    refusals.append(member.refusal(member.prepare("illegal", everyone, pp=4)))
    member.ask(member.prepare("given up", [0], dp=1))
    if member.me == 0:
        refusals.append(member.refusal(wire.WorkerCall(commit_reshard=wire.CommitReshard(id="another"))))
    member.ask(wire.WorkerCall(abort_reshard=wire.AbortReshard(id="given up")))
    member.train([3, 2])
    if member.me != 1:
        member.join(2, [0, 2, 3])
        if member.me == 3:
            refusals.append(member.refusal(member.training(len(member.losses))))
        member.reshard("shrink", [0], dp=1)
        if member.me == 0:
            update = len(member.losses)
            refusals.append(member.refusal(member.training(update, lr_before=lr_mark(update - 1))))
        member.train([0])
        shared = state_folder(member.config, NodeId("n0")).glob("epoch*")
        files = ["-".join(path.name.split("-")[:2]) for path in shared]
        member.worker.close()
    return {
        "backend": np.array(backend),
        "losses": np.array(member.losses),
        "again": np.array(again),
        "refusals": np.array(refusals),
        "certificates": np.array(certificates),
        "moved": np.array(moved),
        "files": np.array(files if member.me == 0 else []),
    }


def standby_member_dies(context: RankContext, *, folder: str, memory: str) -> Results:
    """A standby member is killed before a reshard. The others abort it, and continue training in the next epoch."""
    member = Member(context, _config(folder, memory))
    member.join(1, [0, 1, 2])
    member.start([0, 1], dp=2)
    member.train([0, 1])
    if member.me == 2:
        member.die()
    abort = wire.WorkerCall(abort_reshard=wire.AbortReshard(id="given up"))
    refusals = [member.refusal(call) for call in (member.prepare("given up", [0, 1], pp=2), abort, member.training(1))]
    member.join(2, [0, 1])
    member.ask(abort)
    member.reshard("back", [0, 1], dp=2)
    member.train([0, 1])
    member.worker.close()
    return {"losses": np.array(member.losses), "refusals": np.array(refusals)}


def replaced_after_commit(context: RankContext, *, folder: str) -> Results:
    """Member 1 is killed when a move is prepared on all. The others switch, and member 3 replaces it."""
    member = Member(context, _config(folder, str(context.tmpfs)))
    in_epoch = True
    if member.me == 3:
        member.train([])
    else:
        member.join(1, [0, 1, 2])
        member.start([0, 1], dp=2)
        member.train([0, 1])
        member.ask(member.prepare("move", [2, 1], pp=2))
        member.meet("prepared", [0, 1, 2])
        if member.me == 1:
            member.die()
        in_epoch = member.ask(wire.WorkerCall(commit_reshard=wire.CommitReshard(id="move"))).in_epoch
    member.join(2, [0, 2, 3])
    member.reshard("mend", [2, 3], pp=2)
    member.train([2, 3])
    member.worker.close()
    return {"losses": np.array(member.losses), "in_epoch": np.array(in_epoch)}


def replaced_twice(context: RankContext, *, folder: str) -> Results:
    """Member 1 is killed before a reshard. Member 3, which replaces it, is killed when that reshard is prepared."""
    member = Member(context, _config(folder, str(context.tmpfs)))
    abort = wire.WorkerCall(abort_reshard=wire.AbortReshard(id="mend"))
    if member.me == 3:
        member.train([])
    else:
        member.join(1, [0, 1, 2])
        member.start([0, 1], dp=2)
        member.train([0, 1])
        if member.me == 1:
            member.die()
        member.refusal(member.prepare("move", [2, 1], pp=2))
    member.join(2, [0, 2, 3])
    member.ask(member.prepare("mend", [0, 3], dp=2))
    member.meet("prepared", [0, 2, 3])
    if member.me == 3:
        member.die()
    member.ask(abort)
    member.join(3, [0, 2])
    member.reshard("mend again", [0, 2], dp=2)
    member.train([0, 2])
    member.worker.close()
    return {"losses": np.array(member.losses)}


def in_portions(context: RankContext, *, folder: str) -> Results:
    """An update in portions, and one whose portions a reshard drops. Calls that count other portions are refused."""
    member = Member(context, _config(folder, folder))
    member.join(1, [0, 1])
    member.start([0, 1], dp=2)
    refusals = [member.refusal(_portion(member.training(0), 0, 4, num_before=1))]
    for number in range(2):
        member.ask(_portion(member.training(0), 4 * number, 4 * number + 4, num_before=number))
    refusals.append(member.refusal(_rest(member.training(0), 8, num_portions=1)))
    losses = [member.ask(_rest(member.training(0), 8, num_portions=2)).loss]
    member.ask(_portion(member.training(1), 0, 4, num_before=0))
    member.reshard("move", [1, 0], pp=2)
    refusals.append(member.refusal(_rest(member.training(1), 4, num_portions=1)))
    losses.append(member.ask(member.training(1)).loss)
    member.ask(_portion(member.training(2), 0, 8, num_before=0))
    # A call for the whole minibatch drops the portions before it.
    losses.append(member.ask(member.training(2)).loss)
    member.worker.close()
    return {"losses": np.array(losses), "refusals": np.array(refusals)}


def carried_portions(context: RankContext, *, folder: str, memory: str) -> Results:
    """An update whose portions three layouts train, the last of them on a member that had no part before, and one whose
    reshard is aborted. The next update is in one piece. Other portions than those here are refused."""
    member = Member(context, _config(folder, memory))
    member.join(1, [0, 1, 2])
    member.start([0, 1], dp=2)
    first, second = (_portion(member.training(0), 4 * number, 4 * number + 4, num_before=number) for number in range(2))
    if member.me != 2:
        member.ask(first)
    refusals = [member.refusal(member.prepare("others", [2, 0], [first, second], pp=2))]
    member.reshard("grow", [2, 0], [first], pp=2)
    if member.me != 1:
        member.ask(second)
    member.reshard("move", [2], [first, second])
    losses = [math.nan, math.nan]
    if member.me == 2:
        losses[0] = member.ask(_rest(member.training(0), 8, num_portions=2)).loss
        member.ask(_portion(member.training(1), 0, 4, num_before=0))
    again = _portion(member.training(1), 0, 4, num_before=0)
    member.ask(member.prepare("given up", [0, 1], [again], dp=2))
    member.ask(wire.WorkerCall(abort_reshard=wire.AbortReshard(id="given up")))
    if member.me == 2:
        losses[1] = member.ask(_rest(member.training(1), 4, num_portions=1)).loss
    member.losses.extend(losses)
    member.reshard("back", [0, 1], dp=2)
    member.train([0, 1])
    member.worker.close()
    return {"losses": np.array(member.losses), "refusals": np.array(refusals)}


def _portion(whole: wire.WorkerCall, first: int, stop: int, *, num_before: int) -> wire.WorkerCall:
    train = whole.train
    portion = wire.Accumulate(
        update_id=train.update_id,
        samples=train.samples[first:stop],
        bundle_sizes=[small_job.GROUP_SIZE] * ((stop - first) // small_job.GROUP_SIZE),
        num_before=num_before,
        lr_before=train.lr_before,
    )
    return wire.WorkerCall(accumulate=portion)


def _rest(whole: wire.WorkerCall, first: int, *, num_portions: int) -> wire.WorkerCall:
    rest = wire.Train()
    rest.CopyFrom(whole.train)
    del rest.samples[:first]
    rest.num_portions = num_portions
    rest.bundle_sizes.extend([small_job.GROUP_SIZE] * (len(rest.samples) // small_job.GROUP_SIZE))
    return wire.WorkerCall(train=rest)


def suspended(context: RankContext, *, folder: str, memory: str) -> Results:
    """Two members train and are suspended. Member 2 goes on with their state, after a suspension that is given up."""
    member = Member(context, _config(folder, memory))
    everyone = [0, 1, 2]
    refusals, freed = [], []
    member.join(1, everyone)
    refusals.append(member.refusal(_suspension("prepare", "too early")))
    member.start([0, 1], dp=2)
    refusals.append(member.refusal(_suspension("commit", "unknown")))
    member.ask(_suspension("prepare", "given up"))
    for _ in range(2):
        member.ask(_suspension("abort", "given up"))
    member.train([0, 1])
    member.ask(member.prepare("undecided", [2], dp=1))
    refusals.append(member.refusal(_suspension("prepare", "too early")))
    member.ask(wire.WorkerCall(abort_reshard=wire.AbortReshard(id="undecided")))
    for _ in range(2):
        member.ask(_suspension("prepare", "suspend"))
    report, again = (member.ask(_suspension("commit", "suspend")) for _ in range(2))
    assert report == again
    freed.append((report.freed_bytes, report.held_bytes, report.kept_bytes))
    refusals.append(member.refusal(_suspension("abort", "suspend")))
    if member.me != 2:
        refusals.append(member.refusal(member.training(1)))
    member.reshard("resume", [2], dp=1)
    member.train([2])
    member.worker.close()
    return {"losses": np.array(member.losses), "refusals": np.array(refusals), "freed": np.array(freed)}


def _suspension(step: str, name: str) -> wire.WorkerCall:
    match step:
        case "prepare":
            return wire.WorkerCall(prepare_suspension=wire.PrepareSuspension(id=name))
        case "commit":
            return wire.WorkerCall(commit_suspension=wire.CommitSuspension(id=name))
        case _:
            return wire.WorkerCall(abort_suspension=wire.AbortSuspension(id=name))


def without_a_store(context: RankContext, *, folder: str) -> Results:
    """The server of the first epoch's store is dead. The second epoch needs no server."""
    member = Member(context, _config(folder, str(context.tmpfs)))
    with listening_socket() as nobody:
        port = nobody.getsockname()[1]
    refusal = member.refusal(member.joining(1, [1, 0], port=port, timeout_s=1.0))
    member.join(2, [0])
    member.start([0])
    member.train([0])
    member.worker.close()
    return {"losses": np.array(member.losses), "refusal": np.array(refusal)}
