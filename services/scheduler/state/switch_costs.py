"""What changing the trainer's number of GPUs takes, in closed form: a policy's picture of the reshard's own plan. Pure.

Copies d0 become d1; those that stay keep their place in the order, and copies fill one host after another. A rank holds
w, its share of a copy of the weights, and of o, its share of the optimizer's state, the d0-th part that its place says.
The busiest rank counts, by what it sends or by what it receives:
- a copy that joins receives w + o/d1; one that stays receives its new part of o, less what it has of it already;
- a copy that was there sends what it held of o, and w in turns with others to those that join: where the last host had
  room the copies there serve those that join them, alone, and all serve the rest.
The last copy that stays keeps least: max(0, low/high - (low - 1)/low) of o, low and high being the lesser and the
greater of d0 and d1.
Left out: padding, uneven stages, and GPUs that are not side by side. Tests hold it within 5 % of what the plan of
`tidegate.elastic.plan.planner` moves, for models of 7B and 32B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from services.scheduler.state.observed import Floats


@dataclass(frozen=True, slots=True)
class ReshardCosts:
    """`communicators_s`: to build the groups of a layout in which the trainer was not yet, on these GPUs;
    `bytes_per_s`: that a rank sends or receives; the bytes are those of the whole model and of its optimizer's
    state."""

    setup_s: float
    communicators_s: float
    bytes_per_s: float
    weight_bytes: int
    optimizer_bytes: int
    gpus_per_host: int

    def busiest_bytes(self, before: Floats, after: Floats, *, copy_size: int) -> Floats:
        """Of numbers of copies, at least one each, with `copy_size` GPUs a copy."""
        weights, state = self.weight_bytes / copy_size, self.optimizer_bytes / copy_size
        low, high, grows = np.minimum(before, after), np.maximum(before, after), after > before
        kept = np.maximum(0.0, low / high - (low - 1) / low)
        received = np.where(grows, weights + state / after, state * (1 / after - kept))
        served = self._served(before, after, copy_size=copy_size)
        sent = weights * served + state * (1 / before - np.where(grows, kept, 0.0))
        busiest: Floats = np.where(before == after, 0.0, np.maximum(received, sent))
        return busiest

    def _served(self, before: Floats, after: Floats, *, copy_size: int) -> Floats:
        """How many copies that join get their weights from the busiest one."""
        on_host = max(1, self.gpus_per_host // copy_size)
        joining, on_last = np.maximum(0.0, after - before), before % on_host
        near = np.where(on_last > 0, np.minimum(joining, on_host - on_last), 0.0)
        served: Floats = near / np.maximum(on_last, 1.0) + (joining - near) / before
        return served


@dataclass(frozen=True, slots=True)
class TrainerSwitchCosts:
    """`load_s`: of a trainer that had no GPUs; `reshard_s`: of every other change, where `reshard` is None."""

    load_s: float
    reshard_s: float
    reshard: ReshardCosts | None = None


@lru_cache(maxsize=16)
def switch_seconds(costs: TrainerSwitchCosts, *, copy_size: int, most: int, known: tuple[int, ...] = ()) -> Floats:
    """[copies before, copies after] -> seconds, up to `most` copies; of no change 0. `known` are numbers of copies
    whose groups are there. Not to be written to: whoever asks the same gets the same array."""
    seconds = np.full((most + 1, most + 1), costs.reshard_s)
    if (own := costs.reshard) is not None:
        is_new = ~np.isin(np.arange(most + 1), known)
        seconds = own.setup_s + own.communicators_s * is_new + _moving_s(own, copy_size=copy_size, most=most)
    seconds[0] = costs.load_s
    np.fill_diagonal(seconds, 0.0)
    seconds.setflags(write=False)
    return seconds


@lru_cache(maxsize=16)
def _moving_s(costs: ReshardCosts, *, copy_size: int, most: int) -> Floats:
    """Of `switch_seconds`, what the bytes take: the same whatever groups are there, and nearly all of the work."""
    copies = np.maximum(np.arange(most + 1, dtype=np.float64), 1.0)
    return costs.busiest_bytes(copies[:, None], copies[None, :], copy_size=copy_size) / costs.bytes_per_s
