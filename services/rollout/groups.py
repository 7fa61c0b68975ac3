"""Which responses of an iteration are still to be made, and who is making them. Pure.

A group is all responses to one prompt, complete when each of its draws is in. Groups may be added. Requests are given
out in order of prompt and draw. Invariants: a sample is given out to one engine at a time; what an engine held when it
was lost is given out again; a sample that came in once is not taken twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidegate.types import SampleId

Response = TypeVar("Response")


@dataclass(slots=True)
class GroupsInProgress(Generic[Response]):
    """The groups of one iteration that are not complete."""

    incarnation: int
    iteration: int
    prompts: tuple[int, ...]
    group_size: int
    _waiting: list[SampleId] = field(default_factory=list)
    _given: set[SampleId] = field(default_factory=set)
    _responses: dict[int, dict[int, Response]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.extend(self.prompts)

    def extend(self, prompts: Iterable[int]) -> None:
        """These are to be made too; ValueError on one that is in progress already."""
        for prompt in prompts:
            if prompt in self._responses:
                raise ValueError(f"prompt {prompt} is in progress already")
            self._responses[prompt] = {}
            for draw in range(self.group_size):
                heapq.heappush(self._waiting, SampleId(self.incarnation, self.iteration, prompt, draw))

    @property
    def is_done(self) -> bool:
        return not self._responses

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[SampleId]:
        """In the order in which they are to be given out."""
        return sorted(self._waiting)

    def is_given(self, sample: SampleId) -> bool:
        """An engine has it, as far as known."""
        return sample in self._given

    def take(self, limit: int) -> tuple[SampleId, ...]:
        """Up to `limit` samples for an engine to make."""
        taken = tuple(heapq.heappop(self._waiting) for _ in range(min(limit, len(self._waiting))))
        self._given.update(taken)
        return taken

    def give_back(self, samples: Iterable[SampleId]) -> None:
        """Their engine will not make them; those that came in meanwhile stay in."""
        for sample in samples:
            if sample in self._given:
                self._given.remove(sample)
                heapq.heappush(self._waiting, sample)

    def add(self, sample: SampleId, response: Response) -> list[Response] | None:
        """A response came in: the complete group in order of draw, or None while it is not. A repeat is None too."""
        if sample not in self._given:
            return None
        self._given.remove(sample)
        group = self._responses[sample.prompt]
        group[sample.draw] = response
        if len(group) < self.group_size:
            return None
        del self._responses[sample.prompt]
        return [group[draw] for draw in range(self.group_size)]
