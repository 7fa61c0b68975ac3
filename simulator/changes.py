"""A change of a component's GPUs, as a command asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.state import commands as cmd
from tidegate.types import Grant, Layout

ChangeCommand = cmd.ScaleUp | cmd.ScaleDown | cmd.Migrate | cmd.Suspend | cmd.Resume


@dataclass(slots=True)
class Change:
    """The grants that come, those that leave, and those that the component has afterwards, in rank order.

    - `layout` is None for a component that gives up all its GPUs.
    - `is_lead_to_commit`: the lead commits the layout in the store. Otherwise the scheduler does, once the lead reports
      that the layout is in force.
    - `is_switched`: nothing can keep the component from the new layout any more.
    """

    transition: str
    coming: tuple[Grant, ...]
    leaving: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout | None
    is_lead_to_commit: bool = False
    is_switched: bool = False


def change_of(command: ChangeCommand) -> Change:
    transition = command.header.transition_id
    match command:
        case cmd.ScaleUp():
            return Change(transition, command.grants, (), command.members, command.layout)
        case cmd.ScaleDown():
            return Change(transition, (), command.grants, command.members, command.layout)
        case cmd.Migrate():
            return Change(transition, command.coming, command.leaving, command.members, command.layout)
        case cmd.Suspend():
            return Change(transition, (), command.grants, (), None)
        case cmd.Resume():
            return Change(transition, command.grants, (), command.grants, command.layout)
