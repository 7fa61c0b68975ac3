"""The groups in the lead's hand: taken from the stream, not yet published scored. Pure.

The hand deals batches of shares to idle copies. A batch has a few micro-batches, so that copies that come, or end
theirs, find something to do. A share is a whole group, or a part of one: of a large one, and where fewer groups wait
than copies are idle. A batch whose copy died or left comes back to the front, and another copy gets it: the stream
knows nothing of it, so a move or a death uses up no delivery. A group that was with a copy that died is dealt alone
from then on. So the deaths of a group that kills its copies do not count against the groups beside it.

Invariants:
- A sample is waiting, with one copy, or scored. [test_hand: waits_or_is_with_one_copy]
- A group delivered again is dealt once, and settled by its last delivery. [test_hand: delivered_again_is_dealt_once]
- A group that was with a dead copy is dealt alone. [test_hand: after_a_death_groups_are_dealt_alone]
- No copy is idle while a group of several micro-batches waits whole. [test_hand: where_more_copies_than_groups]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from services.inference.shares import HeldGroup, Share, whole_of
from tidegate.megatron.batching import BatchLimits
from tidegate.ports.bus import SampleDelivery
from tidegate.types import SampleId
from tidegate.v1 import samples_pb2

BATCHES_A_STAGE = 4
"""The micro-batches of a batch, for each stage of the copy's pipeline: enough to fill it. More would delay the first
group, for which the actor may be waiting."""


class Hand:
    def __init__(self, limits: BatchLimits, *, num_stages: int = 1) -> None:
        """`limits`: of the copies' micro-batches. `num_stages`: of a copy's pipeline."""
        self._limits = limits
        self.max_batches = BATCHES_A_STAGE * num_stages
        self._held: dict[int, HeldGroup] = {}
        self._waiting: deque[Share] = deque()

    def __contains__(self, prompt: int) -> bool:
        return prompt in self._held

    @property
    def prompts(self) -> frozenset[int]:
        return frozenset(self._held)

    @property
    def num_waiting(self) -> int:
        """The shares that wait."""
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
            self._waiting.append(whole_of(self._held[prompt], self._limits))

    def deal(self, *, num_idle: int) -> tuple[Share, ...]:
        """The next batch, where `num_idle` copies share what waits. Empty where nothing waits."""
        if not self._waiting:
            return ()
        if len(self._waiting) < num_idle and not self._waiting[0].held.num_deaths:
            share = self._waiting.popleft()
            self._waiting.extendleft(reversed(share.split(num_idle // (len(self._waiting) + 1))))
        most, room = -(-len(self._waiting) // num_idle), self.max_batches
        batch: list[Share] = []
        while len(batch) < most and room and not (batch and self._waiting[0].held.num_deaths):
            share, rest = self._waiting.popleft().cut_after(room)
            if rest is not None:
                self._waiting.appendleft(rest)
            room -= len(share.batches)
            batch.append(share)
            if share.held.num_deaths:
                break
        return tuple(batch)

    def note_scored(self, share: Share, scored: Mapping[SampleId, samples_pb2.Sample]) -> bool:
        """Notes the log-probabilities of the share's samples. Whether the group is scored now, and still held."""
        share.held.scored.update(scored)
        return self._held.get(share.held.prompt) is share.held and share.held.is_scored

    def give_back(self, batch: Sequence[Share], *, died: bool) -> None:
        """The batch waits again, before the others. `died`: its copy died with it."""
        held = [share for share in batch if self._held.get(share.held.prompt) is share.held]
        for each in {id(share.held): share.held for share in held}.values():
            each.num_deaths += died
        self._waiting.extendleft(reversed(held))

    def remove(self, held: HeldGroup) -> None:
        """The group is settled."""
        del self._held[held.prompt]
        self._waiting = deque(share for share in self._waiting if share.held is not held)
