"""The groups in the lead's hand: taken from the stream, not yet published scored. Pure.

The hand deals batches to idle copies. A batch whose copy died or left comes back to the front, and another copy gets
it: the stream knows nothing of it, so a move or a death uses up no delivery. A group that was with a copy that died is
dealt alone from then on. So the deaths of a group that kills its copies do not count against the groups beside it.

Invariants:
- A group is either waiting or with one copy. [test_hand: waits_or_is_with_one_copy]
- A group delivered again is dealt once, and settled by its last delivery. [test_hand: delivered_again_is_dealt_once]
- A group that was with a dead copy is dealt alone. [test_hand: after_a_death_groups_are_dealt_alone]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.ports.bus import SampleDelivery

MAX_GROUPS_A_BATCH = 8
"""Enough to fill a pipeline. More would delay the first group, for which the actor may be waiting."""


@dataclass(slots=True)
class HeldGroup:
    """A group with its last delivery. `num_deaths`: the copies that died while they had it."""

    delivery: SampleDelivery
    num_deaths: int = 0

    @property
    def prompt(self) -> int:
        return self.delivery.group.prompt


class Hand:
    def __init__(self) -> None:
        self._held: dict[int, HeldGroup] = {}
        self._waiting: deque[HeldGroup] = deque()

    def __contains__(self, prompt: int) -> bool:
        return prompt in self._held

    @property
    def prompts(self) -> frozenset[int]:
        return frozenset(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def deliveries(self) -> list[SampleDelivery]:
        return [held.delivery for held in self._held.values()]

    def add(self, delivery: SampleDelivery) -> None:
        """Takes a group, or the newer delivery of one that it has."""
        prompt = delivery.group.prompt
        if prompt in self._held:
            self._held[prompt].delivery = delivery
        else:
            self._held[prompt] = HeldGroup(delivery)
            self._waiting.append(self._held[prompt])

    def deal(self, *, num_idle: int) -> tuple[HeldGroup, ...]:
        """The next batch, where `num_idle` copies share what waits. Empty where nothing waits."""
        share = min(MAX_GROUPS_A_BATCH, -(-len(self._waiting) // num_idle))
        batch: list[HeldGroup] = []
        while len(batch) < share and not (batch and self._waiting[0].num_deaths):
            batch.append(self._waiting.popleft())
            if batch[0].num_deaths:
                break
        return tuple(batch)

    def give_back(self, batch: Sequence[HeldGroup], *, died: bool) -> None:
        """The batch waits again, before the others. `died`: its copy died with it."""
        for held in batch:
            held.num_deaths += died
        self._waiting.extendleft(reversed(batch))

    def remove(self, held: HeldGroup) -> None:
        """The group is settled."""
        del self._held[held.prompt]
        if held in self._waiting:
            self._waiting.remove(held)
