"""The parts of a move of slots from the rollout or the inference to the actor, from the records of a finished job.

A move is two transitions: the giver releases the slots, then the actor takes them. Its moments, on one machine's
clock:

    decided     the scheduler's turn that plans the release          moves.jsonl
    asked       the giver's lead has taken the command             CommandAnswered
    released    the slots are free                                   GpusReleased
    called      the actor's lead has taken the command               CommandAnswered
    switched    the actor's layout is in force                       LayoutCommitted, with the reshard's own parts
    unheld      the actor's lead has taken the end of a hold, if one was in force at the switch
    first_step  a slot that came begins its first training           timeline

    decide_and_tell = (asked - decided) + (called - released) + (unheld - switched)
    drain           = released - asked
    switch          = switched - called      (the rest of the micro-batches that are under way, then the reshard)
    wait            = first_step - unheld      (for groups, and for the other ranks)

An answer is published after the lead has taken the command, so `decide_and_tell` is an upper bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.job import JobFolder
from tidegate.moves_log import Line, read_moves
from tidegate.types import Role

_NS_PER_S = 1e9
_HOLD = re.compile(r"/hold-(?P<number>\d+)/")
"""In the id of a command that begins or ends a hold."""
TRAINING = "training"


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Seconds. `reshard` has the parts that the actor reported of its switch; of a resume too."""

    transition: str
    giver: str
    num_slots: int
    decide_and_tell_s: float
    drain_s: float
    switch_s: float
    wait_s: float
    reshard: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return self.decide_and_tell_s + self.drain_s + self.switch_s + self.wait_s

    def row(self) -> dict[str, Any]:
        parts = {name: getattr(self, f"{name}_s") for name in ("decide_and_tell", "drain", "switch", "wait", "total")}
        reshard = {f"switch_{part}_s": seconds for part, seconds in sorted(self.reshard.items()) if seconds}
        return {
            "transition": self.transition,
            "giver": self.giver,
            "num_slots": self.num_slots,
            **{f"{name}_s": seconds for name, seconds in parts.items()},
            **reshard,
        }


@dataclass(frozen=True, slots=True)
class Planned:
    """A transition as it was decided, at `at_s`."""

    transition: str
    role: str
    comes: Sequence[str]
    leaves: Sequence[str]
    iteration: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Records:
    """What a finished job left. Times are Unix seconds."""

    planned: Sequence[Planned]
    """In the order of their decisions."""
    committed: frozenset[str]
    """The transitions that ended with all their moves."""
    iterations: Sequence[tuple[float, float]]
    """When each iteration opened and was reported."""
    answered: Sequence[tuple[str, float]]
    """The id of each command with the time of its answer, in order."""
    released: Mapping[str, float]
    """By transition."""
    switched: Mapping[str, tuple[float, Mapping[str, float]]]
    """By transition: the time, and the reported seconds by part."""
    training: Mapping[str, Sequence[float]]
    """By slot: the starts of its training."""

    @classmethod
    def read(cls, folder: JobFolder) -> Records:
        answered: list[tuple[str, float]] = []
        released: dict[str, float] = {}
        switched: dict[str, tuple[float, Mapping[str, float]]] = {}
        for line in folder.events.read_text().splitlines():
            event = json.loads(line)["event"]
            at_s, transition = int(event["occurred_unix_ns"]) / _NS_PER_S, event.get("transition_id", "")
            if "command_answered" in event and event["command_answered"].get("accepted"):
                answered.append((event["command_answered"]["command_id"], at_s))
            elif "gpus_released" in event:
                released[transition] = at_s
            elif "layout_committed" in event:
                switched[transition] = at_s, event["layout_committed"].get("reshard", {}).get("seconds", {})
        return cls(*from_log(read_moves(folder.moves)), answered, released, switched, _training(folder))


