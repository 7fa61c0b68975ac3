"""A cluster that answers the scheduler's commands with events, in memory and without time of its own.

It has what the real one has, by the same rules: an ownership store (`tidegate.transitions`), gates that know who holds
a GPU, instances with boots, leads with epochs that store their answers by command id, and an actor whose checkpoints
outlive it. What it says waits in `outbox`, for a test to deliver in the order it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.scheduler import commands as cmd
from services.scheduler import events as ev
from services.scheduler.values import Fate, IterationPlan, JobSpec, Placed, Snapshot
from tests.unit.scheduler.fake_pictures import EIGHTHS, picture
from tidegate import transitions
from tidegate.ownership import (
    GpuBusy,
    GpuRecord,
    GpuState,
    IllegalStep,
    MoveState,
    StaleToken,
    Transition,
    VersionConflict,
)
from tidegate.types import (
    GpuId,
    Grant,
    InstanceId,
    JobId,
    Layout,
    NodeId,
    Role,
    Token,
    TransitionId,
    gpu_id,
    instance_id,
    node_of,
)

JOB = JobId("tide")
NODES = (NodeId("n0"), NodeId("n1"))
TERM = 1


def gpu(node: str, index: int) -> GpuId:
    return gpu_id(NodeId(node), index)


def spec(
    *,
    num_iterations: int = 2,
    uses_reference: bool = True,
    max_actor_restarts: int = 3,
    deadline_ms: int = 1000,
    standby: tuple[GpuId, ...] = (),
    max_extra_prompts: int = 0,
    evaluate_every: int | None = None,
) -> JobSpec:
    return JobSpec(
        placement={
            Role.ACTOR: Placed((gpu("n0", 0), gpu("n1", 0)), Layout(dp=2)),
            Role.ROLLOUT: Placed((gpu("n0", 1), gpu("n1", 1), gpu("n1", 3)), Layout(dp=3)),
            Role.INFERENCE: Placed((gpu("n0", 2), gpu("n1", 2)), Layout(tp=2)),
        },
        num_iterations=num_iterations,
        num_prompts=4,
        group_size=2,
        num_minibatches=2,
        seed=7,
        uses_reference=uses_reference,
        max_actor_restarts=max_actor_restarts,
        command_deadline_ms=deadline_ms,
        standby=standby,
        max_extra_prompts=max_extra_prompts,
        evaluate_every=evaluate_every,
    )


@dataclass
class FakeInstance:
    boot: int = 1
    is_alive: bool = True
    has_lease: bool = True
    sequence: int = 0


@dataclass
class FakeGate:
    highest: Token = field(default_factory=lambda: Token(0, 0))
    is_held: bool = False


@dataclass
class FakeResize:
    """A component's change while it works: taken, of an actor then committed in the store, then switched to."""

    transition: TransitionId
    coming: tuple[Grant, ...]
    leaving: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout
    is_committed: bool = False


@dataclass
class FakeLead:
    """One lead's memory: gone with it. `members` are the grants that its component has.

    As `tidegate.runtime.lead` has it: a newer incarnation ends the iteration; one that failed is taken up again when
    weights were loaded, or when it is opened anew. An actor's lead closes one once all its ranks are there.
    """

    instance: InstanceId
    epoch: int
    members: tuple[Grant, ...] = ()
    plan: IterationPlan | None = None
    broken_off: IterationPlan | cmd.Evaluate | None = None
    evaluated: cmd.Evaluate | None = None
    """Under way."""
    incarnation: int = 0
    has_reported: bool = False
    resize: FakeResize | None = None
    suspension: cmd.Suspend | None = None
    """To come between two updates."""
    kept_on: frozenset[NodeId] | None = None
    """Whose memory holds the state of a suspended actor; nobody's once one of them is gone."""
    versions: dict[Grant, int] = field(default_factory=dict)
    """That its members loaded."""
    closing: IterationPlan | None = None
    """An iteration that is to be saved and published."""
    is_held: bool = False
    group_order: tuple[int, ...] = ()

    def meet(self, incarnation: int) -> None:
        if incarnation > self.incarnation:
            self.incarnation, self.plan, self.broken_off, self.resize = incarnation, None, None, None
            self.closing = self.evaluated = self.suspension = None
            self.kept_on = None

    def open(self, plan: IterationPlan) -> None:
        if plan is not self.broken_off:
            self.is_held, self.group_order = False, ()
        self.plan, self.broken_off, self.evaluated, self.has_reported = plan, None, None, False

    def evaluate(self, command: cmd.Evaluate) -> None:
        self.evaluated, self.broken_off = command, None


