"""The scheduler's shell: load the state, evolve it by the next event, decide, check, write, issue.

It keeps nothing that it cannot rebuild: any number of replicas run, and any goes on where another stopped; a state that
the store lost is made again from the stream. Order of a turn: the event is folded; where it is more than progress, or
a decision is due (`pacing`), ownership is read and the decision made; it is written with the state by compare-and-set,
the event is acknowledged, and only then commands go out. Invariants: an event is acknowledged after its state is
written; a command goes out after the state says so; a state that breaks an invariant is never written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import structlog

from services.scheduler.decide.decision import Decision, after_decision, decide
from services.scheduler.decide.pacing import is_structural, next_decision_ms
from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.recovering import recovered
from services.scheduler.policy import Policy
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state, event_of
from services.scheduler.shell.issuer import Issuer
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from services.scheduler.state.invariants import check
from tidegate.codec import WireError
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable, VersionConflict
from tidegate.ports.bus import BusUnavailable, EventConsumer, EventDelivery, EventLog, TermRegister
from tidegate.ports.store import JobState, Store
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.cancelling import end_task
from tidegate.types import JobId
from tidegate.v1 import events_pb2

BEAT_S = 1.0
"""How often leases are looked at; an expiry is told at most this much late."""
RETRY_S = 0.2
"""Pause after the store or the bus did not answer."""


class StateBroken(AssertionError):
    """A state that breaks an invariant: never written, and nothing is issued on it."""


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """What the shell works with."""

    store: Store
    events: EventLog
    consumer: EventConsumer
    terms: TermRegister
    announcer: Announcer
    issuer: Issuer
    ask_gates: Callable[[ClusterState | None], Awaitable[GateReports]]


class SchedulerService:
    """See the module."""

    def __init__(self, job: JobId, ports: SchedulerPorts, policy: Policy, *, decide_every_s: float) -> None:
        self._job = job
        self._ports = ports
        self._policy = policy
        self._decide_every_ms = round(decide_every_s * 1000)
        self._decided_ms: int | None = None
        self._state: ClusterState | None = None
        self._written = JobState(payload=b"", write=0, version=0)
        self._reason = ""
        self._next_beat_s = 0.0
        self._has_news = False
        self._log = structlog.get_logger("scheduler")

    @property
    def state(self) -> ClusterState | None:
        """As last read or written by this replica."""
        return self._state

    @property
    def reason(self) -> str:
        """Why the last decision was what it was."""
        return self._reason

    async def run(self, stopping: asyncio.Event) -> None:
        """Turn after turn until `stopping` is set; the turn under way then breaks off, which is safe at any point."""
        turns = asyncio.create_task(self._turns(), name="turns")
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({turns, stop}, return_when=asyncio.FIRST_COMPLETED)
        await end_task(stop)
        await end_task(turns)
        await self._ports.issuer.aclose()
        if not turns.cancelled():
            turns.result()

    async def _turns(self) -> None:
        while True:
            known = self._state
            try:
                await self._turn()
            except StoreNotAdopted as error:
                self._log.warning("adopting the store", error=str(error))
                self._state = None
                await self._adopt(known)
            except VersionConflict as error:
                self._log.info("another replica was first", error=str(error))
                self._state = None
            except (StoreUnavailable, BusUnavailable) as error:
                # The outcome is unknown: read again, decide again.
                self._log.warning("no answer", error=str(error))
                self._state = None
                await asyncio.sleep(RETRY_S)

    async def _turn(self) -> None:
        before = await self._loaded()
        now_ms = await self._ports.store.now_unix_ms()
        delivery = await self._ports.consumer.next(timeout_s=self._wait_s(before, now_ms))
        try:
            if delivery is not None and delivery.sequence > before.applied_seq + 1:
                # Another replica applied what lies between; if none did that the store knows of, `_evolved` does.
                self._state = None
                before = await self._loaded()
            await self._apply(before, delivery)
        except (StoreNotAdopted, StoreUnavailable, VersionConflict):
            if delivery is not None:
                await delivery.nak()
            raise

    async def _apply(self, before: ClusterState, delivery: EventDelivery | None) -> None:
        state = await self._evolved(before, delivery) if delivery else before
        now_ms = await self._ports.store.now_unix_ms()
        if delivery is None or self._is_due(before, state, now_ms):
            state = await self._with_ownership(state)
        await self._look_at_leases(state)
        if not self._is_due(before, state, now_ms):
            await self._write(before, state, delivery)
            return
        decision = decide(state, now_ms, policy=self._policy)
        after = after_decision(state, decision, now_ms)
        await self._write(before, after, delivery)
        self._decided_ms = now_ms
        self._tell(decision)
        await self._issue(after, decision)

    def _is_due(self, before: ClusterState, state: ClusterState, now_ms: int) -> bool:
        """Whether to decide; what another replica left undone shows when ownership is read on a beat."""
        return self._has_news or is_structural(before, state) or now_ms >= self._next_decision_ms(state, now_ms)

    def _next_decision_ms(self, state: ClusterState, now_ms: int) -> int:
        """At once in a replica that has not decided yet."""
        if self._decided_ms is None:
            return now_ms
        return next_decision_ms(state, decided_ms=self._decided_ms, decide_every_ms=self._decide_every_ms)

    async def _loaded(self) -> ClusterState:
        if self._state is None:
            found = await self._ports.store.load(self._job)
            self._written = found or JobState(payload=b"", write=0, version=0)
            self._state = decode_state(found.payload) if found else ClusterState(job=self._job)
        return self._state

    def _wait_s(self, state: ClusterState, now_ms: int) -> float:
        if self._has_news:
            return 0.0
        if state.phase in TERMINAL:
            return BEAT_S
        return min(BEAT_S, max(0.0, (self._next_decision_ms(state, now_ms) - now_ms) / 1000))

    async def _evolved(self, state: ClusterState, delivery: EventDelivery) -> ClusterState:
        missed = await self._missed(state, before=delivery.sequence)
        if missed:
            self._log.warning("the store lost the state", applied_seq=state.applied_seq, num_events=len(missed))
            state = recovered(state, missed)
        try:
            return evolve(state, event_of(delivery.event, stream_sequence=delivery.sequence))
        except WireError as error:
            await delivery.dead_letter(str(error))
            return state

    async def _missed(self, state: ClusterState, *, before: int) -> list[ev.Event]:
        """Events that were acknowledged, and that the state does not hold."""
        missed: list[ev.Event] = []
        if before <= state.applied_seq + 1:
            return missed
        async with aclosing(self._ports.events.read(self._job, after_sequence=state.applied_seq)) as events:
            async for sequence, message in events:
                if sequence >= before:
                    break
                # What cannot be understood was set aside when it came.
                with suppress(WireError):
                    missed.append(event_of(message, stream_sequence=sequence))
        return missed

    async def _with_ownership(self, state: ClusterState) -> ClusterState:
        """What the store says of the job's GPUs and transitions, folded like an event when it is news."""
        if state.spec is None:
            return state
        slots = state.spec.gpus
        await self._ports.store.register(tuple(gpu for gpu in slots if gpu not in state.gpus))
        gpus = await self._ports.store.gpus()
        observed = ev.OwnershipObserved(
            gpus=tuple(gpus[gpu] for gpu in slots),
            transitions=await self._ports.store.transitions(self._job),
        )
        return evolve(state, ev.Event(job=self._job, source="scheduler", boot=0, sequence=0, body=observed))

    async def _look_at_leases(self, state: ClusterState) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        for holder in await self._ports.store.expired():
            known = state.instances.get(holder)
            if known is not None:
                lost = events_pb2.InstanceLost(instance=holder, boot=known.boot)
                await self._ports.announcer.tell(lost, incarnation=state.incarnation)
                await self._ports.store.release(holder)
        for name, instance in sorted(state.instances.items()):
            if not instance.living:
                # It may have renewed meanwhile: without a lease it joins again.
                await self._ports.store.release(name)

    async def _write(self, before: ClusterState, after: ClusterState, delivery: EventDelivery | None) -> None:
        if after != before:
            if violations := check(before, after):
                raise StateBroken("; ".join(str(violation) for violation in violations))
            self._written = await self._ports.store.save(
                self._job, encode_state(after), expected_write=self._written.write, version=after.version
            )
        self._state = after
        if delivery is not None:
            await delivery.ack()

    def _tell(self, decision: Decision) -> None:
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._log.info(
                "decided", reason=decision.reason, commands=[str(cmd.command_id(c)) for c in decision.commands]
            )

    async def _issue(self, state: ClusterState, decision: Decision) -> None:
        self._has_news = False
        for command in decision.commands:
            await self._ports.issuer.issue(command, state)
            # What the store now says, and what the job's own end leads to, is the next turn's to see.
            self._has_news = self._has_news or isinstance(command, cmd.StoreCommand | cmd.StopJob)

    async def _adopt(self, state: ClusterState | None) -> None:
        """`state` tells which instances' gates can be asked."""
        try:
            await adopt(self._ports.store, self._ports.terms, lambda: self._ports.ask_gates(state))
        except (StoreNotAdopted, StoreUnavailable, BusUnavailable, VersionConflict) as error:
            # Not adopted: it went away again meanwhile.
            self._log.warning("not adopted yet", error=str(error))
            await asyncio.sleep(RETRY_S)
