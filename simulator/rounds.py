"""Methods that end a rollout early, over several iterations of collocated phases: tail batching, partial rollouts.

They change what is trained, so the time of one iteration says nothing of them. Their figure is

    rate = trained tokens / seconds of all iterations     tokens/s

- `phases`, `phases_ordered`: every prompt of an iteration, in their order, or the longest first by their hints. What
  the others are compared with.
- `tail_batching` (RollPacker, arXiv 2509.21009): a short round issues `OVER` times the prompts and responses, and ends
  with as many whole groups as are trained. The other prompts wait for a long round, which issues no more than it
  trains. Each prompt is trained once in the end, but a group of a short round lacks its longest responses, and the
  prompts of one iteration have similar lengths. What a short round made besides its groups is thrown away.
- `partial` (APRIL, arXiv 2509.18521): `PARTIAL` times the prompts are issued. Once enough groups are whole, the others
  stop, and go on in the next iteration with their tokens. Long groups are trained later, and most of the tokens are of
  older weights.
- `dropped`: as `partial`, but the others are thrown away. Long groups are never trained, so that the trained lengths
  are shorter than the law's.

Each of them waits for the rollout before it infers and trains, so the two parts of `generation` add up to an iteration.

Invariants:
- All methods get the same prompts in the same order, each with the same responses. [test_rounds: the_same_prompts]
- Each iteration trains the job's number of prompts and responses. [test_rounds: trains_the_jobs_number]
- No prompt is trained twice; under `tail_batching` and `partial` none is lost. [test_rounds: trained_at_most_once]
- The same scenario and seed give the same figures. [test_rounds: the_same_scenario_and_seed]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.generation import Response, after_rollout_s, generate
from simulator.lengths import LengthLaw, Lengths, draw_lengths
from simulator.scenario import Scenario, ScenarioError

OVER = 1.25
"""RollPacker's factor, of prompts and of responses. With more, the short rounds are shorter and waste more."""

PARTIAL = 2.0
"""The prompts that are issued for each one that is trained. Whoever issues more has more tokens of older weights."""

BLOCK = 64
"""Prompts are drawn in blocks, so that their number in an iteration does not change their lengths."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens`: of each response that may be issued. `hint`: the length that an earlier epoch saw."""

    number: int
    tokens: tuple[int, ...]
    hint: float


