"""The demo task: "count from 4 :" asks for "4 3 2 1 liftoff", and the right answer's length has a long tail.

A demonstration counts without fault and is right with probability `RIGHT_SHARE`; else its ending is one of three wrong
ones, equally likely. The warm-up therefore teaches to count, and leaves open how a countdown ends: the model is right
in about 40 % of its answers, one decision away from nearly all, and that decision is what GRPO learns.

Invariants: prompts, held-out ones and demonstrations are functions of (seed, index) only; the lists are drawn
independently, of the same numbers;
an answer has `MIN_LENGTH` to `MAX_LENGTH` words; a reward is 1 for exactly the right answer and else 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from tidegate.tasks.text import Demonstration, Prompt

NUM_NUMBERS = 57
"""Numbers are 0..56: with four words and three special tokens the vocabulary is 64, which every TP size divides."""

MIN_LENGTH = 2
MAX_LENGTH = 48
"""Leaves the longest answer, a word too many and its end token well under the demo's 64 new tokens."""

MEDIAN_LENGTH = 7.0
LENGTH_SIGMA = 0.9
"""Of the logarithm. The 95th percentile is then e^(1.645 * 0.9) = 4.4 medians: a tail in which most GPUs would idle."""

RIGHT_SHARE = 0.4
"""Much lower and groups without a right answer are common; much higher and there is little left for GRPO to learn."""

RIGHT_ENDING = "1 liftoff"
WRONG_ENDINGS = ("1", "1 0 liftoff", "1 liftoff liftoff")


@dataclass(frozen=True, slots=True)
class CountdownTask:
    """Counting down to liftoff."""

    seed: int

    def words(self) -> tuple[str, ...]:
        return ("count", "from", ":", "liftoff", *(str(number) for number in range(NUM_NUMBERS)))

    def prompt(self, index: int) -> Prompt:
        return _asking(_draw_first(self._random("prompt", index)))

    def held_out(self, index: int) -> Prompt:
        return _asking(_draw_first(self._random("held-out prompt", index)))

    def demonstration(self, index: int) -> Demonstration:
        random = self._random("demonstration", index)
        first = _draw_first(random)
        ending = RIGHT_ENDING if random.random() < RIGHT_SHARE else random.choice(WRONG_ENDINGS)
        return Demonstration(_asking(first), _counted(first, ending))

    def reward(self, prompt: Prompt, response_text: str) -> float:
        return float(response_text == _counted(_parse(prompt), RIGHT_ENDING))

    def _random(self, purpose: str, index: int) -> Random:
        """A generator of its own for each index, seeded by text: Python hashes that with SHA-512, on every machine."""
        if index < 0:
            raise ValueError(f"the index of a {purpose} is {index}; indices start at 0")
        return Random(f"tidegate countdown {self.seed} {purpose} {index}")


def _draw_first(random: Random) -> int:
    """The number to count from, by a lognormal length of the answer: one word a number, and one for liftoff."""
    wished = round(random.lognormvariate(math.log(MEDIAN_LENGTH), LENGTH_SIGMA))
    return min(max(wished, MIN_LENGTH), MAX_LENGTH) - 1


def _asking(first: int) -> Prompt:
    return Prompt(f"count from {first} :")


def _counted(first: int, ending: str) -> str:
    return " ".join([*(str(number) for number in range(first, 1, -1)), ending])


def _parse(prompt: Prompt) -> int:
    words = prompt.text.split(" ")
    if len(words) == 4 and words[2].isdecimal():
        first = int(words[2])
        if 1 <= first < NUM_NUMBERS and _asking(first) == prompt:
            return first
    raise ValueError(f"prompt {prompt.text!r} is not 'count from NUMBER :' with a number of 1 to {NUM_NUMBERS - 1}")
