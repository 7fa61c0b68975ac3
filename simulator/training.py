"""The trainer: groups with log-probabilities become minibatches. Its GPUs change between two optimizer steps, and where
gradients are carried between two groups.

Order at a boundary between two optimizer steps:
1. The trainer reports the boundary. Moves that are requested at this instant count already.
2. A waiting resize begins if its GPUs are free. While it waits for GPUs, the next minibatch waits too, since it shall
   run on them.
3. The next minibatch starts, unless training is held.

With carried gradients a waiting resize whose GPUs are free begins between two portions, too. While it waits for GPUs,
the minibatch goes on. A resize to no GPUs waits for its end: without ranks nobody has the gradients.

With `arrival` a minibatch takes groups in the order of their arrival. With `fixed` it takes them by their numbers, and
none before all that come before it. It trains them in portions (`simulator.portions`), and the data-parallel replica
with the most tokens of a portion sets its time.

Invariants:
- Each group is trained once, also after a death, which repeats only the uncommitted minibatch.
  [test_simulator: every_sequence_ends_once]
- Without carried gradients a minibatch is trained on one layout. [test_world: resized_between_two_optimizer_steps]
- With them it goes on in the new layout, and no group is trained again. [test_world: resized_between_two_groups]
- With `fixed` a group waits for those before it. [test_portions: in_fixed_order_a_group_waits]
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.actor.portions import Portion
from simulator.clock import Due
from simulator.cost_model import CostLaws
from simulator.gpus import Doing, Holder
from simulator.happenings import Shared, What
from simulator.model import ModelSection
from simulator.noise import EXACT, Noise
from simulator.portions import Portions
from simulator.reshard_costs import change_of, moved_bytes
from simulator.workload import Workload
from tidegate.types import GpuId, Layout, MinibatchOrder


@dataclass(frozen=True, slots=True)
class Resize:
    """The target GPUs in rank order. No GPUs and no layout: the trainer releases all."""

    gpus: tuple[GpuId, ...]
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The time of portions without the fixed part of an update. `even_s`: that of tokens of usual lengths, if replicas
    had shared them evenly."""

    even_s: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.even_s + other.even_s, self.seconds + other.seconds)


