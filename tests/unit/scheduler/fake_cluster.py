"""A cluster that answers the scheduler's commands with events, in memory and without time of its own.

Its ownership store, its changes and the events of its services are the simulator's (`simulator.store`, `changes`,
`voice`). Here are the parts that only tests need:
- gates that know the holder of each GPU,
- instances that die, lose their lease and start again,
- leads with epochs, which store their answers by command id and may refuse,
- an actor whose checkpoints outlive it.

Events wait in `outbox`. A test delivers them in any order, late or twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.layouts import replica_size
from services.scheduler.state.values import Fate, IterationPlan, Snapshot
from simulator.changes import change_of
from simulator.voice import endpoint_of, fate
from tests.unit.scheduler.fake_changes import FakeChanges
from tests.unit.scheduler.fake_parts import JOB, FakeLead, num_prompts, samples
from tests.unit.scheduler.fake_pictures import EIGHTHS, is_between_minibatches, picture
from tidegate.checkpoint_names import checkpoint_name
from tidegate.ownership.records import GpuRecord, MoveState
from tidegate.ownership.transitions import REFUSALS
from tidegate.types import GpuId, Grant, Role, Token, instance_id


@dataclass
class FakeCluster(FakeChanges):
    """`num_lost` samples of each iteration are lost on the way. The leads of the `hung` roles take commands and never
    do them."""

    checkpoint_every: int = 1
    num_lost: int = 0
    hung: set[Role] = field(default_factory=set)
    answers: dict[str, tuple[bool, str]] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    next_prompts: dict[str, int] = field(default_factory=dict)
    """The next prompt by checkpoint. Iterations before others have taken as few as they may."""
    journal: list[tuple[int, int]] = field(default_factory=list)
    """Each incarnation and iteration that the actor has trained, as in its journal."""
    lineage: tuple[tuple[int, int], ...] = ()
    """Those of which the actor's weights come."""
    lineages: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """The same by checkpoint."""
    late: list[cmd.LeadCommand] = field(default_factory=list)
    """Commands to leads that are on their way, or that leads have taken and not begun."""
    num_gone: int = 0
    """The commands of `log` that were issued before everything stopped."""
    handed_on: list[tuple[Role, int, IterationPlan | None]] = field(default_factory=list)
    """The iterations that the rollout or the inference has finished, with their incarnation. Their samples are on the
    stream, where a new lead finds them without a GPU."""

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
                case _ if isinstance(command, cmd.StoreCommand):
                    self._operate_store(command)

    def repeat(self, index: int) -> None:
        """A command that was issued before comes again. `index` counts from the last one."""
        place = len(self.log) - 1 - index % max(1, len(self.log))
        first = self.num_fenced if self.log and isinstance(self.log[place], cmd.StoreCommand) else self.num_gone
        if self.log and place >= first:
            self.execute([self.log[place]])

    def stop(self) -> None:
        """No command from before comes any more: its sender and its receiver are gone."""
        super().stop()
        self.late.clear()
        self.num_gone = len(self.log)

    def execute_late(self) -> None:
        """What is late comes now, but for starts, which would pass a gate after it was asked."""
        others = [each for each in self.late if not isinstance(each, cmd.ScaleUp | cmd.Resume)]
        self.late = [each for each in self.late if each not in others]
        self.execute(others)

    def begin_late(self) -> None:
        """Each lead begins what it has taken, because nobody has told it yet that its epoch is over."""
        for command in self.late:
            header, lead = command.header, self.leads[command.header.role]
            if lead is None or header.lead_epoch != lead.epoch or header.id in self.effects:
                continue
            if _fault(command, lead) is None:
                self.effects.append(header.id)
                self._obey(command, lead)

    def observed(self) -> ev.Event:
        """The store as the shell reads it, with the transitions in the order of their names."""
        stored = self.store.observed()
        body = replace(stored, transitions=tuple(sorted(stored.transitions, key=lambda each: each.id)))
        return ev.Event(job=JOB, source="scheduler", boot=1, sequence=0, body=body)

    def _answer_gate(self, command: cmd.AskGate) -> None:
        """A living instance on its node asks it. A gate knows of the GPUs that somebody passed to, and of no others."""
        if not any(self.instances[instance_id(role, command.node)].is_alive for role in Role):
            return
        passed = {slot: gate for slot, gate in self.gates.items() if gate.highest > Token(0, 0)}
        gates = (ev.GateState(slot, gate.highest, gate.is_held) for slot, gate in passed.items())
        self.voice.report_gates(command, gates)

    def _operate_store(self, command: cmd.StoreCommand) -> None:
        before = dict(self.store.gpus)
        try:
            self.store.operate(command)
        except REFUSALS as refused:
            self.voice.answer(command.id, accepted=False, message=str(refused))
        self._check_holders(command, before)

    def _check_holders(self, command: cmd.StoreCommand, before: Mapping[GpuId, GpuRecord]) -> None:
        """A step that the store has taken before, or refuses, changes nobody's GPU."""
        is_release = isinstance(command, cmd.AdvanceMove) and command.to_state is MoveState.RELEASED
        if isinstance(command, cmd.AdvanceMove | cmd.Reclaim) and self.store.gpus[command.gpu] != before[command.gpu]:
            if is_release:
                self._check_released(before[command.gpu])
            elif isinstance(command, cmd.Reclaim):
                assert not self.gates[command.gpu].is_held, f"{command.gpu} is reclaimed while a worker holds it"

    def _check_released(self, record: GpuRecord) -> None:
        """No process holds the GPU, and no layout in force counts on it."""
        slot = record.gpu
        assert not self.gates[slot].is_held, f"{slot} is released while a worker holds it"
        lead = self.leads[record.owner.role] if record.owner else None
        if lead is not None and lead.resize is not None:
            assert Grant(slot, record.token) not in lead.resize.leaving, f"{slot} is released before the switch"

    def _ask_lead(self, command: cmd.LeadCommand) -> None:
        header = command.header
        lead = self.leads[header.role]
        if lead is None or header.endpoint != endpoint_of(lead.instance):
            return
        if header.lead_epoch != lead.epoch:
            self.voice.answer(header.id, accepted=False, message=f"epoch {header.lead_epoch} is not {lead.epoch}")
            return
        if header.id not in self.answers:
            if (fault := _fault(command, lead)) is not None:
                self.voice.answer(header.id, accepted=False, message=fault)
                return
            self.answers[header.id] = (True, "")
            self.effects.append(header.id)
            if header.role not in self.hung:
                self._obey(command, lead)
        accepted, message = self.answers[header.id]
        self.voice.answer(header.id, accepted=accepted, message=message)

    def _obey(self, command: cmd.LeadCommand, lead: FakeLead) -> None:
        header = command.header
        lead.meet(header.incarnation)
        match command:
            case cmd.ScaleUp() if header.role is Role.ACTOR and command.members != command.grants:
                lead.resize = change_of(command)
            case cmd.ScaleDown() if header.transition_id and command.members:
                lead.resize = change_of(command)
            case cmd.Migrate():
                lead.resize = change_of(command)
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
                    # A lead reaches the workers of its own component alone.
                    if self.gates[grant.gpu].holder in (None, header.role):
                        self.gates[grant.gpu].is_held = False
                lead.members = tuple(grant for grant in lead.members if grant not in command.grants)
                self._release(lead, command.grants, {"transition": header.transition_id})
            case cmd.LoadWeights():
                lead.members = header.members
                lead.versions = dict.fromkeys(lead.members, command.weights.version)
                self.voice.load(lead, command.weights, incarnation=header.incarnation)
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
        """Save and publish, once all ranks are at work."""
        if lead.closing is None or not self._can_work(Role.ACTOR, lead):
            return False
        plan, lead.closing = lead.closing, None
        self._save(lead, plan)
        self._publish(lead, lead.incarnation, plan.version + 1)
        return True

    def _scale_up(self, command: cmd.ScaleUp, lead: FakeLead) -> None:
        header = command.header
        if not self._pass_gates(command, lead):
            return
        lead.members = command.members
        if command.weights is not None:
            lead.versions.update(dict.fromkeys(command.grants, command.weights.version))
        next_iteration = self.checkpoints.get(command.checkpoint, 0)
        next_prompt = self.next_prompts.get(command.checkpoint, next_iteration * self.job_spec.num_prompts)
        self.voice.commit_layout(
            lead,
            command.layout,
            transition=header.transition_id,
            acquired=command.grants,
            next_iteration=next_iteration,
            next_prompt=next_prompt,
            incarnation=header.incarnation,
        )
        # No event reports weights that come with the command: the scheduler asks a whole component to load them later.
        if header.role is Role.ACTOR:
            self.lineage = self.lineages.get(command.checkpoint, ())
            self._publish(lead, header.incarnation, next_iteration)

    def _publish(self, lead: FakeLead, incarnation: int, version: int) -> None:
        snapshot = Snapshot(incarnation, version, f"files-{version}", f"sum-{version}", f"shards of {version}".encode())
        reference = (
            Snapshot(incarnation, 0, "files-0", "sum-0", b"shards of 0") if self.job_spec.uses_reference else None
        )
        self.voice.publish(lead, snapshot, reference, incarnation=incarnation)

    # Work

    def work(self) -> bool:
        """A step of a change first, then of each lead that took the iteration and has GPUs; False without one."""
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
        # A lead whose iteration failed takes it up once it has GPUs again. The leads before it do not wait for that.
        plans = {(lead.incarnation, lead.plan or lead.broken_off) for lead in leads.values()}
        if len(leads) < len(Role) or len(plans) != 1 or not isinstance(next(iter(plans))[1], IterationPlan):
            return False
        has_worked = False
        for role in (Role.ROLLOUT, Role.INFERENCE, Role.ACTOR):
            lead = leads[role]
            if lead.has_reported:
                continue
            is_there = (role, lead.incarnation, lead.plan) in self.handed_on
            if lead.plan is None or not (is_there or self._can_work(role, lead)):
                break
            if lead.is_held:
                return self._finish_minibatch(lead) or has_worked
            self._report(role, lead)
            has_worked = True
        return has_worked

    def show(self, role: Role, *, eighths: int) -> None:
        """The lead sends a picture of its open iteration, so many eighths of it done; without one it sends none. After
        its account it has done all."""
        lead = self.leads[role]
        if lead is None or lead.plan is None or not self.instances[lead.instance].is_alive:
            return
        lead.eighths = eighths = EIGHTHS if lead.has_reported else eighths
        gpus = tuple(grant.gpu for grant in lead.members if self._is_at_work(grant))
        body = picture(role, lead.plan, gpus, num_prompts=num_prompts(lead.plan), eighths=eighths)
        said: dict[str, Any] = {"incarnation": lead.incarnation, "iteration": lead.plan.iteration}
        self.voice.say(lead.instance, body, grants=lead.members, **said)

    def _finish_minibatch(self, lead: FakeLead) -> bool:
        """An actor on hold trains the rest of a minibatch that it began. False when it is between two."""
        if is_between_minibatches(lead.eighths):
            return False
        self.show(Role.ACTOR, eighths=lead.eighths + 1)
        return True

    def _can_work(self, role: Role, lead: FakeLead) -> bool:
        """An engine or a whole copy is enough, but for an actor, which needs all its ranks."""
        works = [self._is_at_work(each) for each in lead.members]
        size = len(works) if role is Role.ACTOR else replica_size(self.job_spec.placement[role].layout)
        return any(all(works[start : start + size]) for start in range(0, len(works), size or 1))

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
            self.journal.append((lead.incarnation, plan.iteration))
            self.lineage += (self.journal[-1],)
            zero_std, invalid = fate(filtered, reason="zero_std"), fate(discarded, reason="invalid")
            kept = trained[self.num_lost :]
            body = replace(body, trained=fate(kept), filtered=(zero_std,), discarded=(invalid,))
        said: dict[str, Any] = {"incarnation": lead.incarnation, "iteration": plan.iteration, "grants": lead.members}
        self.voice.say(lead.instance, body, **said)
        if role is not Role.ACTOR:
            self.handed_on.append((role, lead.incarnation, plan))

    def _evaluate(self, lead: FakeLead, command: cmd.Evaluate) -> None:
        lead.evaluated = None
        body = ev.EvaluationReported(command.version, 8, 2, (("reward_mean", command.version / 10),))
        said: dict[str, Any] = {"incarnation": lead.incarnation, "iteration": command.iteration}
        self.voice.say(lead.instance, body, grants=lead.members, **said)

    def _save(self, lead: FakeLead, plan: IterationPlan) -> None:
        if (plan.iteration + 1) % self.checkpoint_every:
            return
        next_iteration = plan.iteration + 1
        name = checkpoint_name(lead.incarnation, next_iteration)
        self.checkpoints[name] = next_iteration
        self.lineages[name] = self.lineage
        self.next_prompts[name] = plan.first_prompt + num_prompts(plan)
        body = ev.CheckpointSaved(next_iteration, plan.version + 1, name, 0)
        self.voice.say(lead.instance, body, incarnation=lead.incarnation, grants=lead.members)


def _fault(command: cmd.LeadCommand, lead: FakeLead) -> str | None:
    """The reason why the lead refuses the command now; None when it takes it."""
    if command.header.incarnation < lead.incarnation:
        return f"incarnation {command.header.incarnation} is before {lead.incarnation}"
    plan = lead.plan or lead.broken_off
    if isinstance(command, cmd.HoldTraining | cmd.OrderGroups):
        is_open = isinstance(plan, IterationPlan) and plan.iteration == command.iteration
        return None if is_open else f"iteration {command.iteration} is not open"
    return None
