"""The inference computes log-probabilities on all its GPUs, one piece of work after the other.

Order:
1. Complete groups, in the order in which they ended: of each what is not computed yet.
2. Where no group waits, responses whose groups are still generated: one a copy at a time, the oldest first.

A group divides over the GPUs as if responses did. A response does not: the last piece that waits takes as long as its
longest response on one copy of `gpus_per_copy` GPUs.

Invariants:
- A GPU leaves between two pieces of work, never within one. [test_world: a_gpu_leaves_the_inference_between]
- After the loss of a GPU the interrupted piece is computed again from its beginning, before all later ones.
  [test_world: a_lost_gpu_of_the_inference_costs_a_group]
- A response that is computed ahead is not computed again with its group. [test_world: computed_ahead_is_not_computed]
- A filtered group is handed on as soon as it has ended, whatever waits. [test_world: a_filtered_group_is_handed_on]
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from simulator.clock import Due
from simulator.cost_model import CostLaws
from simulator.gpus import Doing, Holder
from simulator.happenings import Shared, What
from simulator.workload import Workload
from tidegate.types import GpuId


@dataclass(frozen=True, slots=True)
class _Work:
    """`responses`: (group, tokens) of each. `ends`: the group that the work completes; None: it is work ahead."""

    responses: tuple[tuple[int, int], ...]
    ends: int | None = None

    @property
    def longest(self) -> int:
        return max((num_tokens for _, num_tokens in self.responses), default=0)

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.responses)


class Inference:
    """`group_done` gets the number and the tokens of each group."""

    def __init__(
        self, workload: Workload, costs: CostLaws, shared: Shared, group_done: Callable[[int, int], None]
    ) -> None:
        self._workload, self._costs, self._shared, self._group_done = workload, costs, shared, group_done
        self._left = workload.num_groups
        self.has_computed = False
        """Whether a group is computed: from then on the rate counts as measured."""
        self.gpus: tuple[GpuId, ...] = ()
        self.target_gpus: tuple[GpuId, ...] = ()
        self.backlog: deque[int] = deque()
        """The complete groups that wait."""
        self.starting: tuple[GpuId, ...] = ()
        """GPUs whose workers start."""
        self._tokens: Counter[int] = Counter()
        """By group: the tokens of its ended responses."""
        self._waiting: dict[int, list[int]] = {}
        """By group: the tokens of each ended response that waits. In the order of the groups' first ones."""
        self._ahead: Counter[int] = Counter()
        """By group: the tokens that are computed ahead."""
        self._current: tuple[Due, _Work] | None = None

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

    @property
    def num_tokens_ahead(self) -> int:
        """The tokens of responses that are computed, of groups that are not."""
        return self._ahead.total()

    def add(self, group: int, num_tokens: int, *, is_last: bool) -> None:
        """A response has ended. `is_last`: its group has ended with it."""
        self._waiting.setdefault(group, []).append(num_tokens)
        self._tokens[group] += num_tokens
        if is_last and group in self._workload.filtered:
            del self._waiting[group], self._tokens[group], self._ahead[group]
            self._hand_on(group, 0)
        elif is_last:
            self.backlog.append(group)
        self.go()

    def go(self) -> None:
        """Do everything that is possible now: join, leave, compute."""
        self._join()
        if self._current is None:
            self._leave()
        if self._current is None and self.gpus and (work := self._next()) is not None:
            rate = self._costs.inference.rate_tokens_per_s
            seconds = work.num_tokens / (len(self.gpus) * rate)
            if not self.backlog:
                seconds = max(seconds, work.longest / (rate * self._costs.inference.gpus_per_copy))
            due = self._shared.clock.schedule(self._shared.clock.now_s + seconds, self._computed)
            self._current = due, work
        doing = Doing.INFERRING if self.is_busy else Doing.WAITING
        self._shared.gpus.mark(self.gpus, doing, self._shared.clock.now_s)

    def _next(self) -> _Work | None:
        if self.backlog:
            group = self.backlog.popleft()
            return _Work(tuple((group, num_tokens) for num_tokens in self._waiting.pop(group, ())), ends=group)
        if not self._workload.scores_ahead:
            return None
        ahead = ((group, each) for group, waiting in self._waiting.items() for each in waiting)
        responses = tuple(islice(ahead, max(1, len(self.gpus) // self._costs.inference.gpus_per_copy)))
        for group, _ in responses:
            self._waiting[group].pop(0)
            if not self._waiting[group]:
                del self._waiting[group]
        return _Work(responses) if responses else None

    def lose(self, gpu: GpuId) -> None:
        """React to the loss of a GPU. Its holder is LOST already."""
        self.target_gpus = tuple(own for own in self.target_gpus if own != gpu)
        self.starting = tuple(own for own in self.starting if own != gpu)
        if gpu in self.gpus:
            self.gpus = tuple(own for own in self.gpus if own != gpu)
            if self._current is not None:
                due, work = self._current
                due.is_cancelled = True
                self._give_back(work)
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

    def _give_back(self, work: _Work) -> None:
        waiting: dict[int, list[int]] = {group: [] for group, _ in work.responses}
        for group, num_tokens in work.responses:
            waiting[group].append(num_tokens)
        for group, later in self._waiting.items():
            waiting.setdefault(group, []).extend(later)
        self._waiting = {group: each for group, each in waiting.items() if group in self._tokens}
        if work.ends is not None:
            self.backlog.appendleft(work.ends)

    def _computed(self) -> None:
        assert self._current is not None, "a computation was cancelled and ended"
        _, work = self._current
        self._current = None
        self.has_computed = True
        if work.ends is None:
            for group, each in work.responses:
                # A filtered group that has ended meanwhile is no work any more.
                if group in self._tokens:
                    self._ahead[group] += each
        else:
            num_tokens = self._tokens[work.ends]
            del self._ahead[work.ends]
            self._hand_on(work.ends, num_tokens)
        self.go()

    def _hand_on(self, group: int, num_tokens: int) -> None:
        self._left -= 1
        self._shared.report(What.GROUP_INFERRED, group, num_tokens)
        self._group_done(group, num_tokens)
        if not self._left:
            self._shared.report(What.INFERENCE_FINISHED)
