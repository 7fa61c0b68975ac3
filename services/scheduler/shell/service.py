"""The scheduler's shell: it does the I/O around each `turn`.

1. Load the state, and wait for the next event that is no figure. Figures (progress, backlogs, pictures) wake nobody.
2. Read what the stream has after the state's last event, figures too.
3. Begin the turn: the events are folded.
4. Read ownership where a decision is due (`pacing`), and on a beat.
5. Finish the turn: decide.
6. Write the state by compare-and-set.
7. Issue the commands.
8. Acknowledge the event.

Without an event a turn begins when a decision is due, and on a beat. So a thousand figures a second delay no other
event: the stream keeps the last of each.

The service keeps nothing that it cannot rebuild. Any number of replicas run, and each can go on where another stopped.
Where events were acknowledged that the loaded state does not hold, the store lost the state: a replica rebuilds it from
the stream.

Where a larger token has passed a gate than the store can have granted, the store and the term register have lost it.
The store is adopted again, above the token's term, before anything is decided: the gate lets no smaller token pass.

A resumed job has the state of the start before. Until the new launcher submits the job, events are only folded into it:
nothing is decided. The workers of that start are gone with their launcher, and their GPUs are no losses of this one.

Invariants:
- A resume counts nothing that the start before it left as a loss. [test_service: resume_after_a_stop_counts_no_restart]
- An event is acknowledged after its state is written. [test_service: acknowledged_after_the_state]
- Events that were read along count once. [test_service: events_that_wait_are_applied_together]
- Figures are folded in their order among the other events. [test_service: figures_are_folded_before]
- A command goes out after the state that contains it is written. [test_service: a_command_goes_out_after]
- A state that breaks an invariant is never written. [test_service: breaks_an_invariant_is_never_written]
- A replica that can publish no event ends. [test_service: that_can_publish_nothing_ends]
- Nothing is decided while a gate knows a token that the store has lost. [test_service: that_the_store_has_lost]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from services.scheduler.decide.chronicle import Chronicle, Line, chronicle
from services.scheduler.decide.decision import Decision
from services.scheduler.decide.expectations import last_noted_ms
from services.scheduler.decide.pacing import Pace
from services.scheduler.decide.turn import Turn, begin, checked, finish
from services.scheduler.policy import Policy
from services.scheduler.shell.bus_state import read_events
from services.scheduler.shell.codecs.state_codec import StateEncoder, decode_state, event_of
from services.scheduler.shell.issuer import Issuer
from services.scheduler.shell.opening import Adopt
from services.scheduler.shell.store_clock import StoreClock
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from tidegate.codec import WireError
from tidegate.ownership.adoption import GateReports
from tidegate.ownership.records import (
    StoreNotAdopted,
    StoreUnavailable,
    VersionConflict,
    transition_number,
)
from tidegate.ports.bus import (
    BusUnavailable,
    EventConsumer,
    EventDelivery,
    EventLog,
    MessageTooLarge,
    StateCopies,
    StateCopy,
    StreamFull,
)
from tidegate.ports.store import JobState, Store
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.cancellation import end_task
from tidegate.types import JobId
from tidegate.v1 import events_pb2

BEAT_S = 1.0
"""Period at which leases are read. The report of an expiry is late by at most this, and the fold of a figure."""
KEPT_TRANSITIONS = 256
"""Closed transitions that the store keeps: far more than a lead or a replica can be behind."""
FORGET_EVERY = 64
"""Transitions from one removal of older ones to the next. It reads all that are kept."""
COPY_EVERY = 256
"""Events from one copy of the state to the next. A copy costs a write of the state; a recovery reads so many more."""
RETRY_S = 0.2
"""Pause after a call that the store or the bus did not answer."""


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    store: Store
    events: EventLog
    consumer: EventConsumer
    copies: StateCopies
    adopt: Adopt
    announcer: Announcer
    issuer: Issuer
    ask_gates: Callable[[ClusterState | None], Awaitable[GateReports]]
    record: Callable[[Sequence[Line]], None]
    """Appends lines to the job's log of decisions and moves. OSError."""


