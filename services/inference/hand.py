"""The groups in the lead's hand: taken from the stream, not yet published scored. Pure.

The hand deals batches of shares to idle copies. A batch has a few micro-batches, so that copies that come, or end
theirs, find something to do. A share is a whole group, or a part of one: of a large one, and where fewer groups wait
than copies are idle. A batch whose copy died or left comes back to the front, and another copy gets it: the stream
knows nothing of it, so a move or a death uses up no delivery. A group that was with a copy that died is dealt alone
from then on. So the deaths of a group that kills its copies do not count against the groups beside it.

The hand also holds responses that ended ahead of their groups. They are dealt where nothing of a delivered group waits,
the oldest prompt first, with all of its responses that wait then. When the group is delivered, only what is neither
scored nor with a copy waits with the other groups.

Invariants:
- A response is waiting, with one copy, or scored. [test_hand: waits_or_is_with_one_copy]
- A group delivered again is dealt once, and settled by its last delivery. [test_hand: delivered_again_is_dealt_once]
- A group that was with a dead copy is dealt alone. [test_hand: after_a_death_groups_are_dealt_alone]
- No copy is idle while a group of several micro-batches waits whole. [test_hand: where_more_copies_than_groups]
- No response is dealt ahead while one of a delivered group waits. [test_hand: delivered_groups_come_first]
- Of a group that is delivered, what was scored ahead is not dealt again, unless its tokens differ.
  [test_hand: only_the_rest_of_a_group]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from services.inference.shares import HeldGroup, Share, share_of_waiting
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
        """Shares of delivered groups."""
        self._ahead: dict[int, HeldGroup] = {}
        """The groups without a delivery of which responses wait, the oldest first."""

    def __contains__(self, prompt: int) -> bool:
        """Whether the group of the prompt was delivered and is not settled."""
        held = self._held.get(prompt)
        return held is not None and held.delivery is not None

    @property
    def prompts(self) -> frozenset[int]:
        return frozenset(self._held)

    @property
    def num_waiting(self) -> int:
        """The shares of delivered groups that wait."""
        return len(self._waiting)

    @property
    def num_tokens_ahead(self) -> int:
        """The tokens of responses that were scored ahead of groups that are not settled."""
        return sum(held.num_tokens_ahead for held in self._held.values())

    @property
    def deliveries(self) -> list[SampleDelivery]:
        return [held.delivery for held in self._held.values() if held.delivery is not None]

    def add(self, delivery: SampleDelivery) -> HeldGroup | None:
        """Takes a group, or the newer delivery of one that it has. Returns a group that it takes scored already."""
        group = delivery.group
        held = self._held.setdefault(group.prompt, HeldGroup(group))
        is_new = held.delivery is None
        held.deliver(delivery)
        if not is_new:
            return None
        self._ahead.pop(group.prompt, None)
        if held.waiting:
            self._waiting.append(share_of_waiting(held, self._limits))
        return held if held.is_scored else None

    def add_ahead(self, group: samples_pb2.SampleGroup) -> None:
        """Takes a response that ended ahead of its group, unless the group is delivered or is to wait for that."""
        held = self._held.setdefault(group.prompt, HeldGroup(group))
        if held.delivery is None and not held.waits_for_delivery and held.add(group):
            self._ahead.setdefault(group.prompt, held)

    def deal(self, *, num_idle: int) -> tuple[Share, ...]:
        """The next batch of delivered groups, where `num_idle` copies share what waits. Empty where nothing waits."""
        return self._begun(self._batch_of(self._waiting, num_idle=num_idle))

    def deal_ahead(self, *, num_idle: int) -> tuple[Share, ...]:
        """The next batch of responses ahead of their groups. Empty while anything of a delivered group waits."""
        if self._waiting:
            return ()
        # No copy takes more prompts than micro-batches.
        oldest = islice(self._ahead.values(), num_idle * self.max_batches)
        shares = deque(share_of_waiting(held, self._limits) for held in oldest)
        batch = self._begun(self._batch_of(shares, num_idle=num_idle))
        for share in batch:
            if not share.held.waiting:
                self._ahead.pop(share.held.prompt, None)
        return batch

    def _batch_of(self, waiting: deque[Share], *, num_idle: int) -> tuple[Share, ...]:
        if not waiting:
            return ()
        if len(waiting) < num_idle and not waiting[0].held.num_deaths:
            share = waiting.popleft()
            waiting.extendleft(reversed(share.split(num_idle // (len(waiting) + 1))))
        most, room = -(-len(waiting) // num_idle), self.max_batches
        batch: list[Share] = []
        while len(batch) < most and room and not (batch and waiting[0].held.num_deaths):
            share, rest = waiting.popleft().cut_after(room)
            if rest is not None:
                waiting.appendleft(rest)
            room -= len(share.batches)
            batch.append(share)
            if share.held.num_deaths:
                break
        return tuple(batch)

    def _begun(self, batch: tuple[Share, ...]) -> tuple[Share, ...]:
        for share in batch:
            for response in share.responses:
                response.is_with_copy, response.is_ahead = True, share.held.delivery is None
        return batch

    def note_scored(self, share: Share, scored: Mapping[SampleId, samples_pb2.Sample]) -> bool:
        """Notes the log-probabilities of the share's responses. Whether these make the group, still held, scored."""
        held, counts = share.held, False
        for response in share.responses:
            response.is_with_copy, response.answer = False, scored.get(response.id)
            counts |= held.has(response)
        return counts and held.is_scored and self._held.get(held.prompt) is held

    def give_back(self, batch: Sequence[Share], *, died: bool) -> None:
        """The batch waits again, before the others. `died`: its copy died with it."""
        held = [share for share in batch if self._held.get(share.held.prompt) is share.held]
        for each in {id(share.held): share.held for share in held}.values():
            each.num_deaths += died
        ahead: dict[int, HeldGroup] = {}
        delivered: list[Share] = []
        for share in held:
            for response in share.responses:
                response.is_with_copy = False
            if share.held.delivery is None:
                ahead[share.held.prompt] = share.held
            elif share.present.batches:
                delivered.append(share.present)
        self._ahead = {
            prompt: each
            for prompt, each in (ahead | self._ahead).items()
            if each.waiting and not each.waits_for_delivery
        }
        self._waiting.extendleft(reversed(delivered))

    def keep_for_delivery(self, held: HeldGroup) -> None:
        """Deals nothing more of the group ahead of its delivery."""
        held.waits_for_delivery = True
        self._ahead.pop(held.prompt, None)

    def remove(self, prompt: int) -> None:
        """The group of the prompt is settled. What was scored ahead of one that is not held scored is forgotten."""
        self._held.pop(prompt, None)
        self._ahead.pop(prompt, None)
        self._waiting = deque(share for share in self._waiting if share.held.prompt != prompt)
