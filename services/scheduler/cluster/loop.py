"""The I/O around `next_step`: reads the records and the agent, writes what changes, and asks the agent.

1. Read the records of all jobs, then what the agent has.
2. Set GPUs free that jobs without a place left behind.
3. Decide, and write the changed records by compare-and-set, all or none.
4. Ask the agent to start and stop jobs. It does each once.
5. Remove what jobs that ended have in NATS and Redis.
6. Bring the kept queue to what the store has.
7. Wait for a change: of the agent, of this replica's own API, and for `BEAT_S` for changes by others.

Nothing that decides is kept between two rounds, so any number of replicas may run: of two that place jobs after the
same round, one writes. A store that restarted is adopted first, with the reports of all gates of the cluster. What it
has lost it gets from the kept queue, before anybody else sees it open.

Invariants:
- Of two replicas that decide at once, one places a job. [test_cluster_loop: of_two_replicas]
- An agent or a store that does not answer is asked again. [test_cluster_loop: that_does_not_answer]
- A config that cannot be used ends its job and no other. [test_cluster_loop: that_cannot_be_used]
- A job whose start the agent refuses says why. [test_cluster_loop: agent_refuses_is_told_once]
- What a person was answered is kept, and a store that has lost it gets it again.
  [test_cluster_loop: as_it_was_in_a_new]
- Who asks waits for that. [test_cluster_loop: until_the_store_has_its_jobs]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import structlog

from services.scheduler.cluster.ownership import freed
from services.scheduler.cluster.queue import Cluster, Ran, Step, next_step
from tidegate.cluster.kept_queue import Kept, KeptQueue
from tidegate.cluster.placement import HostMemory, cluster_gpus, placed_config
from tidegate.cluster.slots import Slots
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.codec import decode_gate_state
from tidegate.config.job_config import JobConfig
from tidegate.launcher.outcome import End
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import (
    GateState,
    GpuBusy,
    GpuRecord,
    StaleToken,
    StoreDamaged,
    StoreNotAdopted,
    StoreUnavailable,
    VersionConflict,
)
from tidegate.ports.bus import BusUnavailable, JobStreams, TermRegister
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.ports.store import Store, Submissions
from tidegate.types import Drain, GpuId, JobId, NodeId, node_of
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc

BEAT_S = 1.0
LOST_AFTER_S = 30.0
"""A machine that is away for longer loses its jobs. Its processes end after `tidegate.machines.LOST_S` of silence, and
a job that waits for its machine could go on elsewhere meanwhile."""
START_S = 30.0
"""The agent tells the servers of the job. One that does not answer is given up after 5 s, for each change."""
RETRY_S = 0.2
ANSWER_S = 4.0
"""Below the deadline of a person's call."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the agent has told."""

    version: int
    slots: Slots
    ran: Mapping[JobId, Ran]
    gates: Mapping[GpuId, GateState]
    away: Sequence[cluster_pb2.NodeAway] = ()
    """The nodes whose gates nobody knows."""
    memory: tuple[HostMemory, ...] = ()
    places: cluster_pb2.Places = field(default_factory=cluster_pb2.Places)


class KeptQueueAway(RuntimeError):
    """The storage of the kept queue does not answer, or has no room."""


