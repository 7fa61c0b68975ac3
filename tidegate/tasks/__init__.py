"""What a job trains on: prompts, noisy demonstrations for the warm-up, and a program that checks answers.

Invariants: everything a task gives is a pure function of (seed, index), the same in every process and on every
machine; a reward is a function of the prompt's and the response's texts alone, so that any service can compute it
from what is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from tidegate.tasks.countdown import CountdownTask
from tidegate.tasks.text import Demonstration, Prompt

__all__ = ["Demonstration", "Prompt", "Task", "find_task"]


class Task(Protocol):
    """A task whose answers a program checks. Texts are words separated by single spaces."""

    def words(self) -> tuple[str, ...]:
        """Every word of prompts, demonstrations and right answers, in a fixed order: the tokenizer is built from it."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index` (>= 0) of the job's endless list."""
        ...

    def held_out(self, index: int) -> Prompt:
        """The prompt at `index` (>= 0) of the list that nothing is trained on; drawn independently of `prompt`."""
        ...

    def demonstration(self, index: int) -> Demonstration:
        """The worked example at `index` (>= 0) for the supervised warm-up; independent of `prompt`, and often wrong."""
        ...

    def reward(self, prompt: Prompt, response_text: str) -> float:
        """In [0, 1]. `response_text` is without end token; ValueError when `prompt` is not one of this task's."""
        ...


_TASKS: Mapping[str, Callable[[int], Task]] = MappingProxyType({"countdown": CountdownTask})


def find_task(name: str, seed: int) -> Task:
    """The task called `name`; ValueError naming the known ones when there is none."""
    if name not in _TASKS:
        raise ValueError(f"no task is called {name!r}; known tasks: {', '.join(sorted(_TASKS))}")
    return _TASKS[name](seed)