class Trainer:
    """The trainer ends the iteration after `n_minibatches` optimizer steps and one weight sync."""

    def __init__(
        self,
        workload: Workload,
        costs: CostLaws,
        shared: Shared,
        model: ModelSection | None = None,
        noise: Noise = EXACT,
    ) -> None:
        """`model` is the model that reshards move. None: every reshard takes `costs.switch.reshard_s`."""
        self._workload, self._costs, self._shared, self._model = workload, costs, shared, model
        self._noise, self._num_portions = noise, 0
        self._portions = Portions(workload, costs.trainer)
        self.gpus: tuple[GpuId, ...] = ()
        self.layout: Layout | None = None
        self.ready: list[tuple[int, int]] = []
        """(group, tokens) of groups with log-probabilities that no minibatch has taken, in the order of training."""
        self.minibatch = 0
        self.taken: list[tuple[int, int]] = []
        """(group, tokens) in the open minibatch."""
        self.trained: list[int] = []
        """The groups in committed minibatches, in the order of training."""
        self.trained_in: dict[Layout, Measured] = {}
        """The layouts with a measured rate: after the first portion if it streams, else after the first minibatch."""
        self.measured_update_s: float | None = None
        """The fixed part of the last update. None before the first one."""
        self.waiting_resize: Resize | None = None
        self.held_until_s = 0.0
        self.closes_at_s: float | None = None
        """The end of the open minibatch, known once its last group is taken."""
        self._num_bundles = 0
        """The bundles of the open minibatch."""
        self._busy: Due | None = None
        self._resizing: tuple[Due, Resize] | None = None
        self._has_died = False
        self._with_groups: set[tuple[tuple[GpuId, ...], Layout | None]] = set()
        """The layouts, with their GPUs, for which this epoch has communicators. A death ends the epoch."""

    def start(self, gpus: tuple[GpuId, ...], layout: Layout | None) -> None:
        """Give the trainer its GPUs before the iteration. Its state and communicators exist already."""
        self._shared.gpus.move(gpus, Holder.FREE, Holder.ACTOR, self._now)
        self.gpus, self.layout = gpus, layout
        self._with_groups.add((gpus, layout))
        self._shared.gpus.mark(gpus, Doing.WAITING, self._now)

    @property
    def is_at_boundary(self) -> bool:
        return self._busy is None and not self.taken

    @property
    def is_resizing(self) -> bool:
        return self._resizing is not None

    @property
    def target(self) -> tuple[tuple[GpuId, ...], Layout | None]:
        """The GPUs and the layout after all requested resizes."""
        coming = self.waiting_resize or (self._resizing[1] if self._resizing else None)
        return (coming.gpus, coming.layout) if coming else (self.gpus, self.layout)

    @property
    def is_done(self) -> bool:
        return self.minibatch == self._workload.n_minibatches

    def resize(self, resize: Resize) -> None:
        """Request a resize. It replaces a waiting one."""
        self.waiting_resize = resize
        self.go()

    def hold(self, until_s: float) -> None:
        """No minibatch begins before `until_s`. If that is infinite, none begins at all."""
        self.held_until_s = until_s
        if self._now < until_s < math.inf:
            self._shared.clock.schedule(until_s, self.go)
        self.go()

    def add(self, group: int, num_tokens: int) -> None:
        if self._workload.minibatch_order is MinibatchOrder.FIXED:
            bisect.insort(self.ready, (group, num_tokens))
        else:
            self.ready.append((group, num_tokens))
        self.go()

    def go(self) -> None:
        """Do everything that is possible now."""
        if self._busy is None and self._resizing is None:
            self._go()
        if self._resizing is None and not self.is_done:
            self._shared.gpus.mark(self.gpus, Doing.WAITING if self._busy is None else Doing.TRAINING, self._now)

    def _go(self) -> None:
        if not self.taken or self._may_carry():
            self._begin_resize()
            if self._resizing is not None:
                return
        if not self.taken and (self.waiting_resize is not None or not self._may_open()):
            return
        if self.gpus and not self.is_done and (portion := self._next()) is not None:
            self._train(portion)

    def lose(self, gpu: GpuId, others: tuple[GpuId, ...]) -> None:
        """React to the loss of one of the trainer's GPUs. The trainer releases `others`, which it still holds."""
        for due in (self._busy, self._resizing[0] if self._resizing else None):
            if due is not None:
                due.is_cancelled = True
        again = len(self.taken)
        self.ready[:0] = self.taken
        self.taken, self._num_bundles, self.gpus, self.layout = [], 0, (), None
        self._busy = self._resizing = self.closes_at_s = None
        self._has_died = True
        self._with_groups.clear()
        self.drop_waiting(gpu)
        self._shared.gpus.move(others, Holder.ACTOR, Holder.FREE, self._now)
        self._shared.report(What.TRAINER_DIED, self.minibatch, again)
        if others:
            self._shared.report(What.GPUS_FREED, gpus=others)
            self._shared.freed()

    def stay(self) -> None:
        """Keep the present layout: drop the waiting resize."""
        self.waiting_resize = None
        self.go()

    def drop_waiting(self, gpu: GpuId) -> None:
        """Drop the waiting resize if it needs this GPU, which is lost."""
        if self.waiting_resize is not None and gpu in self.waiting_resize.gpus:
            self.waiting_resize = None
            self._shared.report(What.MOVE_DROPPED, gpus=(gpu,))
            self.go()

    @property
    def _now(self) -> float:
        return self._shared.clock.now_s

    def _may_carry(self) -> bool:
        """Whether the open minibatch can go on after the waiting resize. Without ranks nobody has its gradients."""
        resize = self.waiting_resize
        return self._workload.carries_gradients and resize is not None and bool(resize.gpus)

    def _begin_resize(self) -> None:
        resize = self.waiting_resize
        if resize is None:
            return
        joins = tuple(gpu for gpu in resize.gpus if gpu not in self.gpus)
        if any(self._shared.gpus.holder(gpu) is not Holder.FREE for gpu in joins):
            return
        self._shared.gpus.move(joins, Holder.FREE, Holder.ACTOR, self._now)
        self.waiting_resize = None
        due = self._shared.clock.schedule(self._now + self._resize_s(resize), self._resized)
        self._resizing = due, resize
        self._shared.gpus.mark(self.gpus, Doing.SWITCHING, self._now)

    def _resize_s(self, resize: Resize) -> float:
        switch = self._costs.switch
        if not resize.gpus:
            return switch.release_s
        if not self.gpus:
            return switch.trainer_cold_s if self._has_died else switch.trainer_warm_s
        assert self.layout is not None, "a trainer with GPUs has a layout"
        assert resize.layout is not None, "a resize to some GPUs has a layout"
        change = change_of(self.gpus, self.layout, resize.gpus, resize.layout)
        moved = moved_bytes(self._model, change) if self._model else None
        return switch.resharding_s(moved, is_new=(resize.gpus, resize.layout) not in self._with_groups)

    def _resized(self) -> None:
        assert self._resizing is not None, "a resize was cancelled and ended"
        resize = self._resizing[1]
        leaving = tuple(gpu for gpu in self.gpus if gpu not in resize.gpus)
        self.gpus, self.layout, self._resizing = resize.gpus, resize.layout, None
        self._with_groups.add((self.gpus, self.layout))
        self._has_died = self._has_died and not resize.gpus
        self._shared.report(What.TRAINER_RESIZED, gpus=self.gpus)
        if leaving:
            self._shared.gpus.move(leaving, Holder.ACTOR, Holder.FREE, self._now)
            self._shared.report(What.GPUS_FREED, gpus=leaving)
            self._shared.freed()
        self.go()

    def _in_order(self) -> Sequence[int]:
        """The groups in `ready` that may be trained now, in the order of training."""
        groups = [group for group, _ in self.ready]
        if self._workload.minibatch_order is MinibatchOrder.ARRIVAL:
            return groups
        first = len(self.trained) + len(self.taken)
        num_following = next((at for at, group in enumerate(groups) if group != first + at), len(groups))
        return groups[:num_following]

    def _next(self) -> Portion | None:
        assert self.layout is not None, "a trainer with GPUs has a layout"
        num_missing = self._workload.minibatch_sizes[self.minibatch] - len(self.taken)
        return self._portions.next(self._in_order(), num_missing=num_missing, layout=self.layout)

    def _may_open(self) -> bool:
        return not self.is_done and bool(self.gpus) and self._now >= self.held_until_s

    def _train(self, portion: Portion) -> None:
        assert self.layout is not None, "a trainer with GPUs has a layout"
        if not self.taken:
            self._shared.report(What.MINIBATCH_STARTED, self.minibatch)
        groups = self.ready[: len(portion.prompts)]
        del self.ready[: len(groups)]
        self.taken += groups
        size = self._workload.minibatch_sizes[self.minibatch]
        unevenness = self._portions.unevenness(portion, size=size, first_bundle=self._num_bundles, layout=self.layout)
        self._num_bundles += len(portion.bundle_sizes)
        even_s = self._costs.trainer.tokens_s(sum(tokens for _, tokens in groups), self.layout)
        seconds = even_s * unevenness * self._factor(groups)
        measured = Measured(even_s, seconds)
        if portion.is_last:
            seconds += self._costs.trainer.update_s(self.layout)
            self.closes_at_s = self._now + seconds
            self._shared.report(What.MINIBATCH_CLOSED, self.minibatch, size)
        ended = partial(self._trained, measured, is_last=portion.is_last)
        self._busy = self._shared.clock.schedule(self._now + seconds, ended)

    def _factor(self, groups: Sequence[tuple[int, int]]) -> float:
        """What the lengths of the next portion, and chance, do to its time."""
        lengths = [each for group, _ in groups for each in self._workload.sequence_tokens(group)]
        self._num_portions += 1
        return self._costs.trainer.length_factor(lengths) * self._noise.of_portion(self._num_portions - 1)

    def _trained(self, measured: Measured, *, is_last: bool) -> None:
        self._busy = None
        assert self.layout is not None, "a trainer with GPUs has a layout"
        if is_last or self._workload.streams:
            before = self.trained_in.get(self.layout, Measured())
            self.trained_in[self.layout] = before + measured
        if is_last:
            self._commit()
        else:
            self.go()

    def _commit(self) -> None:
        assert self.layout is not None, "a trainer with GPUs has a layout"
        self.measured_update_s = self._costs.trainer.update_s(self.layout)
        num_tokens = sum(tokens for _, tokens in self.taken)
        self.trained.extend(group for group, _ in self.taken)
        self.taken, self._num_bundles, self.closes_at_s = [], 0, None
        self._shared.report(What.MINIBATCH_FINISHED, self.minibatch, num_tokens)
        self.minibatch += 1
        if self.is_done:
            after = self._costs.sync.sync_s
            self._shared.clock.schedule(self._now + after, partial(self._shared.report, What.ITERATION_FINISHED))
            self._shared.gpus.mark(self.gpus, Doing.SWITCHING, self._now)
        else:
            self._shared.clock.schedule(self._now, self.go)
