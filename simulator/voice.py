"""The events of a cluster's services, in memory: the simulator and the scheduler's tests send the same ones.

Invariants:
- Each start of an instance numbers its events from 1, without gaps.
- An event carries the role of the instance that sends it. The launcher, the scheduler and the control API have no role.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.values import Fate, JobSpec, Snapshot
from tidegate.types import CommandId, Grant, InstanceId, JobId, Layout, node_of

LAUNCHER, SCHEDULER = "launcher", "scheduler"


class Leader(Protocol):
    """The instance that speaks for a component, and the grants that the component has."""

    instance: InstanceId
    members: tuple[Grant, ...]


class Voice:
    """`outbox` has the events that were sent and not delivered yet, in order. An event that names no incarnation or
    iteration gets those of the voice."""

    def __init__(self, job: JobId) -> None:
        self.outbox: list[ev.Event] = []
        self.incarnation = 0
        self.iteration = 0
        self.boots: dict[str, int] = {}
        """How often each instance was started."""
        self.sequences: dict[str, int] = {}
        """The number of the last event of each source, in its present start."""
        self._job = job

    def say(
        self,
        source: str,
        body: ev.Body,
        *,
        incarnation: int | None = None,
        iteration: int | None = None,
        transition: str = "",
        grants: tuple[Grant, ...] = (),
    ) -> None:
        self.sequences[source] = self._next_sequence(source)
        event = ev.Event(
            job=self._job,
            source=source,
            boot=self.boots.get(source, 1),
            sequence=self.sequences[source],
            body=body,
            incarnation=self.incarnation if incarnation is None else incarnation,
            iteration=self.iteration if iteration is None else iteration,
            transition_id=transition,
            grants=grants,
            role=role_of_instance(source),
        )
        self.outbox.append(event)

    def _next_sequence(self, source: str) -> int:
        return self.sequences.get(source, 0) + 1

    # Instances

    def start(self, name: InstanceId) -> None:
        """The instance starts, for the first time or again, and joins."""
        self.boots[name] = self.boots.get(name, 0) + 1
        self.sequences[name] = 0
        self.join(name)

    def join(self, name: InstanceId) -> None:
        self.say(name, ev.InstanceJoined(name, endpoint_of(name), self.boots[name]))

    def elect(self, name: InstanceId, *, epoch: int) -> None:
        self.say(name, ev.LeadElected(name, endpoint_of(name), epoch))

    def lose(self, name: InstanceId) -> None:
        """The scheduler sees that the lease of the instance has expired."""
        self.say(SCHEDULER, ev.InstanceLost(name, self.boots[name]))

    def fail_workers(self, name: InstanceId, grants: tuple[Grant, ...], why: str) -> None:
        """Workers of the instance, or of the component that it leads, were killed."""
        self.say(name, ev.Failed(ev.FailedWhat.WORKER, grants, -9, why, fatal=False))

    # The launcher and the scheduler

    def submit(self, spec: JobSpec, *, resume: bool = False) -> None:
        self.say(LAUNCHER, ev.JobSubmitted(spec, "{}", resume=resume))

    def answer(self, command: CommandId, *, accepted: bool, message: str = "") -> None:
        self.say(SCHEDULER, ev.CommandAnswered(command, accepted, message))

    def report_gates(self, asked: cmd.AskGate, gates: Iterable[ev.GateState]) -> None:
        """`gates` are those of all nodes."""
        own = sorted((gate for gate in gates if node_of(gate.gpu) == asked.node), key=lambda gate: gate.gpu)
        self.say(SCHEDULER, ev.GateReported(asked.node, tuple(own)), grants=(asked.grant,))

    # Leads

    def commit_layout(
        self,
        lead: Leader,
        layout: Layout,
        *,
        transition: str,
        acquired: tuple[Grant, ...] = (),
        next_iteration: int = 0,
        next_prompt: int = 0,
        incarnation: int | None = None,
    ) -> None:
        """The layout of all members is in force. The GPUs of a part that the scheduler commits are `acquired` first."""
        bodies: list[ev.Body] = [ev.GpusAcquired(acquired)] if acquired else []
        bodies.append(ev.LayoutCommitted(layout, lead.members, next_iteration, next_prompt))
        for body in bodies:
            self.say(lead.instance, body, incarnation=incarnation, transition=transition, grants=lead.members)

    def publish(
        self, lead: Leader, snapshot: Snapshot, reference: Snapshot | None, *, incarnation: int | None = None
    ) -> None:
        body = ev.WeightsPublished(snapshot, reference)
        self.say(lead.instance, body, incarnation=incarnation, grants=lead.members)

    def load(self, lead: Leader, weights: Snapshot, *, incarnation: int | None = None) -> None:
        body = ev.WeightsLoaded(weights.version, weights.checksum)
        self.say(lead.instance, body, incarnation=incarnation, grants=lead.members)


def fate(hashes: Sequence[int], *, reason: str = "") -> Fate:
    """The account of samples, by the hashes of their ids."""
    return Fate(reason=reason, num_samples=len(hashes), ids_digest=sum(hashes) % 2**64)


def endpoint_of(name: InstanceId) -> str:
    return f"at-{name}"