@dataclass
class FakeCluster:
    """`num_lost` samples of each iteration are lost on the way; without a supervisor what is dead stays dead; the leads
    of what is `hung` take commands and never do them; the next `num_failing_resizes` cannot be prepared; with
    `keeps_state` an actor's ranks can read what a dead one held."""

    job_spec: JobSpec
    checkpoint_every: int = 1
    num_lost: int = 0
    has_supervisor: bool = True
    hung: set[Role] = field(default_factory=set)
    num_failing_resizes: int = 0
    keeps_state: bool = True
    gpus: dict[GpuId, GpuRecord] = field(default_factory=dict)
    records: dict[str, Transition] = field(default_factory=dict)
    gates: dict[GpuId, FakeGate] = field(default_factory=dict)
    instances: dict[InstanceId, FakeInstance] = field(default_factory=dict)
    leads: dict[Role, FakeLead | None] = field(default_factory=dict)
    epochs: dict[Role, int] = field(default_factory=dict)
    answers: dict[str, tuple[bool, str]] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    next_prompts: dict[str, int] = field(default_factory=dict)
    """By checkpoint; others have taken as many as each iteration must."""
    outbox: list[ev.Event] = field(default_factory=list)
    log: list[cmd.Command] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    saved_version: int = 0
    handed_on: list[tuple[Role, int, IterationPlan | None]] = field(default_factory=list)
    """What rollout and inference have done of an iteration, with its incarnation: it is on the stream, where a new lead
    finds it whole without a GPU."""

    def __post_init__(self) -> None:
        for each in self.job_spec.gpus:
            self.gpus[each] = GpuRecord(each, GpuState.FREE, None, Token(0, 0))
            self.gates[each] = FakeGate()
        self.leads = dict.fromkeys(Role)
        self.epochs = dict.fromkeys(Role, 0)

    def boot(self) -> None:
        """Every instance joins, the first of each role leads, and the job is submitted."""
        for role in Role:
            for node in NODES:
                self.start(instance_id(role, node))
        self.say_as("launcher", ev.JobSubmitted(self.job_spec, "{}", resume=False))

    def say_as(self, source: str, body: ev.Body, *, grants: tuple[Grant, ...] = ()) -> None:
        """From what is no component: scheduler, launcher, control."""
        sequence = sum(event.source == source for event in self.outbox) + len(self.effects) + len(self.log) + 1
        self.outbox.append(ev.Event(job=JOB, source=source, boot=1, sequence=sequence, body=body, grants=grants))

    def say(
        self,
        name: InstanceId,
        body: ev.Body,
        *,
        incarnation: int = 0,
        iteration: int = 0,
        transition_id: str = "",
        grants: tuple[Grant, ...] = (),
    ) -> None:
        instance = self.instances[name]
        instance.sequence += 1
        self.outbox.append(
            ev.Event(
                job=JOB,
                source=name,
                boot=instance.boot,
                sequence=instance.sequence,
                body=body,
                incarnation=incarnation,
                iteration=iteration,
                transition_id=transition_id,
                grants=grants,
                role=role_of(name),
            )
        )

    # Life and death

    def start(self, name: InstanceId) -> None:
        """A new start of the instance; it leads when nobody does."""
        known = self.instances.get(name)
        self.instances[name] = FakeInstance(boot=known.boot + 1 if known else 1)
        self.say(name, ev.InstanceJoined(name, f"at-{name}", self.instances[name].boot))
        if self.leads[role_of(name)] is None:
            self.elect(name)

    def elect(self, name: InstanceId) -> None:
        role = role_of(name)
        self.epochs[role] += 1
        self.leads[role] = FakeLead(name, self.epochs[role])
        self.say(name, ev.LeadElected(name, f"at-{name}", self.epochs[role]))

    def kill_worker(self, slot: GpuId) -> None:
        """Its service sees it at once. Nothing happens where nothing runs."""
        record, gate = self.gpus[slot], self.gates[slot]
        if record.owner is None or not gate.is_held:
            return
        gate.is_held = False
        name = instance_id(record.owner.role, node_of(slot))
        grants = (Grant(slot, gate.highest),)
        self.say(name, ev.Failed(ev.FailedWhat.WORKER, grants, -9, f"worker of {slot} was killed", fatal=False))

    def kill_instance(self, name: InstanceId, *, tells: bool) -> None:
        """Its workers die with it. `tells`: its lease is seen to expire before it starts again."""
        instance, role = self.instances[name], role_of(name)
        if not instance.is_alive:
            return
        instance.is_alive = False
        node = NodeId(name.partition("@")[2])
        for slot, record in self.gpus.items():
            is_its = record.owner.role is role if record.owner else slot in self.job_spec.slots(role)
            if is_its and node_of(slot) == node:
                self.gates[slot].is_held = False
        lead = self.leads[role]
        if lead is not None and lead.kept_on and node in lead.kept_on:
            lead.kept_on = frozenset()
        if tells:
            self.say_as("scheduler", ev.InstanceLost(name, instance.boot))
        self._replace_lead(name)

    def lapse(self, name: InstanceId) -> None:
        """It lives and works, but does not renew its lease: another leads if one can."""
        instance = self.instances[name]
        if instance.is_alive and instance.has_lease:
            instance.has_lease = False
            self.say_as("scheduler", ev.InstanceLost(name, instance.boot))
            self._replace_lead(name)

    def renew(self) -> bool:
        """Who lives and was counted as lost joins again, in the same start; False when nobody was.

        The scheduler clears an expired lease once its loss is told, so that the return comes after it.
        """
        told = {event.body.instance for event in self.outbox if isinstance(event.body, ev.InstanceLost)}
        lapsed = {each for each, it in self.instances.items() if it.is_alive and not it.has_lease} - told
        for name in sorted(lapsed):
            self.instances[name].has_lease = True
            self.say(name, ev.InstanceJoined(name, f"at-{name}", self.instances[name].boot))
            if self.leads[role_of(name)] is None:
                self.elect(name)
        return bool(lapsed)

    def move_lead(self, role: Role) -> None:
        """To another instance, with nobody dead."""
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
        """What an iteration at work, or an evaluation, does when it meets what it did not expect."""
        lead = self.leads[role]
        if lead is not None and lead.evaluated is not None:
            lead.broken_off, lead.evaluated = lead.evaluated, None
            failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "it timed out", fatal=False)
            self.say(lead.instance, failed, incarnation=lead.incarnation)
            return
        plan = lead.plan if lead is not None and not lead.has_reported else None
        if lead is not None and plan is not None:
            lead.plan, lead.broken_off = None, plan
            failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "it timed out", fatal=False)
            self.say(lead.instance, failed, incarnation=lead.incarnation, iteration=plan.iteration)

    def fail_late(self, name: InstanceId, *, fatal: bool) -> None:
        """What it led once failed, and its word of it comes only now."""
        lead = self.leads[role_of(name)]
        was_before = 1 if lead is not None and lead.instance == name else 0
        incarnation = (lead.incarnation if lead is not None else 0) - was_before
        if self.instances[name].is_alive and incarnation >= 0:
            failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "a late word", fatal=fatal)
            self.say(name, failed, incarnation=incarnation)

    def restart_dead(self) -> bool:
        """What a process supervisor does; False when everything lives."""
        if not self.has_supervisor:
            return False
        dead = sorted(name for name, instance in self.instances.items() if not instance.is_alive)
        for name in dead:
            self.start(name)
        return bool(dead)

    # Commands

    def execute(self, commands: Sequence[cmd.Command]) -> None:
        for command in commands:
            self.log.append(command)
            match command:
                case cmd.Await() | cmd.StopJob() | cmd.FinishJob():
                    pass
                case cmd.AskGate():
                    self._answer_gate(command)
                case _ if isinstance(command, cmd.LeadCommand):
                    self._ask_lead(command)
                case _:
                    self._operate_store(command)

    def observed(self) -> ev.Event:
        """What the shell reads back."""
        records = tuple(self.records[key] for key in sorted(self.records))
        body = ev.OwnershipObserved(tuple(record for _, record in sorted(self.gpus.items())), records)
        return ev.Event(job=JOB, source="scheduler", boot=1, sequence=0, body=body)

    def _answer_gate(self, command: cmd.AskGate) -> None:
        """A gate knows of the GPUs that somebody passed to, and of no others."""
        gates = tuple(
            ev.GateState(slot, gate.highest, gate.is_held)
            for slot, gate in sorted(self.gates.items())
            if node_of(slot) == command.node and gate.highest > Token(0, 0)
        )
        self.say_as("scheduler", ev.GateReported(command.node, gates), grants=(command.grant,))

    def _operate_store(self, command: cmd.Command) -> None:
        try:
            self._change_store(command)
        except (GpuBusy, IllegalStep, StaleToken, VersionConflict) as refused:
            self.say_as("scheduler", ev.CommandAnswered(cmd.command_id(command), False, str(refused)))

    def _change_store(self, command: cmd.Command) -> None:
        match command:
            case cmd.PlanTransition():
                planned = command.transition
                known = self.records.get(planned.id)
                if known is None:
                    self._keep(transitions.plan(planned, self.gpus, job_version=self.saved_version))
                elif not transitions.same_plan(known, planned):
                    raise VersionConflict(f"{planned.id} is another plan's")
            case cmd.AdvanceMove():
                if command.to_state is MoveState.RELEASED:
                    self._check_released(command.gpu)
                stored = self.records[command.transition_id]
                states = {"from_state": command.from_state, "to_state": command.to_state}
                self._keep(transitions.advance(stored, self.gpus[command.gpu], term=TERM, **states))
            case cmd.CommitPart():
                stored = self.records[command.transition_id]
                self._keep(transitions.commit(stored, self.gpus, command.role, command.layout))
            case cmd.CloseTransition():
                self._keep(transitions.close(self.records[command.transition_id], self.gpus, command.outcome))
            case cmd.MarkLost():
                self.gpus[command.gpu] = transitions.mark_lost(self.gpus[command.gpu], command.token)
            case cmd.Reclaim():
                assert not self.gates[command.gpu].is_held, f"{command.gpu} is reclaimed while a worker holds it"
                self.gpus[command.gpu] = transitions.reclaim(self.gpus[command.gpu], command.token)

    def _check_released(self, slot: GpuId) -> None:
        """No process has it, and no layout in force counts on it."""
        record = self.gpus[slot]
        assert not self.gates[slot].is_held, f"{slot} is released while a worker holds it"
        lead = self.leads[record.owner.role] if record.owner else None
        if lead is not None and lead.resize is not None:
            assert Grant(slot, record.token) not in lead.resize.leaving, f"{slot} is released before the switch"

    def _keep(self, change: transitions.Change) -> None:
        self.records[change.transition.id] = change.transition
        self.gpus.update({record.gpu: record for record in change.gpus})

    def _ask_lead(self, command: cmd.LeadCommand) -> None:
        header = command.header
        lead = self.leads[header.role]
        if lead is None or header.endpoint != f"at-{lead.instance}":
            return
        if header.lead_epoch != lead.epoch:
            self._answer(header, accepted=False, message=f"epoch {header.lead_epoch} is not {lead.epoch}")
            return
        if header.id not in self.answers:
            if (fault := _fault(command, lead)) is not None:
                self._answer(header, accepted=False, message=fault)
                return
            self.answers[header.id] = (True, "")
            self.effects.append(header.id)
            if header.role not in self.hung:
                self._obey(command, lead)
        accepted, message = self.answers[header.id]
        self._answer(header, accepted=accepted, message=message)

    def _answer(self, header: cmd.Header, *, accepted: bool, message: str) -> None:
        self.say_as("scheduler", ev.CommandAnswered(header.id, accepted, message))

    def _obey(self, command: cmd.LeadCommand, lead: FakeLead) -> None:
        header = command.header
        lead.meet(header.incarnation)
        match command:
            case cmd.ScaleUp() if header.role is Role.ACTOR and command.members != command.grants:
                self._take_resize(command, lead)
            case cmd.ScaleDown() if header.transition_id and command.members:
                self._take_resize(command, lead)
            case cmd.Migrate():
                self._take_resize(command, lead)
            case cmd.Suspend():
                lead.suspension = command
            case cmd.Resume():
                self._resume(command, lead)
            case cmd.ScaleUp():
                self._scale_up(command, lead)
            case cmd.ScaleDown():
                if header.transition_id:
                    lead.resize = lead.suspension = None
                for grant in command.grants:
                    self.gates[grant.gpu].is_held = False
                lead.members = command.members
                self.say(lead.instance, ev.GpusReleased(command.grants), transition_id=header.transition_id)
            case cmd.LoadWeights():
                lead.members = header.members
                lead.versions = dict.fromkeys(lead.members, command.weights.version)
                self._tell_loaded(lead, header, command.weights)
                if isinstance(lead.broken_off, cmd.Evaluate):
                    lead.evaluate(lead.broken_off)
                elif lead.broken_off is not None:
                    lead.open(lead.broken_off)
            case cmd.OpenIteration():
                lead.open(command.plan)
                if header.role is not Role.ACTOR:
                    lead.members = header.members
                self.show(header.role, eighths=0)
            case cmd.Evaluate():
                lead.evaluate(command)
            case cmd.HoldTraining():
                lead.is_held = command.holds
            case cmd.OrderGroups():
                lead.group_order = command.groups
            case cmd.CloseIteration():
                plan, lead.plan = lead.plan, None
                is_open = plan is not None and plan.iteration == command.iteration
                if header.role is Role.ACTOR and plan is not None and is_open:
                    lead.closing = plan
                    self._close(lead)

    def _close(self, lead: FakeLead) -> bool:
        """Saves and publishes, once all ranks are there."""
        if lead.closing is None or not self._can_work(Role.ACTOR, lead):
            return False
        plan, lead.closing = lead.closing, None
        self._save(lead, plan)
        self._publish(lead, lead.incarnation, plan.version + 1)
        return True

    def _take_resize(self, command: cmd.ScaleUp | cmd.ScaleDown | cmd.Migrate, lead: FakeLead) -> None:
        leaving = command.leaving if isinstance(command, cmd.Migrate) else ()
        coming = command.coming if isinstance(command, cmd.Migrate) else ()
        if isinstance(command, cmd.ScaleUp):
            coming = command.grants
        elif isinstance(command, cmd.ScaleDown):
            leaving = command.grants
        assert command.layout is not None, "a component changes to a layout"
        transition = TransitionId(command.header.transition_id)
        lead.resize = FakeResize(transition, coming, leaving, command.members, command.layout)

    def _go_on_resizing(self, lead: FakeLead, resize: FakeResize) -> None:
        """The commit in the store, which decides, or the switch after it."""
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition_id": resize.transition}
        if not resize.is_committed:
            found = self._fault_in_preparing(lead, resize)
            if found is None:
                resize.is_committed = True
                return
            fault, is_of_death = found
            lead.resize = None
            left = tuple(grant for grant in lead.members if self._is_at_work(grant))
            self._let_go(resize.coming)
            if left and (is_of_death or left == lead.members):
                self.say(lead.instance, ev.ResizeFailed(fault), grants=left, **said)
            else:
                failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, fault, fatal=False)
                self.say(lead.instance, failed, incarnation=lead.incarnation)
            return
        lead.resize = None
        if not any(self._is_at_work(grant) for grant in resize.members):
            failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "all members died as they switched", fatal=False)
            self.say(lead.instance, failed, incarnation=lead.incarnation)
            return
        lead.members = resize.members
        self.say(lead.instance, ev.LayoutCommitted(resize.layout, resize.members, 0), grants=resize.members, **said)
        if resize.leaving:
            self._let_go(resize.leaving)
            self.say(lead.instance, ev.GpusReleased(resize.leaving), grants=resize.leaving, **said)

    def _go_on_shrinking(self, role: Role, lead: FakeLead, resize: FakeResize) -> None:
        """The rollout's engines finish elsewhere what they had, an inference makes a smaller world."""
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition_id": resize.transition}
        lead.resize = None
        is_broken = role is Role.INFERENCE and not all(map(self._is_at_work, (*resize.members, *resize.leaving)))
        if self._fails_to_prepare() or is_broken:
            self.say(lead.instance, ev.ResizeFailed("it could not be prepared"), **said)
            return
        lead.members = resize.members
        self._let_go(resize.leaving)
        self.say(lead.instance, ev.GpusReleased(resize.leaving), grants=resize.leaving, **said)
        self.say(lead.instance, ev.LayoutCommitted(resize.layout, resize.members, 0), grants=resize.members, **said)

    def _fails_to_prepare(self) -> bool:
        fails = self.num_failing_resizes > 0
        self.num_failing_resizes -= fails
        return fails

    def _suspend(self, lead: FakeLead, command: cmd.Suspend) -> None:
        lead.suspension = None
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition_id": command.header.transition_id}
        left = tuple(grant for grant in lead.members if self._is_at_work(grant))
        is_whole = self.keeps_state or left == lead.members
        if not is_whole or not left:
            failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "what a dead rank held is gone", fatal=False)
            self.say(lead.instance, failed, incarnation=lead.incarnation)
        elif self._fails_to_prepare() or set(left) != set(command.grants):
            self.say(lead.instance, ev.ResizeFailed("a member is dead, or it could not be prepared"), **said)
        else:
            lead.kept_on = frozenset(node_of(grant.gpu) for grant in lead.members)
            lead.members = ()
            self._let_go(command.grants)
            self.say(lead.instance, ev.GpusReleased(command.grants), grants=command.grants, **said)

    def _resume(self, command: cmd.Resume, lead: FakeLead) -> None:
        assert lead.kept_on is not None, "an actor is resumed that was not suspended"
        if not lead.kept_on:
            # A death that is not told yet took the state along.
            failed = ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "the state that was kept is gone", fatal=False)
            self.say(lead.instance, failed, incarnation=lead.incarnation)
            return
        if not self._pass_gates(command, lead):
            return
        lead.kept_on = None
        lead.members = command.grants
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition_id": command.header.transition_id}
        self.say(lead.instance, ev.GpusAcquired(command.grants), grants=command.grants, **said)
        self.say(lead.instance, ev.LayoutCommitted(command.layout, command.grants, 0), grants=command.grants, **said)

    def _pass_gates(self, command: cmd.ScaleUp | cmd.Resume, lead: FakeLead) -> bool:
        """False, and told, where an instance is dead or a GPU is held by another."""
        header = command.header
        for grant in command.grants:
            gate, name = self.gates[grant.gpu], instance_id(header.role, node_of(grant.gpu))
            if not self.instances[name].is_alive or (gate.is_held and gate.highest != grant.token):
                failed = ev.Failed(ev.FailedWhat.COMPONENT, command.grants, 0, f"{name} is gone", fatal=False)
                self.say(lead.instance, failed, incarnation=header.incarnation)
                return False
            gate.highest, gate.is_held = grant.token, True
        return True

    def _fault_in_preparing(self, lead: FakeLead, resize: FakeResize) -> tuple[str, bool] | None:
        """And whether somebody has died."""
        if self._fails_to_prepare():
            return "it could not be prepared", False
        stay = [grant for grant in resize.members if grant not in resize.coming]
        if not all(self._is_at_work(grant) for grant in (*stay, *resize.leaving)):
            return "a member is dead", True
        for grant in resize.coming:
            gate, name = self.gates[grant.gpu], instance_id(Role.ACTOR, node_of(grant.gpu))
            if not self.instances[name].is_alive or gate.is_held or gate.highest >= grant.token:
                return f"{grant.gpu} does not come", True
            self.gates[grant.gpu] = FakeGate(grant.token, is_held=True)
        if not self.keeps_state and not {*stay, *resize.leaving} >= set(lead.members):
            return "what a dead rank held is gone", False
        try:
            self._keep(transitions.commit(self.records[resize.transition], self.gpus, Role.ACTOR, resize.layout))
        except (GpuBusy, IllegalStep, StaleToken, VersionConflict) as refused:
            return str(refused), False
        return None

    def _is_at_work(self, grant: Grant) -> bool:
        gate = self.gates[grant.gpu]
        return gate.is_held and gate.highest == grant.token

    def _let_go(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            if self.gates[grant.gpu].highest == grant.token:
                self.gates[grant.gpu].is_held = False

    def _scale_up(self, command: cmd.ScaleUp, lead: FakeLead) -> None:
        header = command.header
        if not self._pass_gates(command, lead):
            return
        lead.members = command.members
        if command.weights is not None:
            lead.versions.update(dict.fromkeys(command.grants, command.weights.version))
        next_iteration = self.checkpoints.get(command.checkpoint, 0)
        next_prompt = self.next_prompts.get(command.checkpoint, next_iteration * self.job_spec.num_prompts)
        said: dict[str, Any] = {
            "incarnation": header.incarnation,
            "transition_id": header.transition_id,
            "grants": command.members,
        }
        self.say(lead.instance, ev.GpusAcquired(command.grants), **said)
        committed = ev.LayoutCommitted(command.layout, command.members, next_iteration, next_prompt)
        self.say(lead.instance, committed, **said)
        # Weights that come with the command are loaded without a word: a whole component is asked for them afterwards.
        if header.role is Role.ACTOR:
            self._publish(lead, header.incarnation, next_iteration)

    def _tell_loaded(self, lead: FakeLead, header: cmd.Header, weights: Snapshot) -> None:
        body = ev.WeightsLoaded(weights.version, weights.checksum)
        self.say(lead.instance, body, incarnation=header.incarnation, grants=lead.members)

    def _publish(self, lead: FakeLead, incarnation: int, version: int) -> None:
        snapshot = Snapshot(incarnation, version, f"files-{version}", f"sum-{version}", f"shards of {version}".encode())
        reference = (
            Snapshot(incarnation, 0, "files-0", "sum-0", b"shards of 0") if self.job_spec.uses_reference else None
        )
        body = ev.WeightsPublished(snapshot, reference)
        self.say(lead.instance, body, incarnation=incarnation, grants=lead.members)

    # Work

    def work(self) -> bool:
        """A step of a change first, then leads that took the iteration do their part, as far as they have GPUs; False
        when there is nothing to do."""
        actor = self.leads[Role.ACTOR]
        if any(lead is not None and self._change(role, lead) for role, lead in self.leads.items()):
            return True
        if actor is not None and self.instances[actor.instance].is_alive and self._close(actor):
            return True
        rollout = self.leads[Role.ROLLOUT]
        if rollout is not None and rollout.evaluated is not None and self._can_work(Role.ROLLOUT, rollout):
            self._evaluate(rollout, rollout.evaluated)
            return True
        leads = {role: lead for role, lead in self.leads.items() if lead is not None}
        # Whose iteration failed takes it up once it has GPUs again; who comes before it does not wait for that.
        plans = {(lead.incarnation, lead.plan or lead.broken_off) for lead in leads.values()}
        if len(leads) < len(Role) or len(plans) != 1 or not isinstance(next(iter(plans))[1], IterationPlan):
            return False
        has_worked = False
        for role in (Role.ROLLOUT, Role.INFERENCE, Role.ACTOR):
            lead = leads[role]
            if lead.has_reported:
                continue
            is_there = (role, lead.incarnation, lead.plan) in self.handed_on
            if lead.plan is None or lead.is_held or not (is_there or self._can_work(role, lead)):
                break
            self._report(role, lead)
            has_worked = True
        return has_worked

    def _change(self, role: Role, lead: FakeLead) -> bool:
        """A step of what it is asked to change; False when it is asked nothing."""
        if not self.instances[lead.instance].is_alive:
            return False
        if lead.suspension is not None:
            self._suspend(lead, lead.suspension)
            return True
        if lead.resize is not None and role is Role.ACTOR:
            self._go_on_resizing(lead, lead.resize)
            return True
        if lead.resize is not None:
            self._go_on_shrinking(role, lead, lead.resize)
            return True
        return False

    def show(self, role: Role, *, eighths: int) -> None:
        """A picture of the iteration that is open, so far done; nothing where the role has none."""
        lead = self.leads[role]
        if lead is None or lead.plan is None or not self.instances[lead.instance].is_alive:
            return
        gpus = tuple(grant.gpu for grant in lead.members if self._is_at_work(grant))
        told = picture(role, lead.plan, gpus, num_prompts=num_prompts(lead.plan), eighths=eighths)
        self.say(lead.instance, told, incarnation=lead.incarnation, iteration=lead.plan.iteration, grants=lead.members)

    def _can_work(self, role: Role, lead: FakeLead) -> bool:
        works = [self._is_at_work(each) for each in lead.members]
        return any(works) if role is Role.ROLLOUT else all(works) and bool(works)

    def _report(self, role: Role, lead: FakeLead) -> None:
        plan = lead.plan
        assert plan is not None, "only leads with a plan report"
        stale = [each for each in lead.members if self._is_at_work(each) and lead.versions.get(each) != plan.version]
        assert role is Role.ACTOR or not stale, f"{stale} of the {role} work without version {plan.version}"
        self.show(role, eighths=EIGHTHS)
        lead.has_reported = True
        trained, filtered, discarded = samples(plan, lead.incarnation)
        body = ev.IterationReported(Fate(), Fate(), (), (), 0, (("seen", 1.0),))
        if role is Role.ROLLOUT:
            body = replace(body, generated=fate((*trained, *filtered, *discarded)), metrics=(("reward_mean", 0.5),))
        elif role is Role.ACTOR:
            zero_std, invalid = fate(filtered, reason="zero_std"), fate(discarded, reason="invalid")
            kept = trained[self.num_lost :]
            body = replace(body, trained=fate(kept), filtered=(zero_std,), discarded=(invalid,))
        said: dict[str, Any] = {"incarnation": lead.incarnation, "iteration": plan.iteration, "grants": lead.members}
        self.say(lead.instance, body, **said)
        if role is not Role.ACTOR:
            self.handed_on.append((role, lead.incarnation, plan))

    def _evaluate(self, lead: FakeLead, command: cmd.Evaluate) -> None:
        lead.evaluated = None
        body = ev.EvaluationReported(command.version, 8, 2, (("reward_mean", command.version / 10),))
        said: dict[str, Any] = {"incarnation": lead.incarnation, "iteration": command.iteration}
        self.say(lead.instance, body, grants=lead.members, **said)

    def _save(self, lead: FakeLead, plan: IterationPlan) -> None:
        if (plan.iteration + 1) % self.checkpoint_every:
            return
        name, next_iteration = f"step-{lead.incarnation}-{plan.iteration + 1}", plan.iteration + 1
        self.checkpoints[name] = next_iteration
        self.next_prompts[name] = plan.first_prompt + num_prompts(plan)
        body = ev.CheckpointSaved(next_iteration, plan.version + 1, name, 0)
        self.say(lead.instance, body, incarnation=lead.incarnation, grants=lead.members)


def _fault(command: cmd.LeadCommand, lead: FakeLead) -> str | None:
    """Why it cannot be taken now."""
    plan = lead.plan or lead.broken_off
    if isinstance(command, cmd.HoldTraining | cmd.OrderGroups):
        is_open = isinstance(plan, IterationPlan) and plan.iteration == command.iteration
        return None if is_open else f"iteration {command.iteration} is not open"
    return None


def role_of(name: InstanceId) -> Role:
    return Role(name.partition("@")[0])


def num_prompts(plan: IterationPlan) -> int:
    """That an iteration takes: the later the more, while there are extra ones."""
    return plan.num_prompts + min(plan.iteration, plan.max_extra_prompts)


def samples(plan: IterationPlan, incarnation: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Hashes of the ids that are trained, filtered and discarded."""
    count = num_prompts(plan) * plan.group_size
    ids = [hash_of(incarnation, plan.iteration, index) for index in range(count)]
    return tuple(ids[: count - 3]), tuple(ids[count - 3 : count - 1]), tuple(ids[count - 1 :])


def hash_of(*numbers: int) -> int:
    value = 1469598103934665603
    for number in numbers:
        value = (value ^ (number + 1)) * 1099511628211 % 2**64
    return value


def fate(ids: Sequence[int], *, reason: str = "") -> Fate:
    return Fate(reason=reason, num_samples=len(ids), ids_digest=sum(ids) % 2**64)
