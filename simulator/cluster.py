"""A simulated job as its scheduler sees it: the events of its leads, store and gates, and their work on commands.

A world simulates each iteration. The cluster sends its happenings as the events of a real job's services, and takes
the same commands. `begin_iteration` starts a world, and `end_iteration` drops it.

Before the first world and between two worlds a change of a component takes no time, except that no component gets a GPU
that is lost. The costs of the sync include it.

Invariants:
- A command is done once and answered at once.
- An event is sent once, in the order of its source.
- An event says of a GPU what the world has of it.
- A GPU that is lost at the end of an iteration is lost in the next one, until its fault is over.
  [test_job_run: a_fault_strikes_once]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.layouts import engine_size, replicas
from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import Placed, Snapshot
from simulator import sample_accounts
from simulator.changes import Change, change_of
from simulator.faults import Fault, Outage
from simulator.gpus import Holder
from simulator.happenings import Happening, What
from simulator.iteration import SimulatedIteration
from simulator.leads import ActorMoves, InferenceMoves, Lead, Moves, RolloutMoves, are_free
from simulator.situations import inferring
from simulator.store import Store
from simulator.voice import Voice
from simulator.world import Opening, World
from tidegate.order_of_responses import responses_in
from tidegate.ownership.records import Outcome, PartKind
from tidegate.ownership.transitions import REFUSALS
from tidegate.types import GpuId, Grant, JobId, NodeId, Role, Token, TransitionId, instance_id, node_of

JOB = JobId("simulated")


class Cluster:
    """The cluster of a job, whose first iteration is `simulated`."""

    def __init__(self, simulated: SimulatedIteration) -> None:
        self.spec = simulated.spec
        self.world: World | None = None
        self.outages: tuple[Outage, ...] = ()
        """What is lost between two iterations."""
        self.store = Store(self.spec.gpus)
        self.voice = Voice(JOB)
        self._simulated = simulated
        self._nodes = sorted({node_of(gpu) for gpu in self.spec.gpus})
        self._rollout = RolloutMoves()
        moves: dict[Role, Moves] = {
            Role.ACTOR: ActorMoves(),
            Role.ROLLOUT: self._rollout,
            Role.INFERENCE: InferenceMoves(),
        }
        self._leads = {role: Lead(role, instance_id(role, self._nodes[0]), moves[role]) for role in Role}
        self._highest: dict[GpuId, Token] = {}
        self._holds = self._is_published = False
        self._version = 0
        """The version of the actor's last checkpoint, and the iteration that begins with it."""
        self._order: tuple[int, ...] = ()

    def boot(self) -> None:
        """The services of every node join, the first of each role leads, and the launcher submits the job."""
        for role, lead in self._leads.items():
            for node in self._nodes:
                self.voice.start(instance_id(role, node))
            self.voice.elect(lead.instance, epoch=1)
        self.voice.submit(self.spec)

    def begin_iteration(self, faults: Iterable[Fault], *, at_s: float = 0.0) -> World:
        """The world of the iteration, which begins with the present placement. `faults` have times of the job."""
        self._rollout.cold.difference_update(grant.gpu for grant in self._leads[Role.ROLLOUT].members)
        world = self._simulated.world(self._placed(), faults, Opening(at_s, self.outages))
        self.world = world
        if self._holds:
            world.hold_training(math.inf)
        self._order_queue(world)
        return world

    def end_iteration(self, following: SimulatedIteration) -> None:
        """Drop the world of an iteration that is over. The actor saves and publishes its weights."""
        self._drop_world()
        self._simulated = following
        self._version += 1
        actor = self._leads[Role.ACTOR]
        saved = ev.CheckpointSaved(self._version, self._version, f"step-{self._version}", 0)
        self._say(actor, saved, grants=actor.members)
        self._publish()

    def restart_actor(self, incarnation: int) -> None:
        """Drop the world of an iteration that has lost the actor's state. It begins again in this incarnation, as soon
        as the actor has started from its last checkpoint."""
        actor = self._leads[Role.ACTOR]
        actor.members, actor.layout, actor.change = (), None, None
        self.voice.incarnation, self._is_published = incarnation, False
        self._drop_world()

    def _drop_world(self) -> None:
        """What a lead was at is done."""
        assert self.world is not None, "only an iteration that has begun ends"
        self.outages, self.world = self.world.outages, None
        self._holds, self._order = False, ()
        self._rollout.leaving_engines.clear()
        for lead in self._leads.values():
            self._go_on(lead)

    def take_back(self, at_s: float) -> None:
        """Between two iterations: the GPUs whose outages are over by `at_s` are back, and their nodes' services."""
        for node in [each.node for each in self.outages if each.is_over(at_s) and each.node is not None]:
            self._start_services(node)
        self.outages = tuple(each for each in self.outages if not each.is_over(at_s))

    def send_pictures(self) -> None:
        """Each lead sends its picture of the iteration at this instant."""
        world = self.world or self._simulated.world(self._placed())
        world.rollout.advance()
        situations = self._simulated.situations
        self._say(self._leads[Role.ROLLOUT], situations.generation(world))
        self._say(self._leads[Role.INFERENCE], inferring(world))
        self._say(self._leads[Role.ACTOR], situations.training(world))

    def notice(self, happening: Happening) -> None:
        """The components send their events about the happening."""
        world, what = self.world, happening.what
        assert world is not None, "nothing happens before the iteration begins"
        if what is What.NODE_LOST:
            self._node_lost(node_of(happening.gpus[0]))
        elif what is What.NODE_BACK:
            self._start_services(node_of(happening.gpus[0]))
        elif what is What.GPU_LOST:
            self._lost(world, happening.gpus[0])
        elif what is What.ENGINE_LEFT:
            self._engine_left(happening)
        elif what is What.MOVE_DROPPED:
            self._failed_to_resize(f"{happening.gpus[0]} does not come")
        elif what is What.ROLLOUT_FINISHED:
            self._report(Role.ROLLOUT, sample_accounts.generated(world))
        elif what is What.MINIBATCH_FINISHED and world.trainer.is_done:
            self._report(Role.ACTOR, sample_accounts.trained(world))
        for lead in self._leads.values():
            if what in lead.moves.triggers:
                self._go_on(lead)

    def report(self, world: World) -> None:
        """The rollout and the actor report their accounts of an iteration that is over."""
        self._report(Role.ROLLOUT, sample_accounts.generated(world))
        self._report(Role.ACTOR, sample_accounts.trained(world))

    # Commands of the scheduler

    def execute(self, commands: Sequence[cmd.Command]) -> None:
        for command in commands:
            if isinstance(command, cmd.LeadCommand):
                self.voice.incarnation = max(self.voice.incarnation, command.header.incarnation)
                self.voice.answer(command.header.id, accepted=True)
                self._obey(command, self._leads[command.header.role])
            elif isinstance(command, cmd.AskGate):
                self._answer_gate(command)
            elif isinstance(command, cmd.StoreCommand):
                try:
                    self.store.operate(command)
                except REFUSALS as refused:
                    self.voice.answer(command.id, accepted=False, message=str(refused))
                if isinstance(command, cmd.CloseTransition) and command.outcome is Outcome.ABORTED:
                    self._abandon(command.transition_id)

    def _obey(self, command: cmd.LeadCommand, lead: Lead) -> None:
        """The end of an iteration, and an evaluation, take no time here."""
        match command:
            case cmd.ScaleDown(header=header) if not header.transition_id:
                self._clear(lead, command.grants)
            case cmd.ScaleUp() | cmd.ScaleDown() | cmd.Migrate() | cmd.Suspend() | cmd.Resume():
                self._begin(lead, change_of(command))
            case cmd.LoadWeights():
                self.voice.load(lead, command.weights)
            case cmd.OpenIteration():
                self.voice.iteration = command.plan.iteration
            case cmd.HoldTraining():
                self._hold(command.holds)
            case cmd.OrderGroups():
                self._order = command.groups
                if self.world is not None:
                    self._order_queue(self.world)

    def _begin(self, lead: Lead, change: Change) -> None:
        change.is_lead_to_commit = self.store.part(change.transition, lead.role).kind is PartKind.RESIZE
        self._highest.update({grant.gpu: grant.token for grant in change.coming})
        if dead := tuple(grant for grant in change.coming if self._is_dead(grant.gpu)):
            # The GPU died while no component had it, so that no lead knew.
            lead.change = change
            self._came_to_nothing(lead, dead)
            return
        lead.begin(change, self.world)
        self._go_on(lead)

    def _abandon(self, transition: TransitionId) -> None:
        """The scheduler no longer waits for the trainer's boundary. The trainer stays as it is."""
        lead = self._leads[Role.ACTOR]
        if lead.change is None or lead.change.transition != transition or self.world is None:
            return
        if not self.world.trainer.is_resizing:
            lead.change = None
            self.world.trainer.stay()

    def _is_dead(self, gpu: GpuId) -> bool:
        if self.world is None:
            return any(gpu in outage.gpus for outage in self.outages)
        return self.world.gpus.holder(gpu) is Holder.LOST

    def _are_free(self, grants: Iterable[Grant]) -> bool:
        return are_free(self.world, grants) and not any(self._is_dead(grant.gpu) for grant in grants)

    def _came_to_nothing(self, lead: Lead, dead: tuple[Grant, ...]) -> None:
        if lead.change is not None and lead.change.is_lead_to_commit and lead.role is Role.ACTOR:
            self._failed_to_resize(f"{dead[0].gpu} died")
        self._died(lead, dead)

    def _go_on(self, lead: Lead) -> None:
        """Report what the world has done of the commands to this lead."""
        cleared = tuple(sorted(grant for grant in lead.clearing if self._are_free((grant,))))
        if cleared:
            lead.clearing.difference_update(cleared)
            self._say(lead, ev.GpusReleased(cleared))
        change = lead.change
        if change is None:
            return
        if not change.is_switched and lead.is_there(self.world):
            self._switch(lead, change)
        if change.is_switched and self._are_free(change.leaving):
            lead.change = None
            if change.leaving:
                self._say(lead, ev.GpusReleased(change.leaving), transition=change.transition)

    def _switch(self, lead: Lead, change: Change) -> None:
        change.is_switched = True
        is_first = lead.role is Role.ACTOR and not self._is_published
        lead.members, lead.layout = change.members, change.layout
        if change.layout is None:
            return
        if change.is_lead_to_commit:
            self.store.commit(change.transition, lead.role, change.layout)
        acquired = () if change.is_lead_to_commit else change.coming
        self.voice.commit_layout(
            lead,
            change.layout,
            transition=change.transition,
            acquired=acquired,
            next_iteration=self._version,
            next_prompt=self._version * self.spec.num_prompts,
        )
        if is_first:
            self._publish()

    def _clear(self, lead: Lead, grants: tuple[Grant, ...]) -> None:
        lead.clearing.update(grants)
        if self.world is not None:
            for grant in grants:
                lead.moves.clear(self.world, grant.gpu)
        self._go_on(lead)

    def _hold(self, holds: bool) -> None:
        self._holds = holds
        if self.world is not None:
            self.world.hold_training(math.inf if holds else self.world.now_s)

    def _order_queue(self, world: World) -> None:
        size = self.spec.group_size
        if self._order:
            world.order_queue(group * size + draw for group, draw in responses_in(self._order, size))

    def _answer_gate(self, command: cmd.AskGate) -> None:
        """A GPU is held as long as the world has it so. A lost GPU that does not come back stays held."""
        gates = (
            ev.GateState(gpu, token, not self._are_free((Grant(gpu, token),))) for gpu, token in self._highest.items()
        )
        self.voice.report_gates(command, gates)

    # Deaths and returns

    def _start_services(self, node: NodeId) -> None:
        for role in Role:
            self.voice.start(instance_id(role, node))

    def _node_lost(self, node: NodeId) -> None:
        """The scheduler learns of the loss at once, before the events about its GPUs. The leases of a real node have to
        expire first."""
        for role in Role:
            self.voice.lose(instance_id(role, node))

    def _lost(self, world: World, gpu: GpuId) -> None:
        """Report the death of the GPU. An engine of the rollout reports its own death."""
        for lead in self._leads.values():
            grants = lead.grants_on((gpu,))
            if grants and not (lead.role is Role.ROLLOUT and set(grants) <= set(lead.members)):
                self._came_to_nothing(lead, grants)

    def _engine_left(self, happening: Happening) -> None:
        lead = self._leads[Role.ROLLOUT]
        if happening.number in self._rollout.leaving_engines:
            self._rollout.leaving_engines.discard(happening.number)
            return
        self._rollout.cold.update(happening.gpus)
        self._died(lead, lead.grants_on(happening.gpus))

    def _died(self, lead: Lead, grants: tuple[Grant, ...]) -> None:
        """A change that needed the dead GPUs ends here; the scheduler deals with the part that it had begun."""
        if lead.change is not None and set(grants) & {*lead.change.coming, *lead.change.leaving}:
            lead.change = None
        lead.members = tuple(grant for grant in lead.members if grant not in grants)
        if grants:
            self.voice.fail_workers(lead.instance, grants, f"{', '.join(grant.gpu for grant in grants)} died")

    def _failed_to_resize(self, why: str) -> None:
        lead = self._leads[Role.ACTOR]
        change, lead.change = lead.change, None
        if change is not None and not change.is_switched:
            self._say(lead, ev.ResizeFailed(why), transition=change.transition, grants=lead.members)

    # Events

    def _report(self, role: Role, account: ev.IterationReported) -> None:
        lead = self._leads[role]
        self._say(lead, account, grants=lead.members)

    def _publish(self) -> None:
        self._is_published, version = True, self._version
        snapshot = Snapshot(self.voice.incarnation, version, f"files-{version}", f"sum-{version}", b"")
        self.voice.publish(self._leads[Role.ACTOR], snapshot, None)

    def _say(self, lead: Lead, body: ev.Body, *, transition: str = "", grants: tuple[Grant, ...] = ()) -> None:
        self.voice.say(lead.instance, body, transition=transition, grants=grants)

    def _placed(self) -> Assignment:
        """The GPUs of every component. A trainer that lacks ranks has none until it has all again."""
        gpus = {role: tuple(grant.gpu for grant in lead.members) for role, lead in self._leads.items()}
        layout = self._leads[Role.ACTOR].layout
        is_whole = layout is not None and len(gpus[Role.ACTOR]) == layout.num_ranks
        trainer = Placed(gpus[Role.ACTOR], layout) if layout and is_whole else None
        return Assignment(replicas(gpus[Role.ROLLOUT], engine_size(self.spec)), trainer, gpus[Role.INFERENCE])
