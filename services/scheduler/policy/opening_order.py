"""In which order prompts go to engines when an iteration opens, by their hints. Pure.

- `longest_first`: the longest prompts set the end of the rollout, because a response gains at most one token a step.
- `short_between_long`: the longest prompts and some of the shortest come first, mixed. The shortest complete groups
  early, and a few GPUs can train on them while most still generate. With a trainer that waits for the whole rollout
  nothing is gained over the longest first.

- `by_minibatch`: for minibatches of fixed groups, those of the first minibatch first, and of each the longest first. A
  minibatch ends with its last group, so that short ones of other minibatches before it are in its way.

Hints whose error is larger than the spread between prompts give no order: long prompts would look short and come last.
With a spread of 0.5 and an error of 0.6 such an order ended the published iteration 4 to 12 % later than none. The
spread is the told one or that of the hints beside their error, whichever is larger.

Invariants:
- An order has every group once. [test_opening_order: has_every_group_once]
- Without hints, or with such hints, there is no order. [test_opening_order: without_useful_hints]
- While the hints and the law of lengths stay, so does the order. It may be given with each choice.
  [test_opening_order: stays_while_the_iteration_runs]
"""

from __future__ import annotations

import math

import numpy as np

from services.scheduler.policy.lengths_law import prior, variance_of_hints
from services.scheduler.policy.situation import Situation, minibatch_of
from services.scheduler.state.observed import Floats, Ints
from tidegate.types import PromptOrder

SHORT_SHARE = 0.25
"""The share of the prompts that are the short ones, where a policy has no rule of its own. It is the default of
`scheduler.tide.short_share`."""


def opening_order(situation: Situation, order: PromptOrder) -> tuple[int, ...]:
    """The prompts in this order. Empty where they stay as they are, and once every sequence has ended."""
    if order is PromptOrder.AS_GIVEN or not situation.num_unfinished:
        return ()
    if order is PromptOrder.LONGEST_FIRST:
        return longest_first(situation)
    return short_between_long(situation, SHORT_SHARE)


def longest_first(situation: Situation) -> tuple[int, ...]:
    """Empty where hints do not tell prompts apart."""
    return tuple(_by_length(situation).tolist())


def short_between_long(situation: Situation, short_share: float, *, shorts_a_long: int = 1) -> tuple[int, ...]:
    """`short_share` of the prompts are the short ones. `shorts_a_long` of these come beside each of the others. Empty
    where hints do not tell prompts apart."""
    return mixed(_by_length(situation), short_share, shorts_a_long=shorts_a_long)


def mixed(longest: Ints, short_share: float, *, shorts_a_long: int = 1) -> tuple[int, ...]:
    """`longest`: prompts, the longest first. `short_share` of them, the last ones, come beside the others."""
    num = round(short_share * longest.size)
    short, rest = longest[::-1][:num], longest[: longest.size - num]
    place = np.concatenate((places_of_shorts(num, shorts_a_long), np.arange(rest.size)))
    order = np.concatenate((short, rest))[np.argsort(place, kind="stable")]
    return tuple(order.tolist())


def places_of_shorts(num: int, shorts_a_long: float) -> Floats:
    """The places of `num` short prompts on a line, where the others stand at 0, 1, 2, ...

    They come before or after a long one by the sequence of Thue and Morse, which has no period. With one, as always
    before it, groups whose responses are a share of the engines put all long ones on the same engines.
    """
    beside = np.floor(np.arange(num) / shorts_a_long)
    is_after = np.array([int(each).bit_count() % 2 for each in beside], dtype=np.bool_)
    return beside + np.where(is_after, 0.5, -0.5)


def by_minibatch(situation: Situation) -> tuple[int, ...]:
    """Empty where hints do not tell prompts apart: prompts are given in the order of their minibatches."""
    longest = _by_length(situation)
    minibatch = minibatch_of(situation.generation.num_groups, situation.spec.num_minibatches)
    return tuple(longest[np.argsort(minibatch[longest], kind="stable")].tolist())


def hints_tell_apart(situation: Situation) -> bool:
    """Whether hints tell which of two prompts is longer."""
    law = situation.lengths
    return bool(situation.generation.hints) and law.sigma_hint <= max(law.sigma_prompt, _spread_seen(situation))


def _by_length(situation: Situation) -> Ints:
    """The prompts, the longest first. Empty where hints do not tell prompts apart: the order stays as it is."""
    if not hints_tell_apart(situation):
        return np.zeros(0, dtype=np.int64)
    level, _ = prior(situation.generation, situation.lengths)
    return np.argsort(-level, kind="stable")


def _spread_seen(situation: Situation) -> float:
    """The spread between prompts that hints show beside their error, in logarithms of tokens."""
    variance, _ = variance_of_hints(situation.generation)
    return math.sqrt(max(0.0, variance - situation.lengths.sigma_hint**2))