def from_log(lines: Sequence[Line]) -> tuple[list[Planned], frozenset[str], list[tuple[float, float]]]:
    """The first three fields of `Records`."""
    planned = [
        Planned(
            each["transition"], each["role"], each["comes"], each["leaves"], line["iteration"], line["at_ms"] / 1000
        )
        for line in lines
        if line["kind"] == "decision"
        for each in line["planned"]
    ]
    closed = (line for line in lines if line["kind"] == "closed")
    committed = frozenset(line["transition"] for line in closed if line["outcome"] == "committed")
    opened, reported = (
        {(line["incarnation"], line["iteration"]): line["at_ms"] / 1000 for line in lines if line["kind"] == kind}
        for kind in ("opened", "reported")
    )
    return planned, committed, [(opened[key], reported[key]) for key in sorted(opened.keys() & reported.keys())]


def slot_moves(records: Records) -> list[SlotMove]:
    """The moves whose slots all came from one release of another component, in the order of their decisions."""
    return [found for each in records.planned if (found := _slot_move(records, each)) is not None]


def _slot_move(records: Records, taken: Planned) -> SlotMove | None:
    """None for another kind of transition, and for a move that no training followed."""
    is_whole = taken.transition in records.committed
    if taken.role != Role.ACTOR or taken.iteration is None or not taken.comes or not is_whole:
        return None
    before = [each for each in records.planned if each.at_s < taken.at_s]
    given = [each for each in before if {*each.comes, *each.leaves} & {*taken.comes}]
    if not given or given[-1].role == Role.ACTOR or not set(taken.comes) <= set(given[-1].leaves):
        return None
    release = given[-1]
    asked_s, called_s = (_answer(records, each.transition) for each in (release, taken))
    released_s, switched = records.released.get(release.transition), records.switched.get(taken.transition)
    if asked_s is None or called_s is None or released_s is None or switched is None:
        return None
    switched_s, reshard = switched
    starts = [at_s for gpu in taken.comes for at_s in records.training.get(gpu, ()) if at_s >= switched_s]
    if not starts:
        return None
    first_s = min(starts)
    unheld_s = min(_unheld_s(records, switched_s), first_s)
    return SlotMove(
        transition=taken.transition,
        giver=release.role,
        num_slots=len(taken.comes),
        decide_and_tell_s=(asked_s - release.at_s) + (called_s - released_s) + (unheld_s - switched_s),
        drain_s=released_s - asked_s,
        switch_s=switched_s - called_s,
        wait_s=first_s - unheld_s,
        reshard=reshard,
    )


def _unheld_s(records: Records, switched_s: float) -> float:
    """When the hold that is in force at the switch ends; the switch itself where none is. In each iteration the first
    command of its kind begins a hold, and the next one ends it."""
    holds = [(match["number"], at_s) for name, at_s in records.answered if (match := _HOLD.search(name))]
    before = [int(number) for number, at_s in holds if at_s < switched_s]
    after = [at_s for _, at_s in holds if at_s >= switched_s]
    return after[0] if after and before and before[-1] % 2 == 0 else switched_s


def _answer(records: Records, transition: str) -> float | None:
    """The time of the first answer to a command of the transition."""
    return next((at_s for name, at_s in records.answered if name.startswith(f"{transition}/")), None)


def _training(folder: JobFolder) -> dict[str, list[float]]:
    trace = json.loads(folder.attempt().trace.read_text())
    return {gpu: sorted(starts) for gpu, starts in _starts(trace).items()}


def _starts(trace: Mapping[str, Any]) -> dict[str, list[float]]:
    names = {(each["pid"], each["tid"]): each["args"]["name"].removeprefix("GPU ") for each in _named_threads(trace)}
    start_s = trace["otherData"]["start_unix_ns"] / _NS_PER_S
    found: dict[str, list[float]] = {}
    for each in trace["traceEvents"]:
        if each["ph"] == "X" and each["name"] == TRAINING:
            found.setdefault(names[each["pid"], each["tid"]], []).append(start_s + each["ts"] / 1e6)
    return found


def _named_threads(trace: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (each for each in trace["traceEvents"] if each["name"] == "thread_name")
