"""The responses of an iteration that are still to be made, and those that engines are making. Pure.

A group is all responses to one prompt. It is complete when each of its draws has arrived. Groups may be added. Samples
are assigned in the order of prompt and draw, or as `order` puts them. Samples that were given back are in that order
too.

Invariants:
- A sample is assigned to one engine at a time. [test_groups: every_history_ends_with_each_sample_once]
- The samples that a lost engine held are assigned again. [test_groups: lost_engine_held_are_assigned_again]
- A sample that arrived is not accepted a second time. [test_groups: late_answer_of_a_lost_engine]
- An order decides when a sample is assigned, not how often. [test_groups: every_history_ends_with_each_sample_once]
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidegate.order_of_responses import responses_in
from tidegate.types import SampleId

Response = TypeVar("Response")


@dataclass(slots=True)
class GroupsInProgress(Generic[Response]):
    """The incomplete groups of one iteration."""

    incarnation: int
    iteration: int
    prompts: tuple[int, ...]
    group_size: int
    _waiting: list[tuple[int, SampleId]] = field(default_factory=list)
    """A heap of the waiting samples, each with its place in the order."""
    _places: dict[tuple[int, int], int] = field(default_factory=dict)
    """By prompt and draw."""
    _assigned: set[SampleId] = field(default_factory=set)
    _responses: dict[int, dict[int, Response]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.extend(self.prompts)

    def extend(self, prompts: Iterable[int]) -> None:
        """Add the groups of these prompts. Raises ValueError on one that is in progress already."""
        for prompt in prompts:
            if prompt in self._responses:
                raise ValueError(f"prompt {prompt} is in progress already")
            self._responses[prompt] = {}
            for draw in range(self.group_size):
                self._wait(SampleId(self.incarnation, self.iteration, prompt, draw))

    def order(self, prompts: Sequence[int]) -> None:
        """Assign waiting samples in this order of prompts (`tidegate.order_of_responses`)."""
        in_order = responses_in(prompts, self.group_size)
        self._places = {prompt_and_draw: place for place, prompt_and_draw in enumerate(in_order)}
        waiting = [sample for _, sample in self._waiting]
        self._waiting.clear()
        for sample in waiting:
            self._wait(sample)

    @property
    def is_done(self) -> bool:
        return not self._responses

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[SampleId]:
        """The waiting samples, in the order of their assignment."""
        return [sample for _, sample in sorted(self._waiting)]

    def is_assigned(self, sample: SampleId) -> bool:
        """Whether an engine has the sample, as far as this lead knows."""
        return sample in self._assigned

    def take(self, limit: int) -> tuple[SampleId, ...]:
        """Assign up to `limit` samples to an engine."""
        taken = tuple(heapq.heappop(self._waiting)[1] for _ in range(min(limit, len(self._waiting))))
        self._assigned.update(taken)
        return taken

    def give_back(self, samples: Iterable[SampleId]) -> None:
        """Queue samples that their engine will not make. Samples that arrived meanwhile are not queued."""
        for sample in samples:
            if sample in self._assigned:
                self._assigned.remove(sample)
                self._wait(sample)

    def add(self, sample: SampleId, response: Response) -> list[Response] | None:
        """Add a response.

        Returns the group in the order of draws once it is complete, else None; None for a repeat too."""
        if sample not in self._assigned:
            return None
        self._assigned.remove(sample)
        group = self._responses[sample.prompt]
        group[sample.draw] = response
        if len(group) < self.group_size:
            return None
        del self._responses[sample.prompt]
        return [group[draw] for draw in range(self.group_size)]

    def _wait(self, sample: SampleId) -> None:
        place = self._places.get((sample.prompt, sample.draw), len(self._places))
        heapq.heappush(self._waiting, (place, sample))
