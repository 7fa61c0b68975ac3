"""Built-in tasks: prompts, noisy demonstrations for the warm-up, and a program that computes rewards.

Invariants:
- Prompts and demonstrations depend only on (seed, index), in every process and on every machine.
  [test_countdown: another_process_gives_the_same]
- A reward depends only on the texts of prompt and response, so any service can compute it from a message.
  [test_countdown: right_answer_earns_one]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from tidegate.tasks.countdown import CountdownTask
from tidegate.tasks.text import Demonstration, Prompt

__all__ = ["Demonstration", "Prompt", "Task", "find_task"]


class Task(Protocol):
    """A task with a program that checks answers. Texts are words separated by single spaces."""

    def words(self) -> tuple[str, ...]:
        """Every word of prompts, demonstrations and right answers, in a fixed order. They make the tokenizer."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index` (>= 0) of the job's endless list."""
        ...

    def held_out(self, index: int) -> Prompt:
        """The prompt at `index` (>= 0) of the list that is not trained on. It is drawn independently of `prompt`."""
        ...

    def demonstration(self, index: int) -> Demonstration:
        """The worked example at `index` (>= 0) for the supervised warm-up.

        It is independent of `prompt`, and often wrong."""
        ...

    def reward(self, prompt: Prompt, response_text: str) -> float:
        """The reward, in [0, 1]. `response_text` has no end token. Raises ValueError for a prompt of another task."""
        ...


_TASKS: Mapping[str, Callable[[int], Task]] = MappingProxyType({"countdown": CountdownTask})


def find_task(name: str, seed: int) -> Task:
    """The task called `name`. Raises ValueError, which names the known tasks."""
    if name not in _TASKS:
        raise ValueError(f"no task is called {name!r}; known tasks: {', '.join(sorted(_TASKS))}")
    return _TASKS[name](seed)
