"""The scheduler's shell: it does the I/O around each `turn`.

1. Load the state, and wait for the next event. Those that wait behind it are read along.
2. Begin the turn: the events are folded.
3. Read ownership where a decision is due (`pacing`), and on a beat.
4. Finish the turn: decide.
5. Write the state by compare-and-set.
6. Issue the commands.
7. Acknowledge the event.

A turn with figures alone (progress, backlogs, pictures) on which no decision is due ends after step 2: they are written
with the next decision, or after a beat. A replica that does not have them reads them again from the stream, which keeps
the last of each. So a thousand figures a second delay no other event by their writes.

The service keeps nothing that it cannot rebuild. Any number of replicas run, and each can go on where another stopped.
After the store lost the state, a replica rebuilds it from the stream.

A resumed job has the state of the start before. Until the new launcher submits the job, events are only folded into it:
nothing is decided. The workers of that start are gone with their launcher, and their GPUs are no losses of this one.

Invariants:
- A resume counts nothing that the start before it left as a loss. [test_service: resume_after_a_stop_counts_no_restart]
- An event that is no figure is acknowledged after its state is written. [test_service: acknowledged_after_the_state]
- Events that were read along count once. [test_service: events_that_wait_are_applied_together]
- Figures that were not written cost a job nothing. [test_service: figures_that_were_not_written]
- A command goes out after the state that contains it is written. [test_service: a_command_goes_out_after]
- A state that breaks an invariant is never written. [test_service: breaks_an_invariant_is_never_written]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

import structlog

from services.scheduler.decide.chronicle import Chronicle, Line, chronicle
from services.scheduler.decide.decision import Decision
from services.scheduler.decide.pacing import Pace
from services.scheduler.decide.turn import Turn, begin, checked, finish
from services.scheduler.policy import Policy
from services.scheduler.shell.codecs.state_codec import StateEncoder, decode_state, event_of
from services.scheduler.shell.issuer import Issuer
from services.scheduler.shell.store_clock import StoreClock
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from tidegate.codec import WireError
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import (
    StoreNotAdopted,
    StoreUnavailable,
    VersionConflict,
    transition_number,
)
from tidegate.ports.bus import BusUnavailable, EventConsumer, EventDelivery, EventLog, TermRegister
from tidegate.ports.store import JobState, Store
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.cancellation import end_task
from tidegate.types import JobId
from tidegate.v1 import events_pb2

BEAT_S = 1.0
"""Period at which leases are read. The report of an expiry is late by at most this, and a figure's write."""
KEPT_TRANSITIONS = 256
"""Closed transitions that the store keeps: far more than a lead or a replica can be behind."""
FORGET_EVERY = 64
"""Transitions from one removal of older ones to the next. It reads all that are kept."""
RETRY_S = 0.2
"""Pause after a call that the store or the bus did not answer."""


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    store: Store
    events: EventLog
    consumer: EventConsumer
    terms: TermRegister
    announcer: Announcer
    issuer: Issuer
    ask_gates: Callable[[ClusterState | None], Awaitable[GateReports]]
    record: Callable[[Sequence[Line]], None]
    """Appends lines to the job's log of decisions and moves. OSError."""


