"""Orders in which the sequences of an iteration may begin when their lengths are known: two families of few parameters.

- By levels: prompts by a key under lognormal noise, the longest first, some of the shortest so many before each; the
  members of a prompt together, the longest first. What `tide` chooses from hints is one of these.
- By slack: groups are due one after the other, the shortest first, every so many decode steps; a sequence's place is
  when it is due less the steps that it takes. With no steps between two groups it is longest processing time first
  (Graham 1969), with many the shortest groups come first as wholes.

Invariants: every sequence is in an order once; the same parameters give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.workload import Workload

SHARES = (-0.1, -0.05, 0.05, 0.1)
RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0)
NOISES = (0.0, 0.05, 0.1, 0.2, 0.3)
PACES = (-16.0, -8.0, -4.0, 4.0, 8.0, 16.0)
"""Steps; 512 groups of a 7,000-token law that end evenly in 500 s are 70 apart."""
MOST_PACE = 100.0


@dataclass(frozen=True, slots=True)
class Order:
    """By levels count `key` of `Keys`, `share` of the prompts that are short, and `shorts_a_long`; by slack, which it
    is where `pace` is not None, that."""

    key: int = 0
    share: float = 0.25
    shorts_a_long: float = 1.0
    pace: float | None = None
    noise: float = 0.0
    noise_seed: int = 0


@dataclass(frozen=True)
class Keys:
    """By prompt: its hint, its longest and its mean response; by prompt and member: the length."""

    by_prompt: tuple[NDArray[np.float64], ...]
    lengths: NDArray[np.float64]

    @staticmethod
    def of(workload: Workload) -> Keys:
        lengths = np.array([[float(sum(turns)) for turns in row] for row in workload.lengths.turns])
        hints = np.array(workload.lengths.hints)
        return Keys((hints, lengths.max(axis=1), lengths.mean(axis=1)), lengths)


def sequences_in(order: Order, keys: Keys) -> tuple[int, ...]:
    """Their numbers."""
    noise = np.random.default_rng(order.noise_seed).standard_normal(len(keys.lengths))
    spread = np.exp(order.noise * noise)
    if order.pace is None:
        place = _levels(keys.by_prompt[order.key] * spread, order.share, order.shorts_a_long)
        by_sequence = np.repeat(place, keys.lengths.shape[1]).astype(np.float64)
    else:
        due = np.argsort(np.argsort(keys.by_prompt[1] * spread, kind="stable"), kind="stable") * order.pace
        by_sequence = (due[:, None] - keys.lengths).ravel()
    return tuple(np.lexsort((-keys.lengths.ravel(), by_sequence)).tolist())


def changed(order: Order, scale: float, rng: np.random.Generator) -> Order:
    """One parameter; `scale` is of the paces."""
    match int(rng.integers(4)):
        case 0 if order.pace is None:
            return replace(order, share=min(1.0, max(0.0, order.share + float(rng.choice(SHARES)))))
        case 0 | 1 if order.pace is not None:
            pace = order.pace + scale * float(rng.choice(PACES))
            return replace(order, pace=min(scale * MOST_PACE, max(0.0, pace)))
        case 2:
            return anew(scale, rng)
        case 1 if rng.integers(2):
            return replace(order, shorts_a_long=float(rng.choice(RATIOS)))
        case 1:
            return replace(order, key=int(rng.integers(3)))
        case _:
            return replace(order, noise=float(rng.choice(NOISES)), noise_seed=int(rng.integers(1000)))


def anew(scale: float, rng: np.random.Generator) -> Order:
    """Of either family."""
    if rng.integers(2):
        return Order(pace=scale * float(rng.uniform(0.0, MOST_PACE)))
    ratio = float(rng.choice(RATIOS))
    return Order(key=int(rng.integers(3)), share=float(rng.uniform(0.0, 1.0)), shorts_a_long=ratio)


def _levels(key: NDArray[np.float64], share: float, shorts_a_long: float) -> NDArray[np.int64]:
    """By prompt, its place."""
    longest = np.argsort(-key, kind="stable")
    num = round(share * longest.size)
    short, rest = longest[::-1][:num], longest[: longest.size - num]
    place = np.concatenate((np.arange(num) / shorts_a_long - 0.5, np.arange(rest.size)))
    order = np.concatenate((short, rest))[np.argsort(place, kind="stable")]
    return np.argsort(order, kind="stable")
