"""One instance of a component's service on a node: its start, its lease, the deaths of its workers, its turn as lead.

Order of a start:
1. boot number;
2. gRPC server;
3. lease;
4. `InstanceJoined`;
5. the campaign for the lead, which goes on as long as the instance lives.

Invariants:
- An instance that the store refuses after a failover or a restart joins again as soon as the store is adopted.
  [test_host: store_is_joined_at_once] [test_component: first_after_a_failover]
- A command that was decided before that is refused. [test_component: decided_before_a_failover]
- An instance whose lease may have lapsed joins again, because the scheduler may have counted it as lost.
  [test_host: lease_lapsed_joins_again]
- While another instance leads, commands are refused. [test_host: while_another_leads_commands_are_refused]
- A lead that loses its epoch stops leading before it campaigns again.
  [test_host: lost_its_epoch_stops_leading]
- A lead that could not renew its epoch for as long as the epoch lasts stops leading too.
  [test_host: lead_that_could_not_renew]
- The death of a worker is reported once. [test_host: the_death_of_a]
- An instance whose lead cannot work any more ends, and is started again. It keeps no lease without doing anything.
  [test_host: lead_broke_ends]
- So does one that can publish no event any more: the scheduler would wait for it. [test_host: publish_no_event_ends]

Every start has its own boot (`Boots.next_boot`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import structlog

from tidegate.codec import encode_grants
from tidegate.config.sections.job import RuntimeSection
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable
from tidegate.ports.store import LeadRecord, Leads, Leases, StoreIdentity
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.lead import CommandRefused, Lead
from tidegate.types import Grant, InstanceId, JobId, Role
from tidegate.v1 import commands_pb2, events_pb2

LEAVE_TIMEOUT_S = 2.0
ADOPTION_POLL_S = 0.1
_CAMPAIGNS_PER_TTL = 3
"""Two renewals may fail before the lease is gone."""


async def attach_when_adopted(store: StoreIdentity) -> None:
    """Attaches to the store as soon as it answers and somebody has adopted it."""
    while True:
        try:
            await store.attach()
            return
        except (StoreNotAdopted, StoreUnavailable):
            await asyncio.sleep(ADOPTION_POLL_S)


class Keeper(Leases, Leads, StoreIdentity, Protocol):
    """The parts of the store that an instance needs."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The identity of this start of the instance."""

    job: JobId
    role: Role
    instance: InstanceId
    boot: int
    endpoint: str


