"""The demo task: "count from 4 :" asks for "4 3 2 1 liftoff", and the right answer's length has a long tail.

A demonstration counts without fault. With probability `RIGHT_SHARE` its ending is right; else it is one of three wrong
endings, equally likely. The warm-up thus teaches to count, but not how a countdown ends. After it, the model is right
in about 40 % of its answers, and one decision away from nearly all. GRPO learns that decision.

Invariants:
- Prompts, held-out prompts and demonstrations depend only on (seed, index). [test_countdown: order_of_asking]
- The three lists are drawn independently, from the same numbers. [test_countdown: draw_different_lists]
- An answer has `MIN_LENGTH` to `MAX_LENGTH` words. [test_countdown: lengths_of_right_answers]
- A reward is 1 for exactly the right answer, else 0. [test_countdown: any_other_answer_earns_nothing]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from tidegate.tasks.text import Demonstration, Prompt

NUM_NUMBERS = 57
"""The numbers are 0..56. With four words and three special tokens the vocabulary is 64, which every TP size divides."""

MIN_LENGTH = 2
MAX_LENGTH = 48
"""With this, the longest answer, one extra word and the end token stay well below the demo's 64 new tokens."""

MEDIAN_LENGTH = 7.0
LENGTH_SIGMA = 0.9
"""The sigma of the logarithm. The 95th percentile is e^(1.645 * 0.9) = 4.4 medians: a tail in which most GPUs idle."""

RIGHT_SHARE = 0.4
"""With a much lower share, groups without a right answer are common.

With a much higher one, GRPO has little to learn."""

RIGHT_ENDING = "1 liftoff"
WRONG_ENDINGS = ("1", "1 0 liftoff", "1 liftoff liftoff")


@dataclass(frozen=True, slots=True)
class CountdownTask:
    """The countdown task."""

    seed: int

    def words(self) -> tuple[str, ...]:
        return ("count", "from", ":", "liftoff", *(str(number) for number in range(NUM_NUMBERS)))

    def prompt(self, index: int) -> Prompt:
        return _prompt_from(_draw_first(self._random("prompt", index)))

    def held_out(self, index: int) -> Prompt:
        return _prompt_from(_draw_first(self._random("held-out prompt", index)))

    def demonstration(self, index: int) -> Demonstration:
        random = self._random("demonstration", index)
        first = _draw_first(random)
        ending = RIGHT_ENDING if random.random() < RIGHT_SHARE else random.choice(WRONG_ENDINGS)
        return Demonstration(_prompt_from(first), _countdown(first, ending))

    def reward(self, prompt: Prompt, response_text: str) -> float:
        return float(response_text == _countdown(_parse(prompt), RIGHT_ENDING))

    def _random(self, purpose: str, index: int) -> Random:
        """A generator for one index, seeded by a text: Python hashes it with SHA-512, the same on every machine."""
        if index < 0:
            raise ValueError(f"the index of a {purpose} is {index}; indices start at 0")
        return Random(f"tidegate countdown {self.seed} {purpose} {index}")


def _draw_first(random: Random) -> int:
    """The number to count from, from a lognormal length of the answer: one word per number, and one for liftoff."""
    length = round(random.lognormvariate(math.log(MEDIAN_LENGTH), LENGTH_SIGMA))
    return min(max(length, MIN_LENGTH), MAX_LENGTH) - 1


def _prompt_from(first: int) -> Prompt:
    return Prompt(f"count from {first} :")


def _countdown(first: int, ending: str) -> str:
    return " ".join([*(str(number) for number in range(first, 1, -1)), ending])


def _parse(prompt: Prompt) -> int:
    words = prompt.text.split(" ")
    if len(words) == 4 and words[2].isdecimal():
        first = int(words[2])
        if 1 <= first < NUM_NUMBERS and _prompt_from(first) == prompt:
            return first
    raise ValueError(f"prompt {prompt.text!r} is not 'count from NUMBER :' with a number of 1 to {NUM_NUMBERS - 1}")
