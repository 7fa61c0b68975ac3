"""The duration of a change of the trainer's number of GPUs, in closed form. Pure.

A policy uses it as an estimate of the bytes that the real plan (`tidegate.elastic.plan.planner`) moves. Tests keep it
within 5 % of that plan for models of 7B and 32B. The busiest rank determines the duration:

    bytes    = max(received, sent)                      0 if d0 = d1
    received = w + o/d1                                 if d1 > d0: a copy that joins
             = o * (1/d1 - kept)                        if d1 < d0: the last copy that stays
    sent     = w * served + o * (1/d0 - kept)           if d1 > d0
             = o/d0                                     if d1 < d0
    kept     = max(0, low/high - (low - 1)/low)

- d0, d1: the numbers of copies before and after. `low` and `high` are the lesser and the greater of the two.
- w: a rank's share of one copy of the weights.
- o: a rank's share of the optimizer's state. With d copies, each copy holds the part of it at the copy's place: o/d.
- kept: the fraction of o that the last copy that stays has before and after. It keeps the least.
- served: how many joining copies get their weights from the busiest copy.

Copies that stay keep their place in the order, and copies fill one host after another. If the last host has room, only
its copies serve the copies that join there. All copies serve the remaining ones.
The formula ignores padding, uneven stages, and GPUs that are not side by side.

A change of the copies' shape (tp, pp, cp, ep or vpp) moves as many bytes as if no rank kept anything: the busiest one,
which joins or has another shard than before, keeps little. Tests keep this within 0.1 % of the plan for copies of one
stage, and within 20 % for several, whose stages are uneven.

    received = w1 + o1/d1
    sent     = (W * d1 + O) / (d0 * c0)
- W, O: the bytes of the weights and of the optimizer's state. c0, c1: GPUs of a copy before and after.
- w1 = W/c1, o1 = O/c1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from services.scheduler.state.observed import Floats


@dataclass(frozen=True, slots=True)
class ReshardCosts:
    """The costs of one reshard.

    - `communicators_s`: the time to build the process groups of a layout that the trainer has not had on these GPUs.
    - `bytes_per_s`: how fast a rank sends or receives.
    - `weight_bytes`, `optimizer_bytes`: the size of the whole model and of its optimizer's state.
    """

    setup_s: float
    communicators_s: float
    bytes_per_s: float
    weight_bytes: int
    optimizer_bytes: int
    gpus_per_host: int

    def busiest_bytes(self, before: Floats, after: Floats, *, copy_size: int) -> Floats:
        """The bytes of the busiest rank. `before` and `after` count copies of `copy_size` GPUs and are at least 1."""
        weights, state = self.weight_bytes / copy_size, self.optimizer_bytes / copy_size
        low, high, grows = np.minimum(before, after), np.maximum(before, after), after > before
        kept = np.maximum(0.0, low / high - (low - 1) / low)
        received = np.where(grows, weights + state / after, state * (1 / after - kept))
        served = self._served(before, after, copy_size=copy_size)
        sent = weights * served + state * (1 / before - np.where(grows, kept, 0.0))
        busiest: Floats = np.where(before == after, 0.0, np.maximum(received, sent))
        return busiest

    def reshaped_bytes(self, before: Floats, after: Floats, *, copy_size: int, new_size: int) -> Floats:
        """The bytes of the busiest rank, from `before` copies of `copy_size` GPUs to `after` of
        `new_size`."""
        received = (self.weight_bytes + self.optimizer_bytes / after) / new_size
        sent = (self.weight_bytes * after + self.optimizer_bytes) / (before * copy_size)
        busiest: Floats = np.maximum(received, sent)
        return busiest

    def _served(self, before: Floats, after: Floats, *, copy_size: int) -> Floats:
        """How many joining copies get their weights from the busiest copy."""
        on_host = max(1, self.gpus_per_host // copy_size)
        joining, on_last = np.maximum(0.0, after - before), before % on_host
        near = np.where(on_last > 0, np.minimum(joining, on_host - on_last), 0.0)
        served: Floats = near / np.maximum(on_last, 1.0) + (joining - near) / before
        return served


@dataclass(frozen=True, slots=True)
class TrainerSwitchCosts:
    """`load_s`: the duration of a start from no GPUs. `reshard_s`: that of all other changes if `reshard` is None."""

    load_s: float
    reshard_s: float
    reshard: ReshardCosts | None = None


@lru_cache(maxsize=16)
def switch_seconds(costs: TrainerSwitchCosts, *, copy_size: int, most: int) -> Floats:
    """The matrix [copies before, copies after] of seconds, up to `most` copies. Its diagonal is 0.

    The array is read-only: equal calls share it.
    """
    seconds = np.full((most + 1, most + 1), costs.reshard_s)
    if (own := costs.reshard) is not None:
        copies = np.maximum(np.arange(most + 1, dtype=np.float64), 1.0)
        moved = own.busiest_bytes(copies[:, None], copies[None, :], copy_size=copy_size)
        seconds = own.setup_s + own.communicators_s + moved / own.bytes_per_s
    seconds[0] = costs.load_s
    np.fill_diagonal(seconds, 0.0)
    seconds.setflags(write=False)
    return seconds


@lru_cache(maxsize=16)
def reshape_seconds(costs: TrainerSwitchCosts, *, copy_size: int, new_size: int, most: int) -> Floats:
    """The matrix [copies of `copy_size` GPUs before, copies of `new_size` after] of seconds, up to `most` copies.

    The array is read-only, as that of `switch_seconds`."""
    seconds = np.full((most + 1, most + 1), costs.reshard_s)
    if (own := costs.reshard) is not None:
        copies = np.maximum(np.arange(most + 1, dtype=np.float64), 1.0)
        moved = own.reshaped_bytes(copies[:, None], copies[None, :], copy_size=copy_size, new_size=new_size)
        seconds = own.setup_s + own.communicators_s + moved / own.bytes_per_s
    seconds[0] = costs.load_s
    seconds.setflags(write=False)
    return seconds