class ComponentHost:
    """See the module head. `make_lead` builds the role's lead for one epoch. `gates`: the highest token that
    ever passed the gate of each GPU of this node. `now_s` never goes back."""

    def __init__(
        self,
        seat: Seat,
        *,
        store: Keeper,
        announcer: Announcer,
        times: RuntimeSection,
        make_lead: Callable[[], Lead],
        gates: Callable[[], Awaitable[Sequence[Grant]]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seat = seat
        self._store = store
        self._announcer = announcer
        self._times = times
        self._make_lead = make_lead
        self._gates = gates
        self._now_s = now_s
        self._has_joined = False
        self._record: LeadRecord | None = None
        self._lead: Lead | None = None
        self._leads_until_s = 0.0
        """By this clock the epoch is over then, unless it is renewed: its last request is at most one TTL old."""
        self._incarnation = 0
        self._is_due = asyncio.Event()
        """Set: renew now."""
        self._renewed = asyncio.Event()
        """Set, and replaced, by each renewal."""
        self._log = structlog.get_logger("host")

    def lead_for(self, header: commands_pb2.CommandHeader) -> Lead:
        """The lead that takes the command. CommandRefused when this instance does not lead under its epoch, or when
        the store is under another term than the command's."""
        epoch, term = header.lead_epoch, self._store.term
        if self._lead is None or self._record is None:
            raise CommandRefused(f"{self._seat.instance} does not lead {self._seat.role}; send it to its lead")
        if epoch != self._record.epoch:
            raise CommandRefused(
                f"the command is for epoch {epoch}, {self._seat.instance} leads under {self._record.epoch}"
            )
        if header.term != term:
            raise CommandRefused(f"the command is for term {header.term} of the store, which is under {term} now")
        self._incarnation = max(self._incarnation, header.incarnation)
        return self._lead

    async def until_term(self, term: int) -> None:
        """Renews the lease and the lead now, since the store refuses this instance. Waits for that where the store is
        under `term`, and this instance knows of an earlier one."""
        renewed = self._renewed
        self._is_due.set()
        if term > self._store.term:
            await renewed.wait()

    async def run(self, stopping: asyncio.Event) -> None:
        """Joins, keeps the lease and campaigns. Leaves in order once `stopping` is set."""
        beating = asyncio.create_task(self._beat(), name="beat")
        mute = asyncio.create_task(self._announcer.until_unusable(), name="mute")
        stopped = asyncio.create_task(stopping.wait(), name="stop")
        tasks = (beating, mute, stopped)
        try:
            while not any(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=self._longest_wait_s(), return_when=asyncio.FIRST_COMPLETED)
                if self._lead is not None:
                    self._lead.check_alive()
                if self._record is not None and self._now_s() >= self._leads_until_s:
                    self._log.warning("epoch not renewed in time", epoch=self._record.epoch)
                    await self._stop_leading()
            for task in (beating, mute):
                if task.done():
                    task.result()
        finally:
            for each in tasks:
                await end_task(each)
        await self._leave()

    async def report_death(self, grant: Grant, exit_status: int, why: str) -> None:
        """Reports the death of one of this instance's workers. `why`: in its own words, if it said."""
        message = f"worker of {grant.gpu} ended with status {exit_status}" + (f": {why}" if why else "")
        self._log.warning("worker died", gpu=grant.gpu, exit_status=exit_status, why=why)
        await self._publish(
            events_pb2.Failed(
                what=events_pb2.Failed.WHAT_WORKER,
                grants=encode_grants([grant]),
                exit_status=exit_status,
                message=message,
            )
        )

    @property
    def _beat_s(self) -> float:
        return min(self._times.lead_ttl_s, self._times.lease_ttl_s) / _CAMPAIGNS_PER_TTL

    def _longest_wait_s(self) -> float:
        """The time until the end of the epoch must be checked. An epoch that begins meanwhile outlasts a beat."""
        if self._record is None:
            return self._beat_s
        return max(0.0, min(self._beat_s, self._leads_until_s - self._now_s()))

    async def _beat(self) -> None:
        while True:
            self._is_due.clear()
            try:
                await self._renew()
                await self._campaign()
                self._renewed.set()
                self._renewed = asyncio.Event()
            except StoreNotAdopted as error:
                self._log.warning("waiting for adoption", error=str(error))
                # First a pause: where the store refuses again after attaching, it is not asked without end.
                await asyncio.sleep(ADOPTION_POLL_S)
                await attach_when_adopted(self._store)
                continue
            except StoreUnavailable as error:
                # The workers go on without a renewal: a lease detects and grants nothing.
                self._log.warning("no answer", error=str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), self._beat_s)

    async def _renew(self) -> None:
        # Without an answer it is unknown whether the lease lapsed. To join once too often changes nothing.
        had_joined, self._has_joined = self._has_joined, False
        seat = self._seat
        was_in_force = await self._store.renew(seat.job, seat.instance, ttl_ms=round(self._times.lease_ttl_s * 1000))
        if not (had_joined and was_in_force):
            await self._publish(
                events_pb2.InstanceJoined(
                    instance=seat.instance,
                    endpoint=seat.endpoint,
                    boot=seat.boot,
                    gates=encode_grants(await self._gates()),
                )
            )
        self._has_joined = True

    async def _campaign(self) -> None:
        ttl_ms = round(self._times.lead_ttl_s * 1000)
        asked_s = self._now_s()
        if (current := self._record) is not None:
            renewed = await self._store.renew_lead(current, ttl_ms=ttl_ms)
            if renewed is not None and self._record is current:
                self._record, self._leads_until_s = renewed, asked_s + self._times.lead_ttl_s
                return
            await self._stop_leading()
            asked_s = self._now_s()
        record = await self._store.campaign(
            self._seat.job,
            self._seat.role,
            instance=self._seat.instance,
            endpoint=self._seat.endpoint,
            ttl_ms=ttl_ms,
        )
        if (record.instance, record.endpoint) != (self._seat.instance, self._seat.endpoint):
            return
        self._record, self._lead = record, self._make_lead()
        self._leads_until_s = asked_s + self._times.lead_ttl_s
        self._log.info("leading", epoch=record.epoch)
        elected = events_pb2.LeadElected(instance=record.instance, endpoint=record.endpoint, epoch=record.epoch)
        await self._publish(elected)

    async def _stop_leading(self) -> None:
        lead, self._lead, self._record = self._lead, None, None
        if lead is not None:
            self._log.info("leading no more")
            await lead.aclose()

    async def _leave(self) -> None:
        record = self._record
        await self._stop_leading()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                if record is not None:
                    await self._store.resign(record)
                await self._store.release(self._seat.job, self._seat.instance)
                await self._publish(events_pb2.InstanceLost(instance=self._seat.instance, boot=self._seat.boot))
        except (StoreUnavailable, StoreNotAdopted, TimeoutError) as error:
            # The job's servers may go first. The lease then expires by itself.
            self._log.warning("left without a word", error=str(error))

    async def _publish(
        self, body: events_pb2.InstanceJoined | events_pb2.InstanceLost | events_pb2.LeadElected | events_pb2.Failed
    ) -> None:
        await self._announcer.publish(body, incarnation=self._incarnation)
