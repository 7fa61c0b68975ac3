"""The inference computes the log-probabilities of complete groups, one group after the other on all its GPUs.

Invariants:
- A GPU leaves between two groups, never within one. [test_world: a_gpu_leaves_the_inference_between]
- After the loss of a GPU the interrupted group is computed again from its beginning, before all later groups.
  [test_world: a_lost_gpu_of_the_inference]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from simulator.clock import Due
from simulator.cost_model import Costs
from simulator.gpus import Doing, Holder
from simulator.happenings import Shared, What
from tidegate.types import GpuId


class Inference:
    """`group_done` gets the number and the tokens of each group."""

    def __init__(self, num_groups: int, costs: Costs, shared: Shared, group_done: Callable[[int, int], None]) -> None:
        self._left, self._costs, self._shared, self._group_done = num_groups, costs, shared, group_done
        self.has_computed = False
        """Whether a group is computed: from then on the rate counts as measured."""
        self.gpus: tuple[GpuId, ...] = ()
        self.target_gpus: tuple[GpuId, ...] = ()
        self.backlog: deque[tuple[int, int]] = deque()
        """(group, tokens) of each waiting group."""
        self.starting: tuple[GpuId, ...] = ()
        """GPUs whose workers start."""
        self._current: tuple[Due, tuple[int, int]] | None = None

    def start(self, gpus: tuple[GpuId, ...]) -> None:
        """Give the inference its GPUs before the iteration. Their workers are awake already."""
        self._shared.gpus.move(gpus, Holder.FREE, Holder.INFERENCE, self._shared.clock.now_s)
        self.gpus = self.target_gpus = gpus
        self._shared.gpus.mark(gpus, Doing.WAITING, self._shared.clock.now_s)

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    def resize(self, gpus: tuple[GpuId, ...]) -> None:
        """Set the target. Free GPUs join at once, others when they become free."""
        self.target_gpus = gpus
        self.go()

    def add(self, group: int, num_tokens: int) -> None:
        self.backlog.append((group, num_tokens))
        self.go()

    def go(self) -> None:
        """Do everything that is possible now: join, leave, compute."""
        self._join()
        if self._current is None:
            self._leave()
        if self._current is None and self.gpus and self.backlog:
            group, num_tokens = self.backlog.popleft()
            seconds = num_tokens / (len(self.gpus) * self._costs.inference.rate_tokens_per_s)
            due = self._shared.clock.schedule(self._shared.clock.now_s + seconds, self._computed)
            self._current = due, (group, num_tokens)
        doing = Doing.INFERRING if self.is_busy else Doing.WAITING
        self._shared.gpus.mark(self.gpus, doing, self._shared.clock.now_s)

    def lose(self, gpu: GpuId) -> None:
        """React to the loss of a GPU. Its holder is LOST already."""
        self.target_gpus = tuple(own for own in self.target_gpus if own != gpu)
        self.starting = tuple(own for own in self.starting if own != gpu)
        if gpu in self.gpus:
            self.gpus = tuple(own for own in self.gpus if own != gpu)
            if self._current is not None:
                due, work = self._current
                due.is_cancelled = True
                self.backlog.appendleft(work)
                self._current = None
        self.go()

    def _join(self) -> None:
        here = {*self.gpus, *self.starting}
        joins = tuple(
            gpu for gpu in self.target_gpus if gpu not in here and self._shared.gpus.holder(gpu) is Holder.FREE
        )
        if joins:
            clock = self._shared.clock
            self._shared.gpus.move(joins, Holder.FREE, Holder.INFERENCE, clock.now_s)
            self.starting += joins
            clock.schedule(clock.now_s + self._costs.switch.inference_warm_s, partial(self._joined, joins))

    def _joined(self, joins: tuple[GpuId, ...]) -> None:
        up = tuple(gpu for gpu in joins if gpu in self.starting)
        self.starting = tuple(gpu for gpu in self.starting if gpu not in up)
        self.gpus += up
        self._shared.report(What.INFERENCE_RESIZED, gpus=self.gpus)
        self.go()

    def _leave(self) -> None:
        target = set(self.target_gpus)
        leaving = tuple(gpu for gpu in self.gpus if gpu not in target)
        if leaving:
            self.gpus = tuple(gpu for gpu in self.gpus if gpu in target)
            self._shared.gpus.move(leaving, Holder.INFERENCE, Holder.FREE, self._shared.clock.now_s)
            self._shared.report(What.INFERENCE_RESIZED, gpus=self.gpus)
            self._shared.report(What.GPUS_FREED, gpus=leaving)
            self._shared.freed()

    def _computed(self) -> None:
        assert self._current is not None, "a group's computation was cancelled and ended"
        _, (group, num_tokens) = self._current
        self._current = None
        self.has_computed = True
        self._left -= 1
        self._shared.report(What.GROUP_INFERRED, group, num_tokens)
        self._group_done(group, num_tokens)
        if not self._left:
            self._shared.report(What.INFERENCE_FINISHED)
        self.go()
