"""A rollout whose engines have weights of different versions.

- An engine admits a sequence only if its weights are new enough for it.
- With `ends_old` an engine takes the newest weights when it runs nothing. So an engine whose weights are too old ends
  what it runs, and then takes new ones.
- Otherwise every engine takes new weights at once, and its sequences go on.

Invariant: an engine runs a sequence on weights within the bound. [test_asynchrony: no_token_is_staler_than_the_bound]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simulator.asynchrony.course import Course, OnNewWeights
from simulator.cost_model import CostLaws
from simulator.engines import Engine, Sequence
from simulator.happenings import Shared
from simulator.noise import EXACT, Noise
from simulator.rollout import Rollout
from tidegate.types import GpuId


@dataclass(slots=True)
class VersionedEngine(Engine):
    course: Course = field(kw_only=True)
    version: int = field(kw_only=True)

    def has_room(self, sequence: Sequence) -> bool:
        return self.course.may_generate(sequence.group, self.version) and Engine.has_room(self, sequence)

    def admit(self, sequence: Sequence, now_s: float) -> None:
        self.course.mark(sequence.index, generated=sequence.generated, version=self.version)
        Engine.admit(self, sequence, now_s)

    def take_weights(self, version: int, now_s: float, *, pause_s: float) -> None:
        """Its sequences stand still for `pause_s`, and go on under the new weights. The caller plans afterwards."""
        self.advance(now_s)
        self.at_s = max(self.at_s, now_s) + pause_s
        self.version, self.next = version, None
        for index, generated in self.progress():
            self.course.mark(index, generated=generated, version=version)


class VersionedRollout(Rollout):
    """Sequences wait once their iteration is issued (`issue`)."""

    def __init__(
        self,
        course: Course,
        costs: CostLaws,
        shared: Shared,
        ended: Callable[[Sequence, bool], None],
        noise: Noise = EXACT,
    ) -> None:
        self._course, self._version = course, 0
        super().__init__(course.workload, costs, shared, ended, noise)
        self.waiting.clear()

    def issue(self, iteration: int) -> None:
        """The iteration's sequences may be generated from now on."""
        workload = self._course.workload
        size = workload.prompts_per_iteration * workload.group_size
        self.waiting.extend(self.sequences[iteration * size : (iteration + 1) * size])
        self.fill()

    def take_weights(self, version: int) -> None:
        """New weights are there. Engines take them by the rules."""
        self._version = version
        for engine in self.engines.values():
            if not engine.running:
                # It took them while they were published.
                self._load(engine, pause_s=0.0)
            elif self._course.rules.on_new_weights is not OnNewWeights.ENDS_OLD:
                self._load(engine, pause_s=self._pause_s(engine))
                self._plan(engine)
        self.fill()

    def _new_engine(self, name: int, gpus: tuple[GpuId, ...]) -> Engine:
        return VersionedEngine(
            name=name,
            gpus=gpus,
            costs=self._costs.engine,
            columns=self.columns,
            at_s=self._now,
            noise=self._noise,
            course=self._course,
            version=self._version,
        )

    def _fill(self, engines: list[Engine]) -> None:
        if self.waiting:
            for engine in engines:
                if not engine.running:
                    self._load(engine, pause_s=self._pause_s(engine))
        super()._fill(engines)

    def _pause_s(self, engine: Engine) -> float:
        pause_s = self._costs.sync.sync_s
        if self._course.rules.on_new_weights is OnNewWeights.COMPUTES_CACHE:
            pause_s += engine.kv_tokens / self._costs.engine.prefill_tokens_per_s
        return pause_s

    def _load(self, engine: Engine, *, pause_s: float) -> None:
        assert isinstance(engine, VersionedEngine), "every engine of this rollout has a version"
        if engine.version != self._version:
            engine.take_weights(self._version, self._now, pause_s=pause_s)
