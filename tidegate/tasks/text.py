"""The texts that pass between a task and a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and a response to imitate; the end token is not part of the text."""

    prompt: Prompt
    response: str
