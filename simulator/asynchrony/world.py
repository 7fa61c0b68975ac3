"""Several iterations on one virtual clock, with a rollout that runs ahead of the trainer within a bound.

- Iteration i is issued when the weights have version i - `staleness`.
- The trainer takes the groups of its own iteration alone, in the order of their log-probabilities.
- After an iteration's last optimizer step the trainer stands still for `sync_s`. Then the weights have the next
  version, and engines without work have them. One that has work stands still for `sync_s` when it takes them. Both are
  upper limits: publishing and loading are parts of `sync_s`.

Moves are those of `World`.

Invariants:
- With `staleness: 0` an iteration begins when the one before has ended.
  [test_asynchrony: strict_iterations_take_as_long]
- Every sample is trained once, in its own iteration. [test_asynchrony: every_sample_is_trained_once]
"""

from __future__ import annotations

from collections import defaultdict

from simulator.asynchrony.course import Asynchrony, Course, LongWorkload
from simulator.asynchrony.rollout import VersionedRollout
from simulator.cost_model import CostLaws
from simulator.happenings import Happening, Shared, What
from simulator.model import ModelSection
from simulator.noise import EXACT, Noise
from simulator.rollout import Rollout
from simulator.world import Placement, World


class AsyncWorld(World):
    """A training of `workload.num_iterations`. MoveRefused: a component cannot have its placement."""

    def __init__(
        self,
        workload: LongWorkload,
        costs: CostLaws,
        placement: Placement,
        rules: Asynchrony,
        model: ModelSection | None = None,
        noise: Noise = EXACT,
    ) -> None:
        self.course = Course(workload, rules)
        self.version = 0
        self.version_at_s: list[float] = []
        """The time at which the weights had version 1, 2 and so on: the ends of iterations."""
        self.num_issued = 0
        self._early: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By iteration: (group, tokens) of groups that wait for the trainer to come to it."""
        self._per_iteration = workload.n_minibatches // workload.num_iterations
        super().__init__(workload, costs, placement, model=model, noise=noise)
        self._issue()

    @property
    def num_unfinished(self) -> int:
        """The issued sequences that have not ended."""
        size = self.course.workload.prompts_per_iteration * self.course.workload.group_size
        later = self.course.workload.num_iterations - self.num_issued
        return self.rollout.num_unfinished - later * size

    def _new_rollout(self, shared: Shared, noise: Noise) -> Rollout:
        self._versioned = VersionedRollout(self.course, self.costs, shared, self._sequence_ended, noise)
        return self._versioned

    def _group_inferred(self, group: int, num_tokens: int) -> None:
        iteration = self.course.workload.iteration_of(group)
        if iteration == self.version:
            self.trainer.add(group, num_tokens)
        else:
            self._early[iteration].append((group, num_tokens))

    def _publish(self, happening: Happening) -> None:
        super()._publish(happening)
        if happening.what is What.MINIBATCH_FINISHED and not (happening.number + 1) % self._per_iteration:
            publish_s = self.now_s + self.costs.sync.sync_s
            self._clock.schedule(publish_s, self._next_version)
            self.trainer.hold(publish_s)

    def _next_version(self) -> None:
        self.version += 1
        self.version_at_s.append(self.now_s)
        for group, num_tokens in self._early.pop(self.version, ()):
            self.trainer.add(group, num_tokens)
        self._issue()
        self._versioned.take_weights(self.version)

    def _issue(self) -> None:
        last = min(self.version + self.course.rules.staleness + 1, self.course.workload.num_iterations)
        while self.num_issued < last:
            self._versioned.issue(self.num_issued)
            self.num_issued += 1
