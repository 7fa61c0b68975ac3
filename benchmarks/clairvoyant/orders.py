"""Orders in which the sequences of an iteration may begin if their lengths are known: two families of few parameters.

- By levels: prompts are sorted by a key with lognormal noise, the longest first. Beside each of them come
  `shorts_a_long` of the shortest prompts. The members of a prompt are together, the longest first or as they are. The
  orders that policies make from hints are of these.
- By slack: groups are due one after the other, the shortest first, every `pace` decode steps:

      place = due - length

      due     the step at which the sequence's group is due
      length  the steps of the sequence

  With `pace` 0 it is longest processing time first (Graham 1969). With a large `pace` the shortest groups come first as
  wholes.

Where minibatches have fixed groups, groups are due by their numbers, and an order by levels may be minibatch by
minibatch.

Every order has each sequence once, and the same parameters give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from services.scheduler.policy.opening_order import places_of_shorts
from simulator.workload import Workload
from tidegate.types import MinibatchOrder

SHARES = (-0.1, -0.05, 0.05, 0.1)
RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0)
NOISES = (0.0, 0.05, 0.1, 0.2, 0.3)
PACES = (-16.0, -8.0, -4.0, 4.0, 8.0, 16.0)
"""Changes of the pace, in steps. 512 groups with a median of 7,000 tokens that end evenly over 500 s are 70 apart."""
MOST_PACE = 100.0


@dataclass(frozen=True, slots=True)
class Order:
    """The parameters of an order. With `pace` it is by slack. With `pace` None it is by levels, from the `key` of
    `Keys`, the `share` of short prompts and `shorts_a_long`. `by_minibatch`: the fixed minibatches one after the other,
    of each by levels. `sorts_members`: the longest member of a prompt comes first."""

    key: int = 0
    share: float = 0.25
    shorts_a_long: float = 1.0
    pace: float | None = None
    noise: float = 0.0
    noise_seed: int = 0
    by_minibatch: bool = False
    sorts_members: bool = True


@dataclass(frozen=True)
class Keys:
    """`by_prompt` has the hint, the longest and the mean response of each prompt, `lengths` the length of each
    member, `minibatch` the fixed minibatch of each prompt. None: a minibatch takes what arrives."""

    by_prompt: tuple[NDArray[np.float64], ...]
    lengths: NDArray[np.float64]
    minibatch: NDArray[np.int64] | None = None

    @staticmethod
    def of(workload: Workload, *, by_hints: bool = False) -> Keys:
        """`by_hints`: orders see the prompt's hint in place of every length."""
        lengths = np.array([[float(sum(turns)) for turns in row] for row in workload.lengths.turns])
        hints, sizes = np.array(workload.lengths.hints), workload.minibatch_sizes
        if by_hints:
            lengths = np.broadcast_to(hints[:, None], lengths.shape)
        is_fixed = workload.minibatch_order is MinibatchOrder.FIXED
        minibatch = np.repeat(np.arange(len(sizes)), sizes) if is_fixed else None
        return Keys((hints, lengths.max(axis=1), lengths.mean(axis=1)), lengths, minibatch)

    @property
    def is_fixed(self) -> bool:
        return self.minibatch is not None


def sequences_in(order: Order, keys: Keys) -> tuple[int, ...]:
    """The numbers of the sequences in this order."""
    noise = np.random.default_rng(order.noise_seed).standard_normal(len(keys.lengths))
    spread = np.exp(order.noise * noise)
    if order.pace is None:
        place = _levels(keys.by_prompt[order.key] * spread, order.share, order.shorts_a_long)
        if order.by_minibatch and keys.minibatch is not None:
            place = place + place.size * keys.minibatch
        by_sequence = np.repeat(place, keys.lengths.shape[1]).astype(np.float64)
    else:
        turn = np.arange(1.0, len(spread) + 1) if keys.is_fixed else keys.by_prompt[1]
        due = np.argsort(np.argsort(turn * spread, kind="stable"), kind="stable") * order.pace
        by_sequence = (due[:, None] - keys.lengths).ravel()
    within = -keys.lengths.ravel() if order.sorts_members else np.arange(keys.lengths.size)
    return tuple(np.lexsort((within, by_sequence)).tolist())


def changed_order(order: Order, scale: float, rng: np.random.Generator, *, is_fixed: bool = False) -> Order:
    """The order with one parameter changed. `scale` is the factor of all paces. `is_fixed`: minibatches have fixed
    groups."""
    match int(rng.integers(4)):
        case 0 if order.pace is None:
            return replace(order, share=min(1.0, max(0.0, order.share + float(rng.choice(SHARES)))))
        case 0 | 1 if order.pace is not None:
            pace = order.pace + scale * float(rng.choice(PACES))
            return replace(order, pace=min(scale * MOST_PACE, max(0.0, pace)))
        case 2:
            return random_order(scale, rng, is_fixed=is_fixed)
        case 1 if is_fixed and rng.integers(2):
            return replace(order, by_minibatch=not order.by_minibatch)
        case 1 if rng.integers(2):
            return replace(order, shorts_a_long=float(rng.choice(RATIOS)))
        case 1:
            return replace(order, key=int(rng.integers(3)))
        case _:
            return replace(order, noise=float(rng.choice(NOISES)), noise_seed=int(rng.integers(1000)))


def random_order(scale: float, rng: np.random.Generator, *, is_fixed: bool = False) -> Order:
    """A random order of either family."""
    if rng.integers(2):
        return Order(pace=scale * float(rng.uniform(0.0, MOST_PACE)))
    ratio = float(rng.choice(RATIOS))
    order = Order(key=int(rng.integers(3)), share=float(rng.uniform(0.0, 1.0)), shorts_a_long=ratio)
    return replace(order, by_minibatch=is_fixed and bool(rng.integers(2)))


def _levels(key: NDArray[np.float64], share: float, shorts_a_long: float) -> NDArray[np.int64]:
    """The place of each prompt."""
    longest = np.argsort(-key, kind="stable")
    num = round(share * longest.size)
    short, rest = longest[::-1][:num], longest[: longest.size - num]
    place = np.concatenate((places_of_shorts(num, shorts_a_long), np.arange(rest.size)))
    order = np.concatenate((short, rest))[np.argsort(place, kind="stable")]
    return np.argsort(order, kind="stable")
