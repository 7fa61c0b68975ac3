"""The parts of a decision: the commands that something needs, notes for the reason, and a failure that ends the job.

The ids of commands have no attempt number here: `expectations.due` adds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.decide.expectations import MAX_ISSUES
from services.scheduler.evolve.absences import LONG_MS
from services.scheduler.evolve.answers import command_deadline_ms
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Lead
from tidegate.types import CommandId, Role


@dataclass(frozen=True, slots=True)
class Needs:
    """`failure` is a message that ends the job."""

    commands: tuple[cmd.Command, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str | None = None

    def __add__(self, other: Needs) -> Needs:
        return Needs(self.commands + other.commands, self.notes + other.notes, self.failure or other.failure)


def key_at(step: str, role: Role, lead: Lead) -> CommandId:
    """The id of a command to this lead. `step` is the whole path `<transition or iteration>/<step>`."""
    return CommandId(f"{step}/{role}/e{lead.epoch}")


def header(
    state: ClusterState, role: Role, lead: Lead, *, step: str, now_ms: int, transition_id: str = ""
) -> cmd.Header:
    """`step` is that of the id (`key_at`)."""
    return cmd.Header(
        id=key_at(step, role, lead),
        job=state.job,
        incarnation=state.incarnation,
        role=role,
        endpoint=lead.endpoint,
        lead_epoch=lead.epoch,
        deadline_ms=now_ms + command_deadline_ms(state),
        instances=tuple(
            cmd.Address(name, state.instances[name].endpoint, state.instances[name].boot)
            for name in state.living(role=role)
        ),
        members=state.components[role].grants,
        transition_id=transition_id,
    )


def waiting(state: ClusterState, role: Role, subject: str, *, what: str, is_of_gpus: bool = False) -> Needs:
    """Wait for an event that no command can cause. `subject` distinguishes the waits of one role. `is_of_gpus`: the
    wait is for GPUs, and is long enough for the job to go on without them first, where its policy places GPUs."""
    key = CommandId(f"{state.job}/{state.incarnation}/await/{role}/{subject}")
    wait_ms = MAX_ISSUES * command_deadline_ms(state)
    if is_of_gpus and state.remembered.assignment is not None:
        wait_ms = max(wait_ms, 2 * LONG_MS)
    wait = cmd.Await(key, what, wait_ms=wait_ms)
    return Needs((wait,), (f"waits for {what}",))
