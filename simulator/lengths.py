"""The lengths of an iteration's responses, and the length hints from earlier iterations.

    length = level * exp(sigma_group * z_member)
    level  = median_tokens * exp(sigma_prompt * z_prompt)
    hint   = level * exp(hint_sigma * z_hint)

    length    tokens of a response, cut off at `min_tokens` and `max_tokens`
    level     the level of a prompt; with `long_tailed` a Pareto factor multiplies it for some prompts
    hint      the length that an earlier iteration would have shown for a prompt
    z_*       independent standard normal numbers

With `trace` the lengths come from a file. A response of several turns is one length, cut into turns.

Invariants:
- A seed gives the same lengths: all numbers come from one numpy Generator in one order.
  [test_lengths: a_seed_gives_the_same_lengths]
- Every length is between 1 and `max_tokens`. [test_lengths: lengths_stay_within_their_limits]
- Every turn has at least one token. [test_lengths: the_turns_add_up_to_the_response]
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from simulator.assumptions import Source
from tidegate.config.base import ConfigPath, Count, NonNegativeFloat, Positive, PositiveFloat, Section

Floats = NDArray[np.float64]
Turns = tuple[int, ...]
"""The generated tokens of each turn."""

MAX_DIGITS = 18
"""The most digits of a number in a trace. No response is that long, and `int` itself refuses a number of thousands of
digits without naming file and line."""


class LengthLaw(StrEnum):
    LOGNORMAL = "lognormal"
    LONG_TAILED = "long_tailed"
    TRACE = "trace"


class LengthSection(Section):
    """The lengths of a scenario. The defaults are assumed for the published 64-GPU timeline: about 68 M tokens."""

    law: LengthLaw = LengthLaw.LOGNORMAL
    median_tokens: Annotated[
        PositiveFloat, Source("F: 64 to 69 M tokens an iteration; the published throughput gives 72 to 75 M")
    ] = 7050.0
    sigma_prompt: Annotated[NonNegativeFloat, Source("A: in the logarithm, between prompts")] = 0.50
    sigma_group: Annotated[NonNegativeFloat, Source("A: in the logarithm, within a group")] = 0.25
    tail_share: Annotated[
        float, Field(ge=0, le=1), Source("A: for long_tailed, the prompts that a Pareto factor makes longer")
    ] = 0.05
    tail_index: Annotated[
        PositiveFloat, Source("A: the index of that factor; a smaller one gives longer responses")
    ] = 1.5
    min_tokens: Annotated[Positive, Source("A: no response is shorter")] = 64
    max_tokens: Annotated[
        Positive, Source("P: seq_length 28,672 less max_prompt_length 1,024 of the published 7B configuration")
    ] = 27_648
    file: ConfigPath = ""
    """The file of a `trace`: one line a prompt, one word a response, `+` between its turns: `812+90 1033 77`."""
    mean_turns: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Each response has 1 + Poisson(mean_turns - 1) turns. A trace has turns of its own."""
    observation_tokens: Count = 0
    """The tokens that the environment adds after each turn but the last."""
    environment_s: NonNegativeFloat = 0.0
    """The time of the environment between two turns."""
    hint_sigma: Annotated[
        NonNegativeFloat, Source("A: in the logarithm, the error of a length hint from an earlier epoch")
    ] = 0.30


@dataclass(frozen=True, slots=True)
class Lengths:
    """By group: the turns of each member, and the hint for the tokens of one member. A hint of 0: none."""

    turns: tuple[tuple[Turns, ...], ...]
    hints: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(sum(turns) for group in self.turns for turns in group)


class BadTrace(ValueError):
    """A line of a lengths file is malformed. The message names file and line."""


def draw_lengths(section: LengthSection, *, num_prompts: int, group_size: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of an iteration, for every law but `trace`."""
    z_prompt = rng.standard_normal(num_prompts)
    z_member = rng.standard_normal((num_prompts, group_size))
    level = section.median_tokens * np.exp(section.sigma_prompt * z_prompt)
    z_hint = rng.standard_normal(num_prompts)
    if section.law is LengthLaw.LONG_TAILED:
        is_tail = rng.random(num_prompts) < section.tail_share
        level = np.where(is_tail, level * (1 + rng.pareto(section.tail_index, num_prompts)), level)
    return lengths_at(level, section, z_member=z_member, z_hint=z_hint, rng=rng)


def lengths_at(
    level: Floats,
    section: LengthSection,
    *,
    z_member: Floats,
    z_hint: Floats,
    rng: np.random.Generator,
    known: Floats | None = None,
) -> Lengths:
    """The lengths of prompts with these levels. `known`: the levels that earlier iterations have shown, which hints are
    about; 0 for a prompt that none has had. None: the present levels. `rng` draws the numbers of turns."""
    drawn = level[:, None] * np.exp(section.sigma_group * z_member)
    tokens = np.clip(drawn, section.min_tokens, section.max_tokens).astype(np.int64)
    num_turns = 1 + rng.poisson(section.mean_turns - 1, tokens.shape)
    turns = tuple(
        tuple(_cut(int(total), int(parts)) for total, parts in zip(*rows, strict=True))
        for rows in zip(tokens, num_turns, strict=True)
    )
    return Lengths(turns, _hints(level if known is None else known, section.hint_sigma, z_hint))


def lengths_of_trace(turns: tuple[tuple[Turns, ...], ...], section: LengthSection, rng: np.random.Generator) -> Lengths:
    """The lengths of a trace. A hint is the mean length of its prompt's responses with noise."""
    level = np.array([np.mean([sum(response) for response in group]) for group in turns])
    return Lengths(turns, _hints(level, section.hint_sigma, rng.standard_normal(len(turns))))


def parse_trace(text: str, *, name: str, group_size: int, max_tokens: int) -> tuple[tuple[Turns, ...], ...]:
    """The turns in a file called `name`, without empty lines and comments after `#`. BadTrace: the first bad line."""
    return tuple(_groups(text, name, group_size, max_tokens))


def _groups(text: str, name: str, group_size: int, max_tokens: int) -> Iterator[tuple[Turns, ...]]:
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        where = f"{name}:{number}"
        if len(words) != group_size:
            raise BadTrace(f"{where}: {len(words)} responses, a group has group_size={group_size}: write one word each")
        yield tuple(_response(word, where, max_tokens) for word in words)


def _response(word: str, where: str, max_tokens: int) -> Turns:
    parts, shown = word.split("+"), reprlib.repr(word)
    if not all(_is_count(part) for part in parts):
        raise BadTrace(f"{where}: {shown} is no response: write its tokens, at least 1, with + between turns: 812+90")
    if any(len(part) > MAX_DIGITS for part in parts):
        raise BadTrace(f"{where}: {shown} has a number of over {MAX_DIGITS} digits; lengths.max_tokens is {max_tokens}")
    turns = tuple(map(int, parts))
    if sum(turns) > max_tokens:
        raise BadTrace(f"{where}: {shown} has {sum(turns)} tokens, lengths.max_tokens is {max_tokens}: raise that one")
    return turns


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and word.strip("0") != ""


def _cut(total: int, parts: int) -> Turns:
    parts = min(parts, total)
    each, more = divmod(total, parts)
    return tuple(each + (part < more) for part in range(parts))


def _hints(level: Floats, sigma: float, z: Floats) -> tuple[float, ...]:
    return tuple(float(hint) for hint in level * np.exp(sigma * z))
