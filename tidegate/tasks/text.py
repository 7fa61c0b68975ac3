"""The texts of a task: prompts and demonstrations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and a response to imitate. The text has no end token."""

    prompt: Prompt
    response: str