class SchedulerService:
    def __init__(
        self,
        job: JobId,
        ports: SchedulerPorts,
        policy: Policy,
        *,
        decide_every_s: float,
        lease_ttl_s: float,
        launcher_boot: int = 0,
        copy_every: int = COPY_EVERY,
    ) -> None:
        """`launcher_boot`: the boot of the launcher that starts this replica. 0: it waits for none."""
        self._job = job
        self._boot = launcher_boot
        self._ports = ports
        self._policy = policy
        self._pace = Pace(round(decide_every_s * 1000))
        self._lease_ms = round(lease_ttl_s * 1000)
        self._state: ClusterState | None = None
        self._last_known: ClusterState | None = None
        """The last state that was read or written, also where it has to be read again: it names the instances whose
        gates can be asked."""
        self._version = 0
        """The version of the last state that was read or written."""
        self._other_version = asyncio.Event()
        """Set, and replaced, with each state of another version, and at the end."""
        self._written = JobState(payload=b"", write=0, version=0)
        self._looked_at: tuple[object, object] = (None, None)
        """The instances and the job whose gates' tokens the store has, as the state has them."""
        self._missed: tuple[ev.Event, ...] = ()
        """Acknowledged events that the loaded state does not hold, because the store lost the one that did."""
        self._copy_every = copy_every
        self._copied_through = 0
        """The place of the newest copy of the state."""
        self._clock = StoreClock(ports.store)
        self._encoder = StateEncoder()
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

    async def changed(self, timeout_s: float) -> None:
        """Wait for a state of another version, or for the end of this replica."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._other_version.wait(), timeout_s)

    async def run(self, stopping: asyncio.Event) -> None:
        """Take turns until `stopping` is set. Then cancel the present turn: that is safe at any point.

        StreamFull where an event cannot be published: what it would have told would be waited for."""
        turns = asyncio.create_task(self._turns(), name="turns")
        mute = asyncio.create_task(self._ports.announcer.until_unusable())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({turns, mute, stop}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stop, mute, turns):
            await end_task(task)
        # Whoever waits for a change is answered before the server stops.
        self._other_version.set()
        await self._ports.issuer.aclose()
        for task in (mute, turns):
            if not task.cancelled():
                task.result()

    async def _turns(self) -> None:
        while True:
            try:
                await self._turn()
            except StoreNotAdopted as error:
                self._log.warning("adopting the store", error=str(error))
                self._state = None
                await self._adopt(self._last_known)
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
        if lost_term := await self._lost_term(before):
            await self._adopt(before, least_term=lost_term + 1)
            return
        wait_s = self._wait_s(before, await self._clock.now_ms())
        # Without a wait the stream is read all the same, and the event's delivery comes with a later turn.
        delivery = await self._ports.consumer.next(timeout_s=wait_s) if wait_s else None
        try:
            await self._apply(before, delivery)
        except (StoreNotAdopted, StoreUnavailable, VersionConflict):
            if delivery is not None:
                await delivery.nak()
            raise

    async def _apply(self, before: ClusterState, delivery: EventDelivery | None) -> None:
        begun = begin(before, await self._new_events(before, delivery), missed=self._missed)
        is_due = delivery is None or self._pace.is_due(before, begun.after, await self._clock.now_ms())
        if begun.after.is_of_start_before(self._boot) or await self._lost_term(begun.after):
            await self._write(begun)
        elif is_due:
            # A beat reads ownership too: it shows the work that another replica did not finish.
            await self._decide(begun)
        else:
            await self._look_at_leases(begun.after)
            await self._write(begun)
        if delivery is not None:
            await delivery.ack()
        await self._forget(before)

    async def _lost_term(self, state: ClusterState) -> int:
        """`ClusterState.lost_term` by the store's own records. The store loses no token under one term, so instances
        that told of none are not looked at again."""
        if state.spec is None or (state.instances is self._looked_at[0] and state.spec is self._looked_at[1]):
            return 0
        store = self._ports.store
        lost_term = state.lost_term(store.term)
        if lost_term:
            lost_term = state.lost_term(store.term, records=await store.gpus())
        if not lost_term:
            self._looked_at = (state.instances, state.spec)
        return lost_term

    async def _forget(self, before: ClusterState) -> None:
        """Remove what nobody needs any more since this turn. Last, so that a store without an answer delays nothing."""
        after, store = self._state, self._ports.store
        assert after is not None, "a turn has written its state"
        ended = set(before.transitions).difference(after.transitions)
        if any(transition_number(each) % FORGET_EVERY == 0 for each in ended):
            await store.forget_transitions(self._job, keep=KEPT_TRANSITIONS)
        if after.next_iteration > before.next_iteration:
            # No other command is issued again, and a lead takes none twice in its epoch.
            await store.forget_commands(self._job, keep=after.expectations)
            if after.applied_seq >= self._copied_through + self._copy_every:
                await self._copy(after)

    async def _copy(self, state: ClusterState) -> None:
        """Keep a copy on the bus. With it the older events are not needed, should the store lose the state."""
        self._copied_through = state.applied_seq
        try:
            await self._ports.copies.keep(self._job, StateCopy(state.applied_seq, self._encoder.encode(state)))
        except (MessageTooLarge, StreamFull) as error:  # the events stay instead
            self._log.warning("state not copied", error=str(error))

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
        if self._state is not None:
            return self._state
        # Read before the state: what is acknowledged by now, a state that was written by now holds.
        acknowledged = await self._ports.consumer.acknowledged()
        found = await self._ports.store.load(self._job)
        self._written = found or JobState(payload=b"", write=0, version=0)
        state = decode_state(found.payload) if found else ClusterState(job=self._job)
        copy = await self._ports.copies.newest(self._job)
        self._copied_through = copy.through if copy is not None else 0
        if copy is not None and copy.through > state.applied_seq:
            self._log.warning("the store lost the state", applied_seq=state.applied_seq, copied_seq=copy.through)
            state = decode_state(copy.state)
        self._clock.goes_on_from(last_noted_ms(state))
        self._missed = await self._lost(state, until=acknowledged)
        self._show(state)
        return state

    def _wait_s(self, state: ClusterState, now_ms: int) -> float:
        if state.is_of_start_before(self._boot):
            return BEAT_S
        if state.phase in TERMINAL and not self._pace.has_news:
            return BEAT_S
        return min(BEAT_S, max(0.0, (self._pace.next_decision_ms(state, now_ms) - now_ms) / 1000))

    async def _new_events(self, state: ClusterState, delivery: EventDelivery | None) -> list[ev.Event]:
        """The events that are there and that the state does not hold, in order. An event that was read along comes with
        its own delivery too, which finds it applied."""
        held = max([state.applied_seq, *(each.stream_sequence or 0 for each in self._missed)])
        delivered: ev.Event | None = None
        if delivery is not None:
            try:
                delivered = event_of(delivery.event, stream_sequence=delivery.sequence)
            except WireError as error:
                await delivery.dead_letter(str(error))
            if delivery.sequence <= held:
                return []
        until = delivery.sequence if delivery else 0
        events = await read_events(self._ports.events, self._job, after=held, until=until)
        if delivered is not None and all(each.stream_sequence != delivered.stream_sequence for each in events):
            events = sorted([*events, delivered], key=lambda each: each.stream_sequence or 0)
        return events

    async def _lost(self, state: ClusterState, *, until: int) -> tuple[ev.Event, ...]:
        """The events up to `until` that the state does not hold. Empty where all are figures: nobody has to have
        folded these."""
        if until <= state.applied_seq:
            return ()
        read = await read_events(self._ports.events, self._job, after=state.applied_seq, until=until)
        missed = tuple(each for each in read if (each.stream_sequence or 0) <= until)
        if all(isinstance(each.body, ev.Figure) for each in missed):
            return ()
        self._log.warning("the store lost the state", applied_seq=state.applied_seq, num_events=len(missed))
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
        found = await store.ownership(self._job, known=state.transitions)
        if strange := tuple(gpu for gpu in slots if gpu not in found.gpus):
            await store.register(strange)
            found = await store.ownership(self._job, known=state.transitions)
        now_ms = self._clock.was_read(found.now_unix_ms)
        # After the loss of the state no number of a transition may be used again.
        transitions = found.transitions if state.num_transitions else await store.transitions(self._job)
        return now_ms, ev.OwnershipObserved(tuple(found.gpus[gpu] for gpu in slots), transitions)

    async def _look_at_leases(self, state: ClusterState) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        for holder in await self._ports.store.expired(self._job, longest_ms=self._lease_ms):
            known = state.instances.get(holder)
            if known is not None:
                lost = events_pb2.InstanceLost(instance=holder, boot=known.boot)
                await self._ports.announcer.publish(lost, incarnation=state.incarnation)
                await self._ports.store.release(self._job, holder)
        for name, instance in sorted(state.instances.items()):
            if not instance.living:
                # The instance may have renewed its lease meanwhile. Without a lease it joins again.
                await self._ports.store.release(self._job, name)

    async def _write(self, made: Turn) -> None:
        after = made.after
        if after != self._state:
            checked(made.before, after)
            self._written = await self._ports.store.save(
                self._job, self._encoder.encode(after), expected_write=self._written.write, version=after.version
            )
        self._missed = ()
        self._show(after)

    def _show(self, state: ClusterState) -> None:
        self._state = self._last_known = state
        if state.version != self._version:
            self._version = state.version
            self._other_version.set()
            self._other_version = asyncio.Event()

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

    async def _adopt(self, state: ClusterState | None, *, least_term: int = 0) -> None:
        """`state` names the instances whose gates can be asked."""
        ports = self._ports
        try:
            await ports.adopt(lambda: ports.ask_gates(state), least_term=least_term)
            self._looked_at = (None, None)
        except (StoreNotAdopted, StoreUnavailable, BusUnavailable, VersionConflict) as error:
            # The store or the bus failed again meanwhile.
            self._log.warning("not adopted yet", error=str(error))
            await asyncio.sleep(RETRY_S)