class ClusterLoop:
    def __init__(
        self,
        store: Store,
        terms: TermRegister,
        streams: JobStreams,
        agent: cluster_pb2_grpc.NodeAsyncStub,
        kept: KeptQueue,
    ) -> None:
        self.store = store
        self._kept = kept
        self._one_keeps = asyncio.Lock()
        self._keeping: set[asyncio.Task[None]] = set()
        self._is_open = asyncio.Event()
        self._terms = terms
        self._streams = streams
        self._agent = agent
        self.away: Sequence[cluster_pb2.NodeAway] = ()
        """The nodes of machines that did not answer in the last round: for people, nothing is decided by it."""
        self.memory: tuple[HostMemory, ...] = ()
        """As machines told it last, for what can never run."""
        self.places = cluster_pb2.Places()
        """Where the nodes are, for people."""
        self._num_rounds = 0
        self._wake = asyncio.Event()
        self._log = structlog.get_logger("cluster")

    async def run(self, stopping: asyncio.Event) -> None:
        """Rounds until `stopping` is set, which cancels the present one: that is safe at any point."""
        rounds = asyncio.create_task(self._rounds())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({rounds, stop}, return_when=asyncio.FIRST_COMPLETED)
        for task in (rounds, stop):
            task.cancel()
        await asyncio.gather(stop, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await rounds

    async def open(self) -> None:
        """Adopts the store where it is not open, registers the cluster's GPUs, and gives it back what it has lost.
        KeptQueueAway."""
        self._is_open.clear()
        try:
            kept = await asyncio.to_thread(self._kept.read)
        except OSError as error:
            raise KeptQueueAway(f"the queue cannot be read in {self._kept.folder}: {error}") from error
        for fault in kept.faults:
            self._log.error("a kept record is passed over", error=fault)
        # A new store on a new bus does not know under which term tokens were given.
        least_term = kept.term if (await self.store.identity()).is_open else kept.term + 1
        await adopt(self.store, self._terms, self._gate_reports, least_term=least_term)
        await self.store.register(cluster_gpus((await self._seen()).slots.nodes))
        await self._give_back(kept)
        self._is_open.set()
        try:
            await self.keep()
        except KeptQueueAway as error:  # a full disk: jobs can end
            self._log.error("the queue is not kept", error=str(error))

    async def _give_back(self, kept: Kept) -> None:
        stored = await self.store.submissions()
        lost = {job: each for job, each in kept.jobs.items() if job not in stored.texts}
        for job, each in lost.items():
            if each.config:
                await self.store.keep_config(job, each.config)
        if lost or not stored.rounds:
            if kept.paused:
                await self.store.pause(kept.paused)
            for node in kept.drained.keys() - stored.drained.keys():
                await self.store.drain_node(node, kept.drained[node])
        # Last, so that what failed is seen as lost again.
        if lost:
            texts = {job: each.record for job, each in lost.items()}
            await self.store.write_submissions(texts, expected=dict.fromkeys(texts))
            self._log.warning("the store got back jobs that it had lost", jobs=sorted(lost))

    async def keep(self) -> None:
        """Brings the kept queue to what the store has. KeptQueueAway, and as `submissions`."""
        # A call that is cut off must let nobody else write before its own write is over.
        task = asyncio.create_task(self._keep())
        self._keeping.add(task)
        task.add_done_callback(self._kept_by)
        await asyncio.shield(task)

    def _kept_by(self, task: asyncio.Task[None]) -> None:
        self._keeping.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it

    async def _keep(self) -> None:
        async with self._one_keeps:
            stored, identity = await self.store.submissions(), await self.store.identity()
            changed, configs = [], {}
            for each in self._kept.changed(stored.texts, parsed(stored.texts)):
                if self._kept.lacks_config(each):
                    config = await self.store.config_of(each.job, each.config)
                    if config is None:  # it has ended in between, or cannot run: then its end is kept
                        continue
                    configs[each.job] = config
                changed.append(each)
            try:
                await asyncio.to_thread(
                    self._kept.write,
                    stored.texts,
                    changed,
                    configs,
                    drained=stored.drained,
                    paused=stored.paused,
                    term=identity.term,
                )
            except OSError as error:
                raise KeptQueueAway(
                    f"the change was made, and cannot be kept in {self._kept.folder} ({error}): make room there, or "
                    "bring the storage back; it is tried again each second"
                ) from error

    async def submissions(self) -> dict[JobId, Submission]:
        """All records. StoreDamaged: one cannot be read. As `change` for a store that does not answer."""
        return parsed((await self._once_open(self.store.submissions)).texts)

    async def stored(self) -> Submissions:
        """Also the nodes that get no jobs, and why none starts. As `change` for a store that does not answer."""
        return await self._once_open(self.store.submissions)

    async def drain(self, node: NodeId, drain: Drain | None) -> Submissions:
        """What is stored after that. None gives the node back. As `change` for a store that does not answer."""
        return await self._changed(lambda: self.store.drain_node(node, drain))

    async def pause(self, reason: str) -> Submissions:
        """What is stored after that. Empty: jobs start again. As `change` for a store that does not answer."""
        return await self._changed(lambda: self.store.pause(reason))

    async def _changed(self, write: Callable[[], Awaitable[None]]) -> Submissions:
        deadline_s = time.monotonic() + ANSWER_S
        await self._once_open(write, deadline_s)
        self._wake.set()
        await self._once_open(self.keep, deadline_s)
        return await self._once_open(self.store.submissions, deadline_s)

    async def machine_of(self, node: NodeId) -> cluster_pb2.GetNodeMachineResponse:
        """What its machine has. PeerUnavailable, PeerRefused: it does not answer."""
        return await self._agent.GetMachineOfNode(cluster_pb2.GetNodeMachineRequest(node=node))

    async def gpus(self) -> dict[GpuId, GpuRecord]:
        """The ownership map. As `change` for a store that does not answer."""
        return await self._once_open(self.store.gpus)

    async def change(self, job: JobId, decide: Callable[[Submission | None], Submission]) -> Submission:
        """Writes what `decide` makes of a job's record, and wakes the loop. It is kept when this returns.

        StoreUnavailable, StoreNotAdopted: the store gave no answer for `ANSWER_S`, or was not open again.
        KeptQueueAway."""

        async def write() -> Submission:
            while True:
                texts = (await self.store.submissions()).texts
                found = decide(parsed(texts).get(job))
                with suppress(VersionConflict):
                    await self.store.write_submissions({job: found.to_json()}, expected={job: texts.get(job)})
                    return found

        deadline_s = time.monotonic() + ANSWER_S
        found = await self._once_open(write, deadline_s)
        self._wake.set()
        await self._once_open(self.keep, deadline_s)
        return found

    async def _once_open(self, call: Callable[[], Awaitable[T]], deadline_s: float | None = None) -> T:
        """The answer of a store that may have restarted: the loop opens it. None: within `ANSWER_S`."""
        deadline_s = time.monotonic() + ANSWER_S if deadline_s is None else deadline_s
        while True:
            try:
                await self._until_open(deadline_s)
                return await call()
            except (StoreNotAdopted, StoreUnavailable):
                if time.monotonic() > deadline_s:
                    raise
                self._wake.set()
            await asyncio.sleep(RETRY_S)

    async def _until_open(self, deadline_s: float) -> None:
        """A store that is open may lack jobs until it has got them back."""
        try:
            await asyncio.wait_for(self._is_open.wait(), max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            raise StoreNotAdopted("the store is being opened") from None

    async def _rounds(self) -> None:
        told = ""
        while True:
            try:
                if not self._is_open.is_set():
                    await self.open()
                version = await self.round()
                told = ""
                await self.keep()
                await self._wait(version)
            except StoreNotAdopted as error:
                self._log.warning("the store is not open", error=str(error))
                if not self._is_open.is_set():
                    await asyncio.sleep(RETRY_S)
                self._is_open.clear()
            except VersionConflict as error:
                self._log.info("another replica was first", error=str(error))
                if not self._is_open.is_set():
                    await asyncio.sleep(RETRY_S)
            except (StoreUnavailable, BusUnavailable, PeerUnavailable, StaleToken, GpuBusy) as error:
                if str(error) != told:  # it is tried again several times a second, perhaps for days
                    self._log.warning("no answer", error=str(error))
                told = str(error)
                await asyncio.sleep(RETRY_S)
            except KeptQueueAway as error:
                self._log.error("the queue is not kept", error=str(error))
                await asyncio.sleep(BEAT_S)
            except StoreDamaged as error:
                self._log.error("cannot decide", error=str(error))
                await asyncio.sleep(BEAT_S)

    async def round(self) -> int:
        """Decides once and carries it out. Returns the version of the agent that it was decided on."""
        self._wake.clear()
        stored = await self.store.submissions()
        texts = stored.texts
        before, seen = parsed(texts), await self._seen()
        self.away, self.memory, self.places = seen.away, seen.memory, seen.places
        placed = {each.job: each.gpus for each in before.values() if each.is_placed}
        away = {NodeId(each.node): each.seconds for each in seen.away}
        free = await freed(self.store, placed=placed, gates=seen.gates, away=away)
        kept = {NodeId(each.node) for each in seen.away if each.keeps_jobs}
        lost = {node for node, seconds in away.items() if seconds > LOST_AFTER_S} - kept
        now = await self.store.now_unix_ms()
        is_paused = bool(stored.paused)
        cluster = Cluster(seen.slots.nodes, free, seen.ran, stored.drained, lost, seen.memory, now, is_paused)
        step = next_step(before.values(), cluster)
        if step.changed:
            await self.store.write_submissions(
                {each.job: each.to_json() for each in step.changed},
                expected={each.job: texts[each.job] for each in step.changed},
                after_round=stored.rounds,
            )
            # What has ended first: its GPUs are what others were placed on.
            for each in sorted(step.changed, key=lambda each: each.state is not SubmissionState.ENDED):
                told = {"state": each.state, "gpus": each.gpus, "end": each.end, "message": each.message}
                self._log.info("job", job=each.job, **{name: value for name, value in told.items() if value})
            self._wake.set()
        records = dict(texts) | {each.job: each.to_json() for each in step.changed}
        await self._ask(step, seen, records)
        await self._clear(step, records)
        self._num_rounds += 1
        return seen.version

    async def _clear(self, step: Step, records: Mapping[JobId, bytes]) -> None:
        """Removes what ended jobs have in NATS and Redis, then the oldest records. `records`: as the store has
        them."""
        for each in step.clears:
            await self._streams.remove_job(each.job)
            cleared = replace(each, is_cleared=True).to_json()
            await self.store.clear_submission(each.job, cleared, expected=records[each.job])
        if step.dropped:
            expected = {job: records[job] for job in step.dropped}
            await self.store.write_submissions(dict.fromkeys(step.dropped), expected=expected)

    async def _ask(self, step: Step, seen: NodeView, records: Mapping[JobId, bytes]) -> None:
        """`records`: as the store has them."""
        for each in step.starts:
            try:
                text = await self.store.config_of(each.job, each.config)
                config = placed_config(JobConfig.from_json(text or ""), seen.slots, each.gpus)
            except ValueError as error:  # damaged, or nodes that it does not fit
                over = replace(each, state=SubmissionState.ENDED, gpus=(), end=End.FAILED)
                await self._tell(over, f"its config cannot be used here ({error}): submit it again", records)
                continue
            request = cluster_pb2.StartJobRequest(
                job=each.job,
                start=each.starts,
                config=config.to_json(),
                treatment=each.treatment,
                command=each.command,
                submitted_unix_ms=each.submitted_unix_ms,
            )
            try:
                await self._agent.StartJob(request, timeout=START_S)
            except PeerRefused as refused:
                await self._tell(each, f"cannot start yet: {refused.reason}; it is tried again each second", records)
        for each in step.cancels:
            reason = each.with_reason("by hand")
            await self._agent.StopJob(cluster_pb2.StopJobRequest(job=each.job, cancels=True, reason=reason))
        for job in step.stops:
            await self._agent.StopJob(cluster_pb2.StopJobRequest(job=job))

    async def _tell(self, each: Submission, why: str, records: Mapping[JobId, bytes]) -> None:
        """Writes it into the job's record, where that does not say so already."""
        if each.message == why:
            return
        told = replace(each, message=why).to_json()
        await self.store.write_submissions({each.job: told}, expected={each.job: records[each.job]})
        self._log.warning("job cannot start", job=each.job, state=each.state, message=why)

    async def _wait(self, version: int) -> None:
        """For a change of the agent, or of this replica's records, and for `BEAT_S` at most."""
        woken = asyncio.create_task(self._wake.wait())
        told = asyncio.create_task(self._told(version))
        try:
            await asyncio.wait({woken, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (woken, told):
                task.cancel()
            await asyncio.gather(woken, told, return_exceptions=True)
        if told.done() and not told.cancelled() and (error := told.exception()) is not None:
            raise error

    async def _told(self, version: int) -> None:
        request = cluster_pb2.GetNodeRequest(known_version=version, wait_s=BEAT_S, num_rounds=self._num_rounds)
        await self._agent.GetNode(request)

    async def _seen(self) -> NodeView:
        found = await self._agent.GetNode(cluster_pb2.GetNodeRequest(num_rounds=self._num_rounds))
        gates = [decode_gate_state(each) for each in found.gates]
        return NodeView(
            version=found.version,
            slots=Slots.of(
                {"nodes": dict(sorted(found.num_slots.items())), "device": found.device, "per_gpu": found.slots_per_gpu}
            ),
            ran={
                JobId(each.job): Ran(
                    each.start,
                    End(each.end) if each.end else None,
                    each.message,
                    has_begun=not each.has_not_begun,
                    iteration=each.iteration,
                )
                for each in found.jobs
            },
            gates={state.gpu: state for state in gates},
            away=found.away,
            memory=tuple(HostMemory(tuple(map(NodeId, each.nodes)), each.total_bytes) for each in found.host_memory),
            places=found.places,
        )

    async def _gate_reports(self) -> GateReports:
        seen = await self._seen()
        there = seen.slots.nodes.keys() - {NodeId(each.node) for each in seen.away}
        return {node: [each for each in seen.gates.values() if node_of(each.gpu) == node] for node in there}


_parse = lru_cache(maxsize=4096)(Submission.parse)
"""Most records are as they were a second ago."""


def parsed(texts: Mapping[JobId, bytes]) -> dict[JobId, Submission]:
    """StoreDamaged."""
    found: dict[JobId, Submission] = {}
    for job, text in texts.items():
        try:
            found[job] = _parse(text)
        except ValueError as error:
            raise StoreDamaged(
                f"the record of job {job} in the store is damaged ({error}): end the cluster with tidegate down, and "
                "remove its servers/ folder: the next tidegate up has the queue from its files"
            ) from error
    return found
