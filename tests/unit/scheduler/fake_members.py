"""The living parts of a fake cluster: instances with leases, leads with epochs, workers that pass gates and die.

Their events wait in `outbox`, for a test to deliver in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import node_of_instance, role_of_instance
from services.scheduler.state.values import JobSpec
from simulator.store import TERM, Store
from simulator.voice import Voice, endpoint_of
from tests.unit.scheduler.fake_parts import JOB, NODES, FakeGate, FakeInstance, FakeLead, role_of
from tidegate.adapters.cell_store import next_count
from tidegate.ownership.adoption import next_term, rebuild
from tidegate.ownership.records import GateState
from tidegate.ports.store import StoreContents
from tidegate.types import NO_TOKEN, GpuId, Grant, InstanceId, NodeId, Role, instance_id, node_of


class FakeVoice(Voice):
    """It numbers the events of the launcher, the scheduler and the control API by all that the cluster has done.

    Only the order of an instance's events counts, so that these numbers may have gaps and repeats.
    """

    def __init__(self, log: Sequence[cmd.Command], effects: Sequence[str], gates: Mapping[GpuId, FakeGate]) -> None:
        super().__init__(JOB)
        self._log, self._effects, self._gates = log, effects, gates

    def join(self, name: InstanceId) -> None:
        passed = tuple(
            Grant(slot, gate.highest)
            for slot, gate in sorted(self._gates.items())
            if node_of(slot) == node_of_instance(name) and gate.highest > NO_TOKEN
        )
        self.say(name, ev.InstanceJoined(name, endpoint_of(name), self.boots[name], passed))

    def fail_component(
        self,
        name: InstanceId,
        why: str,
        *,
        incarnation: int,
        iteration: int = 0,
        grants: tuple[Grant, ...] = (),
        fatal: bool = False,
    ) -> None:
        body = ev.Failed(ev.FailedWhat.COMPONENT, grants, 0, why, fatal=fatal)
        self.say(name, body, incarnation=incarnation, iteration=iteration)

    def _next_sequence(self, source: str) -> int:
        if role_of_instance(source) is not None:
            return super()._next_sequence(source)
        num_waiting = sum(event.source == source for event in self.outbox)
        return num_waiting + len(self._effects) + len(self._log) + 1


@dataclass
class FakeMembers:
    """Without a supervisor a dead instance stays dead."""

    job_spec: JobSpec
    has_supervisor: bool = True
    store: Store = field(init=False)
    voice: FakeVoice = field(init=False)
    gates: dict[GpuId, FakeGate] = field(default_factory=dict)
    instances: dict[InstanceId, FakeInstance] = field(default_factory=dict)
    leads: dict[Role, FakeLead | None] = field(default_factory=dict)
    epochs: dict[Role, int] = field(default_factory=dict)
    """The last epoch of each component in the store, as `boots` has the last start of each instance."""
    boots: dict[InstanceId, int] = field(default_factory=dict)
    register_term: int = TERM
    """The last term by the bus."""
    num_fenced: int = 0
    """So many of the first commands in `log` are of schedulers that the store refuses by now."""
    log: list[cmd.Command] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store(self.job_spec.gpus)
        self.gates = {each: FakeGate() for each in self.job_spec.gpus}
        self.voice = FakeVoice(self.log, self.effects, self.gates)
        self.leads = dict.fromkeys(Role)
        self.epochs = dict.fromkeys(Role, 0)

    def boot(self) -> None:
        """Every instance joins, the first of each role leads, and the launcher submits the job."""
        for role in Role:
            for node in NODES:
                self.start(instance_id(role, node))
        self.voice.submit(self.job_spec)

    @property
    def outbox(self) -> list[ev.Event]:
        """The events that were sent and not delivered yet."""
        return self.voice.outbox

    # Life and death

    def start(self, name: InstanceId) -> None:
        """A new start of the instance, which leads when its role has no lead."""
        self.instances[name] = FakeInstance()
        self.boots[name] = self._next_count(self.boots.get(name, 0))
        self.voice.boots[name] = self.boots[name] - 1
        self.voice.start(name)
        if self.leads[role_of(name)] is None:
            self.elect(name)

    def elect(self, name: InstanceId) -> None:
        role = role_of(name)
        self.epochs[role] = self._next_count(self.epochs[role])
        self.leads[role] = FakeLead(name, self.epochs[role])
        self.voice.elect(name, epoch=self.epochs[role])

    def _next_count(self, last: int) -> int:
        """As the store counts. Here the counts of the first term begin at 1."""
        return next_count(last, self.store.term - TERM)

    def kill_worker(self, slot: GpuId) -> None:
        """The service sees the death of its worker at once. Nothing happens where no worker runs."""
        record, gate = self.store.gpus[slot], self.gates[slot]
        if record.owner is None or not gate.is_held:
            return
        gate.is_held = False
        name = instance_id(record.owner.role, node_of(slot))
        grants = (Grant(slot, gate.highest),)
        self.voice.fail_workers(name, grants, f"worker of {slot} was killed")

    def kill_instance(self, name: InstanceId, *, tells: bool) -> None:
        """The workers of an instance die with it. `tells`: its lease expires before it starts again."""
        instance, role = self.instances[name], role_of(name)
        if not instance.is_alive:
            return
        instance.is_alive = False
        node = NodeId(name.partition("@")[2])
        for slot, record in self.store.gpus.items():
            is_its = record.owner.role is role if record.owner else slot in self.job_spec.slots(role)
            if is_its and node_of(slot) == node:
                self.gates[slot].is_held = False
        lead = self.leads[role]
        if lead is not None and lead.kept_on and node in lead.kept_on:
            lead.kept_on = frozenset()
        if tells:
            self.voice.lose(name)
        self._replace_lead(name)

    def lapse(self, name: InstanceId) -> None:
        """The instance lives and works, but does not renew its lease. Another one leads if it can."""
        instance = self.instances[name]
        if instance.is_alive and instance.has_lease:
            instance.has_lease = False
            self.voice.lose(name)
            self._replace_lead(name)

    def renew(self) -> bool:
        """Instances that live and were counted as lost join again, in the same start; False when there is none.

        The scheduler clears an expired lease once it has the event of the loss, so that the return comes later.
        """
        waiting = {event.body.instance for event in self.outbox if isinstance(event.body, ev.InstanceLost)}
        lapsed = {each for each, it in self.instances.items() if it.is_alive and not it.has_lease} - waiting
        for name in sorted(lapsed):
            self.instances[name].has_lease = True
            self.voice.join(name)
            if self.leads[role_of(name)] is None:
                self.elect(name)
        return bool(lapsed)

    def move_lead(self, role: Role) -> None:
        """Another instance leads, although none is dead."""
        lead = self.leads[role]
        if lead is not None:
            self._replace_lead(lead.instance)

    def _replace_lead(self, name: InstanceId) -> None:
        role = role_of(name)
        lead = self.leads[role]
        if lead is None or lead.instance != name:
            return
        self.leads[role] = None
        heirs = sorted(
            each
            for each, it in self.instances.items()
            if role_of(each) is role and it.is_alive and it.has_lease and each != name
        )
        if heirs:
            self.elect(heirs[0])
        elif self.instances[name].is_alive and self.instances[name].has_lease:
            self.elect(name)

    def fail_iteration(self, role: Role) -> None:
        """An iteration at work, or an evaluation, breaks off at a fault."""
        lead = self.leads[role]
        if lead is not None and lead.evaluated is not None:
            lead.broken_off, lead.evaluated = lead.evaluated, None
            self.voice.fail_component(lead.instance, "it timed out", incarnation=lead.incarnation)
            return
        plan = lead.plan if lead is not None and not lead.has_reported else None
        if lead is not None and plan is not None:
            lead.plan, lead.broken_off = None, plan
            self.voice.fail_component(
                lead.instance, "it timed out", incarnation=lead.incarnation, iteration=plan.iteration
            )

    def fail_late(self, name: InstanceId, *, fatal: bool) -> None:
        """The component that the instance led has failed, and the event of that comes only now."""
        lead = self.leads[role_of(name)]
        was_before = 1 if lead is not None and lead.instance == name else 0
        incarnation = (lead.incarnation if lead is not None else 0) - was_before
        if self.instances[name].is_alive and incarnation >= 0:
            self.voice.fail_component(name, "a late word", fatal=fatal, incarnation=incarnation)

    def restart_dead(self) -> bool:
        """The process supervisor starts every dead instance; False when all live."""
        if not self.has_supervisor:
            return False
        dead = sorted(name for name, instance in self.instances.items() if not instance.is_alive)
        for name in dead:
            self.start(name)
        return bool(dead)

    def stop(self) -> None:
        """Everything stops with the launcher, and what was not delivered is gone."""
        for instance in self.instances.values():
            instance.is_alive = instance.has_lease = False
        for gate in self.gates.values():
            gate.is_held = False
        self.leads = dict.fromkeys(Role)
        self.outbox.clear()

    # Gates

    def adopt(self, known: ClusterState, *, least_term: int = 0) -> None:
        """Open the store as `tidegate.ownership.adoption` does. Gates that answer are those of the nodes that have a
        living instance in `known` and in truth."""
        asked = {node_of_instance(name) for name in known.living() if self.instances[name].is_alive}
        reports = {
            node: [
                GateState(slot, gate.highest, gate.is_held)
                for slot, gate in self.gates.items()
                if node_of(slot) == node and gate.highest > NO_TOKEN
            ]
            for node in asked
        }
        store = self.store
        opened = tuple(each for each in store.records.values() if each.is_open)
        contents = StoreContents(tuple(store.gpus.values()), opened)
        term = next_term(max(self.register_term, store.term, least_term - 1), reports, contents)
        rebuilt = rebuild(contents, reports)
        store.term = self.register_term = term
        store.gpus = {record.gpu: record for record in rebuilt.gpus}
        store.records |= {each.id: each for each in rebuilt.transitions}
        store.register(self.job_spec.gpus)
        self.num_fenced = len(self.log)

    def _is_at_work(self, grant: Grant) -> bool:
        gate = self.gates[grant.gpu]
        return gate.is_held and gate.highest == grant.token

    def _is_open_to(self, grant: Grant) -> bool:
        gate = self.gates[grant.gpu]
        return not gate.is_held and gate.highest < grant.token

    def _let_go(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            if self.gates[grant.gpu].highest == grant.token:
                self.gates[grant.gpu].is_held = False

    def _pass_gates(self, command: cmd.ScaleUp | cmd.Resume, lead: FakeLead) -> bool:
        """False, with an event, where an instance is dead, or a gate has seen a newer grant, or this one before."""
        header = command.header
        for grant in command.grants:
            gate, name = self.gates[grant.gpu], instance_id(header.role, node_of(grant.gpu))
            is_its_own = gate.is_held and gate.highest == grant.token
            if not self.instances[name].is_alive or not (is_its_own or self._is_open_to(grant)):
                self.voice.fail_component(
                    lead.instance, f"{name} is gone", grants=command.grants, incarnation=header.incarnation
                )
                return False
            gate.highest, gate.is_held, gate.holder = grant.token, True, header.role
        return True
