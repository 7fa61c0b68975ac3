"""Tasks whose rewards a test sets or holds up."""

from __future__ import annotations

import asyncio
import threading

from tests.component_bench import PATIENCE_S, Changes
from tidegate.tasks import Demonstration, Prompt, Task


class LongIsRight:
    """The task, except that every answer of several words is right."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def words(self) -> tuple[str, ...]:
        return self._task.words()

    def prompt(self, index: int) -> Prompt:
        return self._task.prompt(index)

    def held_out(self, index: int) -> Prompt:
        return self._task.held_out(index)

    def demonstration(self, index: int) -> Demonstration:
        return self._task.demonstration(index)

    def reward(self, prompt: Prompt, response_text: str) -> float:
        return float(" " in response_text)


class HeldRewards(LongIsRight):
    """The task, except that rewards wait for `let_go`."""

    def __init__(self, task: Task, changes: Changes) -> None:
        super().__init__(task)
        self.let_go = threading.Event()
        self.is_asked = False
        self._changes = changes
        self._loop = asyncio.get_running_loop()

    def reward(self, prompt: Prompt, response_text: str) -> float:
        self.is_asked = True
        self._loop.call_soon_threadsafe(self._changes.notify)
        assert self.let_go.wait(timeout=PATIENCE_S), "the event loop waits for the reward"
        return self._task.reward(prompt, response_text)