@dataclass
class Tally:
    """Sums over iterations. `old_tokens`: trained ones that an earlier iteration's weights made. `trained`: the number
    of each trained prompt."""

    seconds: float = 0.0
    rollout_s: float = 0.0
    num_iterations: int = 0
    num_responses: int = 0
    trained_tokens: int = 0
    generated_tokens: int = 0
    old_tokens: int = 0
    trained: list[int] = field(default_factory=list)

    @property
    def rate_tokens_per_s(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def wasted_share(self) -> float:
        """The share of generated tokens that no iteration has trained so far."""
        return 1 - self.trained_tokens / self.generated_tokens


class _Prompts:
    """An endless stream of prompts by the scenario's law."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        if scenario.lengths.law is LengthLaw.TRACE:
            raise ScenarioError(
                "lengths.law=trace has the prompts of one iteration, and these methods need those of several: name "
                "lognormal or long_tailed"
            )
        if scenario.lengths.mean_turns > 1:
            raise ScenarioError(
                f"lengths.mean_turns={scenario.lengths.mean_turns:g}: a rollout that ends early is simulated for "
                "responses of one turn: set it to 1"
            )
        self._section, self._group_size = scenario.lengths, scenario.algorithm.group_size
        self._rng = np.random.default_rng(seed)
        self._left: list[Prompt] = []
        self._count = 0

    def take(self, num: int) -> list[Prompt]:
        while len(self._left) < num:
            self._left += self._block()
        taken, self._left = self._left[:num], self._left[num:]
        return taken

    def _block(self) -> list[Prompt]:
        size = math.ceil(OVER * self._group_size)
        drawn = draw_lengths(self._section, num_prompts=BLOCK, group_size=size, rng=self._rng)
        first, self._count = self._count, self._count + BLOCK
        return [
            Prompt(first + at, tuple(sum(turns) for turns in row), hint)
            for at, (row, hint) in enumerate(zip(drawn.turns, drawn.hints, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class _Issued:
    """`whole`: by prompt, the members of its group, in the order of their ends. `tokens`: by prompt and member, those
    that there are when the rollout ends, earlier iterations' included."""

    whole: Mapping[int, tuple[int, ...]]
    rollout_s: float
    tokens: tuple[int, ...]


@dataclass
class _Rounds:
    """The iterations of one method."""

    scenario: Scenario
    prompts: _Prompts
    tally: Tally = field(default_factory=Tally)
    waiting: list[Prompt] = field(default_factory=list)
    """Prompts that wait for a long round, or that go on in the next iteration."""
    begun: dict[tuple[int, int], int] = field(default_factory=dict)
    """By prompt and member: the tokens that earlier iterations made."""

    @property
    def num_prompts(self) -> int:
        return self.scenario.algorithm.prompts_per_iteration

    @property
    def size(self) -> int:
        return self.scenario.algorithm.group_size

    def phases(self, *, is_ordered: bool) -> None:
        prompts = self.prompts.take(self.num_prompts)
        if is_ordered:
            prompts.sort(key=lambda prompt: -prompt.hint)
        self._train(prompts, self._issue(prompts, self.size))

    def tail_batching(self) -> None:
        if len(self.waiting) >= self.num_prompts:
            issued, self.waiting = self.waiting[: self.num_prompts], self.waiting[self.num_prompts :]
            self._train(issued, self._issue(issued, self.size))
            return
        issued = self.prompts.take(math.ceil(OVER * self.num_prompts))
        found = self._issue(issued, math.ceil(OVER * self.size))
        self._train(issued, found)
        self.waiting += [prompt for prompt in issued if prompt.number not in found.whole]

    def partial(self, *, keeps: bool) -> None:
        num_new = max(0, math.ceil(PARTIAL * self.num_prompts) - len(self.waiting))
        issued = [*self.waiting, *self.prompts.take(num_new)]
        found = self._issue(issued, self.size)
        self._train(issued, found)
        self.waiting = [prompt for prompt in issued if keeps and prompt.number not in found.whole]
        waits = {prompt.number for prompt in self.waiting}
        members = [(prompt.number, member) for prompt in issued for member in range(self.size)]
        made = zip(members, found.tokens, strict=True)
        self.begun = {(number, member): tokens for (number, member), tokens in made if number in waits}

    def _issue(self, issued: Sequence[Prompt], size: int) -> _Issued:
        """Generate `size` responses of each prompt, until as many prompts as are trained have a whole group."""
        order = [(prompt, member) for prompt in issued for member in range(size)]
        whole: dict[int, tuple[int, ...]] = {}
        ended: dict[int, list[int]] = {}

        def is_enough(at: int) -> bool:
            prompt, member = order[at]
            members = ended.setdefault(prompt.number, [])
            members.append(member)
            if len(members) == self.size:
                whole[prompt.number] = tuple(members)
            return len(whole) >= self.num_prompts

        before = [self.begun.get((prompt.number, member), 0) for prompt, member in order]
        goals = [prompt.tokens[member] for prompt, member in order]
        # A response that ended in an earlier iteration is issued no more, and counts at once.
        places = []
        for at, goal in enumerate(goals):
            if before[at] < goal:
                places.append(at)
            else:
                is_enough(at)
        responses = [Response(goals[at], before[at]) for at in places]
        found = generate(self.scenario, responses, is_enough=lambda number: is_enough(places[number]))
        tokens = list(before)
        for at, made in zip(places, found.tokens, strict=True):
            tokens[at] = made
        self.tally.generated_tokens += sum(tokens) - sum(before)
        return _Issued(whole, found.seconds, tuple(tokens))

    def _train(self, issued: Sequence[Prompt], found: _Issued) -> None:
        whole = found.whole
        trained = [prompt for prompt in issued if prompt.number in whole]
        lengths = [[prompt.tokens[member] for member in whole[prompt.number]] for prompt in trained]
        turns = tuple(tuple((tokens,) for tokens in row) for row in lengths)
        tally = self.tally
        tally.rollout_s += found.rollout_s
        tally.seconds += found.rollout_s + after_rollout_s(self.scenario, Lengths(turns, (0.0,) * len(turns)))
        tally.num_iterations += 1
        tally.num_responses += sum(map(len, lengths))
        tally.trained_tokens += sum(map(sum, lengths))
        tally.old_tokens += sum(
            self.begun.get((prompt.number, member), 0) for prompt in trained for member in whole[prompt.number]
        )
        tally.trained += [prompt.number for prompt in trained]


METHODS: Mapping[str, Callable[[_Rounds], None]] = {
    "phases": lambda rounds: rounds.phases(is_ordered=False),
    "phases_ordered": lambda rounds: rounds.phases(is_ordered=True),
    "tail_batching": _Rounds.tail_batching,
    "partial": lambda rounds: rounds.partial(keeps=True),
    "dropped": lambda rounds: rounds.partial(keeps=False),
}
"""One iteration of each method."""


def tally_of(method: str, scenario: Scenario, *, num_iterations: int, seed: int | None = None) -> Tally:
    """The sums of the first iterations of a training with constant lengths.

    ScenarioError: the lengths are a trace, which has one iteration, or have several turns.
    """
    rounds = _Rounds(scenario, _Prompts(scenario, scenario.seed if seed is None else seed))
    for _ in range(num_iterations):
        METHODS[method](rounds)
    return rounds.tally
