"""Changes of GPUs in a fake cluster.

- A resize of the actor, which the commit in the store decides.
- Engines that leave the rollout, and copies that leave the inference.
- An actor that is suspended and resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from simulator.changes import Change
from tests.unit.scheduler.fake_members import FakeMembers
from tests.unit.scheduler.fake_parts import FakeGate, FakeLead, role_of
from tidegate.ownership.transitions import REFUSALS
from tidegate.types import Grant, Role, instance_id, node_of


@dataclass
class FakeChanges(FakeMembers):
    """The next `num_failing_resizes` resizes cannot be prepared. With `keeps_state` the ranks of an actor can read the
    state of a dead rank."""

    num_failing_resizes: int = 0
    keeps_state: bool = True

    def _change(self, role: Role, lead: FakeLead) -> bool:
        """One step of the change that the lead was asked for; False when there is none."""
        if not self.instances[lead.instance].is_alive:
            return False
        if lead.suspension is not None:
            self._suspend(lead, lead.suspension)
            return True
        if lead.resize is not None and role is Role.ACTOR:
            self._go_on_resizing(lead, lead.resize)
            return True
        if lead.resize is not None:
            self._go_on_shrinking(lead, lead.resize)
            return True
        return False

    def _go_on_resizing(self, lead: FakeLead, resize: Change) -> None:
        """The commit in the store, which decides, or the switch after the commit."""
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition": resize.transition}
        if not resize.is_switched:
            found = self._fault_in_preparing(lead, resize)
            if found is None:
                resize.is_switched = True
                return
            fault, is_of_death = found
            lead.resize = None
            left = tuple(grant for grant in lead.members if self._is_at_work(grant))
            self._let_go(resize.coming)
            if left and (is_of_death or left == lead.members):
                self.voice.say(lead.instance, ev.ResizeFailed(fault), grants=left, **said)
            else:
                self.voice.fail_component(lead.instance, fault, incarnation=lead.incarnation)
            return
        lead.resize = None
        if not any(self._is_at_work(grant) for grant in resize.members):
            self.voice.fail_component(lead.instance, "all members died as they switched", incarnation=lead.incarnation)
            return
        assert resize.layout is not None, "a component changes to a layout"
        lead.members = resize.members
        self.voice.commit_layout(lead, resize.layout, **said)
        if resize.leaving:
            self._release(lead, resize.leaving, said)

    def _fault_in_preparing(self, lead: FakeLead, resize: Change) -> tuple[str, bool] | None:
        """The fault, and whether it is a death; None when the store has committed."""
        if self._fails_to_prepare():
            return "it could not be prepared", False
        stay = [grant for grant in resize.members if grant not in resize.coming]
        if not all(self._is_at_work(grant) for grant in (*stay, *resize.leaving)):
            return "a member is dead", True
        for grant in resize.coming:
            gate, name = self.gates[grant.gpu], instance_id(Role.ACTOR, node_of(grant.gpu))
            if not self.instances[name].is_alive or gate.is_held or gate.highest >= grant.token:
                return f"{grant.gpu} does not come", True
            self.gates[grant.gpu] = FakeGate(grant.token, is_held=True, holder=Role.ACTOR)
        if not self.keeps_state and not {*stay, *resize.leaving} >= set(lead.members):
            return "what a dead rank held is gone", False
        try:
            self.store.commit(resize.transition, Role.ACTOR, resize.layout)
        except REFUSALS as refused:
            return str(refused), False
        return None

    def _go_on_shrinking(self, lead: FakeLead, resize: Change) -> None:
        """Sequences of the rollout's engines go on elsewhere, and copies of the inference end their batches."""
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition": resize.transition}
        lead.resize = None
        if self._fails_to_prepare():
            self.voice.say(lead.instance, ev.ResizeFailed("it could not be prepared"), **said)
            return
        lead.members = resize.members
        self._release(lead, resize.leaving, said)
        assert resize.layout is not None, "a component changes to a layout"
        self.voice.commit_layout(lead, resize.layout, **said)

    def _fails_to_prepare(self) -> bool:
        fails = self.num_failing_resizes > 0
        self.num_failing_resizes -= fails
        return fails

    def _suspend(self, lead: FakeLead, command: cmd.Suspend) -> None:
        lead.suspension = None
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition": command.header.transition_id}
        left = tuple(grant for grant in lead.members if self._is_at_work(grant))
        is_whole = self.keeps_state or left == lead.members
        if not is_whole or not left:
            self.voice.fail_component(lead.instance, "what a dead rank held is gone", incarnation=lead.incarnation)
        elif self._fails_to_prepare() or set(left) != set(command.grants):
            self.voice.say(lead.instance, ev.ResizeFailed("a member is dead, or it could not be prepared"), **said)
        else:
            lead.kept_on = frozenset(node_of(grant.gpu) for grant in lead.members)
            lead.members = ()
            self._release(lead, command.grants, said)

    def _release(self, lead: FakeLead, grants: tuple[Grant, ...], said: Mapping[str, Any]) -> None:
        """The lead says nothing of workers of a dead instance: it cannot know whether they still run."""
        known = tuple(
            grant
            for grant in grants
            if self.instances[instance_id(role_of(lead.instance), node_of(grant.gpu))].is_alive
        )
        self._let_go(known)
        if known:
            self.voice.say(lead.instance, ev.GpusReleased(known), **said)

    def _resume(self, command: cmd.Resume, lead: FakeLead) -> None:
        if not lead.kept_on:
            # A death that is not reported yet took the state along, or an earlier resumption that the scheduler gave up
            # before it heard of its end.
            self.voice.fail_component(lead.instance, "no state is kept here", incarnation=lead.incarnation)
            return
        if not self._pass_gates(command, lead):
            return
        lead.kept_on = None
        lead.members = command.grants
        said: dict[str, Any] = {"incarnation": lead.incarnation, "transition": command.header.transition_id}
        self.voice.commit_layout(lead, command.layout, acquired=command.grants, **said)