class SchedulerService:
    def __init__(
        self, job: JobId, ports: SchedulerPorts, policy: Policy, *, decide_every_s: float, launcher_boot: int = 0
    ) -> None:
        """`launcher_boot`: the boot of the launcher that starts this replica. 0: it waits for none."""
        self._job = job
        self._boot = launcher_boot
        self._ports = ports
        self._policy = policy
        self._pace = Pace(round(decide_every_s * 1000))
        self._state: ClusterState | None = None
        self._written = JobState(payload=b"", write=0, version=0)
        self._stored: ClusterState | None = None
        """The state in the store, as far as this replica knows. Its own may have some figures more."""
        self._clock = StoreClock(ports.store)
        self._encoder = StateEncoder()
        self._next_write_s = 0.0
        self._reason = ""
        self._chronicle = Chronicle()
        self._next_beat_s = 0.0
        self._log = structlog.get_logger("scheduler")

    @property
    def state(self) -> ClusterState | None:
        """The state that this replica read or wrote last."""
        return self._state

    @property
    def reason(self) -> str:
        """The reason of the last decision."""
        return self._reason

    async def run(self, stopping: asyncio.Event) -> None:
        """Take turns until `stopping` is set. Then cancel the present turn: that is safe at any point."""
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
                # The outcome is unknown, so read and decide again.
                self._log.warning("no answer", error=str(error))
                self._state = None
                await asyncio.sleep(RETRY_S)

    async def _turn(self) -> None:
        before = await self._loaded()
        delivery = await self._ports.consumer.next(timeout_s=self._wait_s(before, await self._clock.now_ms()))
        try:
            if delivery is not None and _lacks_events_before(before, delivery):
                # Another replica applied the events in between. If the store does not show that, `_begun` applies them.
                self._state = None
                before = await self._loaded()
            await self._apply(before, delivery)
        except (StoreNotAdopted, StoreUnavailable, VersionConflict):
            if delivery is not None:
                await delivery.nak()
            raise

    async def _apply(self, before: ClusterState, delivery: EventDelivery | None) -> None:
        begun, is_of_figures = await self._begun(before, delivery) if delivery else (begin(before, ()), False)
        if begun.after.is_of_start_before(self._boot):
            await self._write(begun)
        elif delivery is not None and not self._pace.is_due(before, begun.after, await self._clock.now_ms()):
            await self._look_at_leases(begun.after)
            if not is_of_figures or asyncio.get_running_loop().time() >= self._next_write_s:
                await self._write(begun)
            self._state = begun.after
        else:
            # A beat reads ownership too: it shows the work that another replica did not finish.
            await self._decide(begun)
        if delivery is not None:
            await delivery.ack()

    async def _decide(self, begun: Turn) -> None:
        now_ms, observed = await self._ownership(begun.after)
        made = finish(begun, now_ms, self._policy, observed=observed, pace=self._pace)
        await self._look_at_leases(made.folded)
        await self._write(made)
        # Before the commands: a scheduler that dies among them must not leave a transition that nobody can explain.
        self._record(chronicle(made, now_ms, before=self._chronicle, observed=observed))
        if made.decision is not None:
            self._pace = replace(self._pace, decided_ms=now_ms)
            await self._issue(made.after, made.decision)
            self._log_reason(made.decision)

    async def _loaded(self) -> ClusterState:
        if self._state is None:
            found = await self._ports.store.load(self._job)
            self._written = found or JobState(payload=b"", write=0, version=0)
            self._state = self._stored = decode_state(found.payload) if found else ClusterState(job=self._job)
        return self._state

    def _wait_s(self, state: ClusterState, now_ms: int) -> float:
        if state.is_of_start_before(self._boot):
            return BEAT_S
        if state.phase in TERMINAL and not self._pace.has_news:
            return BEAT_S
        return min(BEAT_S, max(0.0, (self._pace.next_decision_ms(state, now_ms) - now_ms) / 1000))

    async def _begun(self, state: ClusterState, delivery: EventDelivery) -> tuple[Turn, bool]:
        """The turn with the events folded, and whether all of them are figures."""
        missed = await self._missed(state, before=delivery.sequence) if _lacks_events_before(state, delivery) else []
        events = await self._delivered(state, delivery)
        is_lost = not all(isinstance(each.body, ev.Figure) for each in missed)
        if is_lost:
            self._log.warning("the store lost the state", applied_seq=state.applied_seq, num_events=len(missed))
            return begin(state, events, missed=missed), False
        # Figures alone: a replica had them and did not write them.
        return begin(state, (*missed, *events)), all(isinstance(each.body, ev.Figure) for each in events)

    async def _delivered(self, state: ClusterState, delivery: EventDelivery) -> list[ev.Event]:
        """The event and those that wait behind it, as far as the state does not hold them. Their own deliveries follow,
        and find them applied."""
        events: list[ev.Event] = []
        try:
            event = event_of(delivery.event, stream_sequence=delivery.sequence)
            if delivery.sequence > state.applied_seq:
                events.append(event)
        except WireError as error:
            await delivery.dead_letter(str(error))
        if delivery.num_waiting:
            after = max(delivery.sequence, state.applied_seq)
            for sequence, message in await self._ports.events.page(self._job, after_sequence=after):
                # One that cannot be read is dead-lettered at its delivery.
                with suppress(WireError):
                    events.append(event_of(message, stream_sequence=sequence))
        return events

    async def _missed(self, state: ClusterState, *, before: int) -> list[ev.Event]:
        """The events that were acknowledged and that the state does not hold."""
        missed: list[ev.Event] = []
        async with aclosing(self._ports.events.read(self._job, after_sequence=state.applied_seq)) as events:
            async for sequence, message in events:
                if sequence >= before:
                    break
                # An event that cannot be read was already dead-lettered.
                with suppress(WireError):
                    missed.append(event_of(message, stream_sequence=sequence))
        return missed

    async def _ownership(self, state: ClusterState) -> tuple[int, ev.OwnershipObserved | None]:
        """The store's time and its records of the job's GPUs and transitions. None before the job is submitted.

        The GPUs include those that an earlier start of the job had. The transitions are those that are open, and those
        that the state has as open. No other one can have changed: the command that closes a transition is made from a
        written state that has it as open."""
        store = self._ports.store
        if state.spec is None:
            return await self._clock.read_ms(), None
        slots = sorted({*state.spec.gpus, *state.gpus})
        if strange := tuple(gpu for gpu in slots if gpu not in state.gpus):
            await store.register(strange)
        found = await store.ownership(self._job, known=state.transitions)
        self._clock.was_read(found.now_unix_ms)
        # After the loss of the state no number of a transition may be used again.
        transitions = found.transitions if state.num_transitions else await store.transitions(self._job)
        return found.now_unix_ms, ev.OwnershipObserved(tuple(found.gpus[gpu] for gpu in slots), transitions)

    async def _look_at_leases(self, state: ClusterState) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        for holder in await self._ports.store.expired():
            known = state.instances.get(holder)
            if known is not None:
                lost = events_pb2.InstanceLost(instance=holder, boot=known.boot)
                await self._ports.announcer.publish(lost, incarnation=state.incarnation)
                await self._ports.store.release(holder)
        for name, instance in sorted(state.instances.items()):
            if not instance.living:
                # The instance may have renewed its lease meanwhile. Without a lease it joins again.
                await self._ports.store.release(name)

    async def _write(self, made: Turn) -> None:
        after = made.after
        if after != self._stored:
            checked(made.before, after)
            self._written = await self._ports.store.save(
                self._job, self._encoder.encode(after), expected_write=self._written.write, version=after.version
            )
        self._state = self._stored = after
        self._next_write_s = asyncio.get_running_loop().time() + BEAT_S
        ended = set(made.before.transitions).difference(after.transitions)
        if any(transition_number(each) % FORGET_EVERY == 0 for each in ended):
            await self._ports.store.forget_transitions(self._job, keep=KEPT_TRANSITIONS)

    def _record(self, happened: Chronicle) -> None:
        """After the state is written: what a replica that lost the race decided never happened."""
        self._chronicle = happened
        try:
            self._ports.record(happened.lines)
        except OSError as error:  # the log only explains: go on without these lines
            self._log.warning("moves not recorded", error=str(error))

    def _log_reason(self, decision: Decision) -> None:
        """Log the reason if it has changed."""
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._log.info(
                "decided", reason=decision.reason, commands=[str(cmd.command_id(c)) for c in decision.commands]
            )

    async def _issue(self, state: ClusterState, decision: Decision) -> None:
        # The next turn must see the new records of the store, and act on the end of the job.
        has_news = any(isinstance(command, cmd.StoreCommand | cmd.StopJob) for command in decision.commands)
        self._pace = replace(self._pace, has_news=has_news)
        await self._ports.issuer.issue_all(decision.commands, state)

    async def _adopt(self, state: ClusterState | None) -> None:
        """`state` names the instances whose gates can be asked."""
        try:
            await adopt(self._ports.store, self._ports.terms, lambda: self._ports.ask_gates(state))
        except (StoreNotAdopted, StoreUnavailable, BusUnavailable, VersionConflict) as error:
            # The store or the bus failed again meanwhile.
            self._log.warning("not adopted yet", error=str(error))
            await asyncio.sleep(RETRY_S)


def _lacks_events_before(state: ClusterState, delivery: EventDelivery) -> bool:
    """Whether there may be earlier events that the state does not hold. Sequences skip figures that were replaced."""
    held = state.applied_seq
    return delivery.sequence > held + 1 and (delivery.follows is None or delivery.follows > held)
