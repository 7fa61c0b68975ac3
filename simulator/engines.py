"""One engine with continuous batching. Its state is computed on demand, by closed forms.

Every running sequence gains one token a step:

    end_step = admitted_step + goal - generated

    end_step       the engine's step at which the sequence ends its turn
    admitted_step  the engine's step at the admission
    goal           the tokens at the end of the turn
    generated      the tokens at the admission

The next event of the engine is the smallest `end_step`, or the step at which the KV cache is full. Steps are whole. A
sequence joins after the step in flight, and its prefill pauses the others.

Invariants:
- The cached tokens are the sum of context and generated tokens of all running sequences.
  [test_simulator: every_sequence_ends_once]
- A sequence that leaves keeps every token of the completed steps. [test_world: continue_elsewhere_with_their_tokens]
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from simulator.columns import Columns
from simulator.cost_model import EngineCosts
from simulator.noise import EXACT, Noise
from tidegate.types import GpuId


@dataclass(slots=True)
class Sequence:
    """An unfinished response. `turn_ends` has the generated tokens at the end of each turn, earlier turns included."""

    index: int
    group: int
    turn_ends: tuple[int, ...]
    context_tokens: int
    """The tokens of the prompt and of the environment's observations."""
    generated: int = 0
    turn: int = 0
    prefilled: int = 0
    """The tokens that an engine had computed when the sequence last left it at the end of a turn."""

    @property
    def goal(self) -> int:
        """The generated tokens at the end of this turn."""
        return self.turn_ends[self.turn]

    @property
    def num_tokens(self) -> int:
        return self.context_tokens + self.generated


@dataclass(frozen=True, slots=True)
class Next:
    """The next event of an engine, if nothing interferes."""

    at_s: float
    steps: int
    overflows: bool
    """The KV cache is full at this event: the sequence with the fewest tokens goes back to the queue."""


@dataclass(slots=True)
class _Member:
    sequence: Sequence
    start: int
    """The engine's step at which the sequence would have had no token."""


@dataclass(slots=True)
class Engine:
    """`at_s` is the end of the last step. It is later than now during a step or a prefill that all must wait for.

    `noise` gives the steps of each batch their factor.
    """

    name: int
    gpus: tuple[GpuId, ...]
    costs: EngineCosts
    columns: Columns
    at_s: float
    steps: int = 0
    kv_tokens: int = 0
    next: Next | None = None
    noise: Noise = EXACT
    _slowness: float = 1.0
    _num_batches: int = 0
    _members: dict[int, _Member] = field(default_factory=dict)
    _ends: list[tuple[int, int]] = field(default_factory=list)

    @property
    def running(self) -> int:
        return len(self._members)

    def has_room(self, sequence: Sequence) -> bool:
        """An empty engine has room for any sequence: otherwise one above the cache's share would wait forever."""
        if not self._members:
            return True
        room = self.costs.kv_admission_share * self.costs.kv_capacity_tokens
        return self.running < self.costs.max_running and self.kv_tokens + sequence.num_tokens <= room

    def advance(self, now_s: float) -> None:
        """Complete every step that ends by `now_s`."""
        if not self._members:
            self.at_s = max(self.at_s, now_s)
        elif now_s > self.at_s or (self.next and now_s >= self.next.at_s):
            self._step(*self._ended(now_s))

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """The caller calls `plan` afterwards."""
        self.advance(now_s)
        if self._members and self.at_s < now_s:
            self._step(1, self.at_s + self.decode_s(1))
        self.next = None
        self.at_s += self._prefill_s(sequence)
        start = self.steps - sequence.generated
        self._members[sequence.index] = _Member(sequence, start)
        self.columns.run(sequence.index, engine=self.name, start=start)
        heapq.heappush(self._ends, (start + sequence.goal, sequence.index))
        self.kv_tokens += sequence.num_tokens

    def plan(self) -> Next | None:
        """The next event. None: nothing runs."""
        self._drop_stale_ends()
        if not self._members:
            self.next = None
            return None
        self._slowness = self.noise.of_engine(self.name, self._num_batches)
        self._num_batches += 1
        to_end = max(0, self._ends[0][0] - self.steps)
        to_full = (self.costs.kv_capacity_tokens - self.kv_tokens) // self.running + 1
        overflows = self.running > 1 and to_full < to_end
        steps = max(0, to_full) if overflows else to_end
        self.next = Next(self.at_s + self.decode_s(steps), steps, overflows)
        return self.next

    def decode_s(self, steps: int) -> float:
        """The seconds of the next steps with the present batch."""
        exact_s = self.costs.decode_s(running=self.running, kv_tokens=self.kv_tokens, steps=steps)
        return exact_s * self._slowness

    def take_ended(self) -> list[Sequence]:
        """Take the sequences that have reached the end of their turn, by step and then by number."""
        ended = []
        self._drop_stale_ends()
        while self._ends and self._ends[0][0] <= self.steps:
            ended.append(self.take(self._ends[0][1]))
            self._drop_stale_ends()
        return ended

    def take(self, index: int) -> Sequence:
        """Take a sequence off the engine with its tokens. The caller calls `advance` before and `plan` afterwards."""
        member = self._members.pop(index)
        sequence = member.sequence
        sequence.generated = self.steps - member.start
        self.columns.stop(index, tokens=sequence.generated)
        self.kv_tokens -= sequence.num_tokens
        self.next = None
        return sequence

    def shortest(self) -> int:
        """The number of the sequence with the fewest generated tokens."""
        return min(self._members, key=lambda index: (self.steps - self._members[index].start, index))

    def progress(self) -> tuple[tuple[int, int], ...]:
        """(number, generated tokens) of each running sequence at the last `advance`."""
        return tuple((index, self.steps - member.start) for index, member in sorted(self._members.items()))

    def _ended(self, now_s: float) -> tuple[int, float]:
        """The steps completed since `at_s`, and the end of the last one. A planned event comes at its exact time."""
        if self.next and now_s >= self.next.at_s:
            return self.next.steps, self.next.at_s
        exact_s = (now_s - self.at_s) / self._slowness
        steps = self.costs.steps_within(exact_s, running=self.running, kv_tokens=self.kv_tokens)
        if self.next:
            steps = min(steps, self.next.steps - 1)
        return steps, self.at_s + self.decode_s(steps)

    def _step(self, steps: int, at_s: float) -> None:
        self.steps += steps
        self.kv_tokens += steps * self.running
        self.at_s = at_s
        if self.next:
            self.next = Next(self.next.at_s, self.next.steps - steps, self.next.overflows)

    def _prefill_s(self, sequence: Sequence) -> float:
        tokens = float(sequence.num_tokens)
        if sequence.prefilled:
            tokens += (self.costs.turn_prefill_share - 1) * sequence.prefilled
        elif not sequence.generated:
            tokens *= self.costs.fresh_prefill_share
        return tokens / self.costs.prefill_tokens_per_s

    def _drop_stale_ends(self) -> None:
        """Drop the ends of sequences that were taken off, or taken off and admitted again."""
        while self._ends and self._is_stale(*self._ends[0]):
            heapq.heappop(self._ends)

    def _is_stale(self, end: int, index: int) -> bool:
        member = self._members.get(index)
        return member is None or member.start + member.sequence.goal != end
