"""The rollout: engines, their queue, and sequences that move between engines.

- The head of the queue goes to the engine with the fewest running sequences.
- An engine whose sequence ends takes the next one from the queue itself.
- The unfinished sequences of a leaving engine return to the head of the queue, or to their places in the last order.

Invariants:
- An unfinished sequence is in exactly one place: running, waiting, returning, or with its environment.
  [test_simulator: every_sequence_ends_once]
- The tokens of a sequence never decrease. [test_simulator: every_sequence_ends_once]
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial

from simulator.clock import Due
from simulator.columns import Columns
from simulator.cost_model import CostLaws
from simulator.engines import Engine, Sequence
from simulator.gpus import Doing, Holder, MoveRefused
from simulator.happenings import Shared, What
from simulator.noise import EXACT, Noise
from simulator.workload import Workload
from tidegate.types import GpuId


class Rollout:
    """`ended` gets each sequence that has ended, and whether it is the last of its group."""

    def __init__(
        self,
        workload: Workload,
        costs: CostLaws,
        shared: Shared,
        ended: Callable[[Sequence, bool], None],
        noise: Noise = EXACT,
    ) -> None:
        self._workload, self._costs, self._shared, self._ended = workload, costs, shared, ended
        self._noise = noise
        self.sequences = tuple(workload.sequences())
        self.engines: dict[int, Engine] = {}
        self.waiting: deque[Sequence] = deque(self.sequences)
        self.columns = Columns.of(len(self.sequences))
        self.num_unfinished = len(self.sequences)
        self._left = [workload.group_size] * workload.num_groups
        self._due: dict[int, Due] = {}
        self._starting: dict[int, tuple[GpuId, ...]] = {}
        self._count = 0
        self._place_in_order: dict[int, int] = {}

    def start(self, gpus: tuple[GpuId, ...]) -> None:
        """Start engines before the iteration. They are awake already."""
        for own in self._cut(gpus):
            self._shared.gpus.move(own, Holder.FREE, Holder.ROLLOUT, self._now)
            self._shared.gpus.mark(own, Doing.WAITING, self._now)
            self._add(self._new_name(), own)

    def acquire(self, gpus: tuple[GpuId, ...], *, cold: bool) -> None:
        """Start whole engines on free GPUs."""
        engines = self._cut(gpus)
        self._shared.gpus.move(gpus, Holder.FREE, Holder.ROLLOUT, self._now)
        after = self._costs.switch.engine_cold_s if cold else self._costs.switch.acquire_s
        for own in engines:
            name = self._new_name()
            self._starting[name] = own
            self._shared.clock.schedule(self._now + after, partial(self._acquired, name))

    def release(self, names: Iterable[int]) -> None:
        """Release engines. Unfinished sequences return to the queue, and the GPUs become free after `release_s`."""
        leaving = tuple(names)
        self._require(leaving)
        if not leaving:
            return
        after = self._costs.switch.release_s
        back = [sequence for name in leaving for sequence in self._take_down(name)]
        gpus = tuple(gpu for name in leaving for gpu in self._drop(name))
        self._shared.gpus.move(gpus, Holder.ROLLOUT, Holder.LEAVING, self._now)
        self._bring_back(back, self._costs.switch.resubmit_s)
        self._shared.clock.schedule(self._now + after, partial(self.free, gpus))

    def order(self, numbers: Iterable[int]) -> None:
        """Put these sequences first, in this order, the waiting and the returning ones. Others keep their order."""
        self._place_in_order = {number: at for at, number in enumerate(numbers)}
        self._reorder()

    def migrate(self, numbers: Iterable[int]) -> None:
        """Move running sequences to the head of the queue, and from there to the engines that run fewest."""
        migrating = tuple(dict.fromkeys(numbers))
        self.advance()
        where = {number: engine for engine in self.engines.values() for number, _ in engine.progress()}
        if missing := [number for number in migrating if number not in where]:
            raise MoveRefused(f"sequences {missing} do not run: only a running sequence can migrate")
        back = [self._interrupted(where[number], number) for number in migrating]
        for engine in {where[number].name: where[number] for number in migrating}.values():
            self._plan(engine)
        self._bring_back(back, self._costs.switch.resubmit_s)

    def kill(self, name: int) -> tuple[GpuId, ...]:
        """An engine dies. Returns its GPUs, which the rollout still holds. No token is lost: all are reported."""
        self._require([name])
        switch = self._costs.switch
        self._bring_back(self._take_down(name), switch.detect_s + switch.resubmit_s)
        return self._drop(name)

    def engine_on(self, gpu: GpuId) -> int | None:
        """The number of the engine on a GPU. None: the engine is still starting."""
        return next((engine.name for engine in self.engines.values() if gpu in engine.gpus), None)

    def forget_start(self, gpu: GpuId) -> tuple[GpuId, ...]:
        """Cancel the start of the engine on `gpu`, and return its GPUs."""
        name = next(name for name, gpus in self._starting.items() if gpu in gpus)
        return self._starting.pop(name)

    def advance(self) -> None:
        for engine in self.engines.values():
            engine.advance(self._now)

    @property
    def _now(self) -> float:
        return self._shared.clock.now_s

    def _new_name(self) -> int:
        self._count += 1
        return self._count - 1

    def _cut(self, gpus: tuple[GpuId, ...]) -> list[tuple[GpuId, ...]]:
        size = self._costs.engine.gpus_per_engine
        if len(gpus) % size:
            raise MoveRefused(f"{len(gpus)} GPUs make no whole engines of {size}: leave {len(gpus) % size} out")
        return [gpus[at : at + size] for at in range(0, len(gpus), size)]

    def _require(self, names: Collection[int]) -> None:
        if missing := [name for name in names if name not in self.engines]:
            raise MoveRefused(f"engines {missing} do not run: the running ones are {sorted(self.engines)}")
        if len(set(names)) < len(names):
            raise MoveRefused(f"an engine is named twice in {list(names)}: name each once")

    def _add(self, name: int, gpus: tuple[GpuId, ...]) -> None:
        self.engines[name] = self._new_engine(name, gpus)

    def _new_engine(self, name: int, gpus: tuple[GpuId, ...]) -> Engine:
        return Engine(
            name=name, gpus=gpus, costs=self._costs.engine, columns=self.columns, at_s=self._now, noise=self._noise
        )

    def _acquired(self, name: int) -> None:
        if gpus := self._starting.pop(name, None):
            self._add(name, gpus)
            self._shared.gpus.mark(gpus, Doing.WAITING, self._now)
            self._shared.report(What.ENGINE_ACQUIRED, name, gpus=gpus)
            self.fill()

    def _take_down(self, name: int) -> list[Sequence]:
        engine = self.engines[name]
        engine.advance(self._now)
        back = [self._interrupted(engine, number) for number, _ in engine.progress()]
        self._plan(engine)
        self._shared.report(What.ENGINE_LEFT, name, len(back), engine.gpus)
        return back

    def _drop(self, name: int) -> tuple[GpuId, ...]:
        return self.engines.pop(name).gpus

    def _interrupted(self, engine: Engine, number: int) -> Sequence:
        sequence = engine.take(number)
        sequence.prefilled = 0
        return sequence

    def free(self, gpus: tuple[GpuId, ...]) -> None:
        """Free the GPUs that are still leaving. Others of them were lost meanwhile."""
        left = tuple(gpu for gpu in gpus if self._shared.gpus.holder(gpu) is Holder.LEAVING)
        if left:
            self._shared.gpus.move(left, Holder.LEAVING, Holder.FREE, self._now)
            self._shared.report(What.GPUS_FREED, gpus=left)
            self._shared.freed()

    def _bring_back(self, sequences: list[Sequence], after_s: float) -> None:
        if sequences:
            self._shared.clock.schedule(self._now + after_s, partial(self._back, sequences))

    def _back(self, sequences: list[Sequence]) -> None:
        self.columns.queue(sequence.index for sequence in sequences)
        self.waiting.extendleft(reversed(sequences))
        self._reorder()
        self.fill()

    def _reorder(self) -> None:
        if self._place_in_order:
            self.waiting = deque(sorted(self.waiting, key=self._place))

    def _place(self, sequence: Sequence) -> int:
        return self._place_in_order.get(sequence.index, len(self._place_in_order))

    def _put_back(self, sequence: Sequence) -> None:
        """Put a sequence at the head of the queue: it was the next to run anyway."""
        self.columns.queue([sequence.index])
        self.waiting.appendleft(sequence)

    def fill(self) -> None:
        """Give the waiting sequences to the engines that run fewest."""
        self._fill(list(self.engines.values()))

    def _fill(self, engines: list[Engine]) -> None:
        heap = [(engine.running, engine.kv_tokens, engine.name) for engine in engines]
        heapq.heapify(heap)
        touched = {}
        while heap and self.waiting:
            engine = self.engines[heap[0][2]]
            if not engine.has_room(self.waiting[0]):
                heapq.heappop(heap)
                continue
            engine.admit(self.waiting.popleft(), self._now)
            touched[engine.name] = engine
            heapq.heapreplace(heap, (engine.running, engine.kv_tokens, engine.name))
        for engine in touched.values():
            self._plan(engine)

    def _plan(self, engine: Engine) -> None:
        if due := self._due.pop(engine.name, None):
            due.is_cancelled = True
        coming = engine.plan()
        self._shared.gpus.mark(engine.gpus, Doing.GENERATING if coming else Doing.WAITING, self._now)
        if coming:
            self._due[engine.name] = self._shared.clock.schedule(coming.at_s, partial(self._reached, engine))

    def _reached(self, engine: Engine) -> None:
        assert engine.next is not None, "an engine's next was cancelled and came"
        overflows = engine.next.overflows
        engine.advance(self._now)
        if overflows:
            self._put_back(self._interrupted(engine, engine.shortest()))
        for sequence in engine.take_ended():
            self._turn_ended(sequence)
        if not overflows:
            self._fill([engine])
        self._plan(engine)
        if not self.num_unfinished:
            self._shared.report(What.ROLLOUT_FINISHED)

    def _turn_ended(self, sequence: Sequence) -> None:
        sequence.turn += 1
        if sequence.turn < len(sequence.turn_ends):
            sequence.prefilled = sequence.num_tokens
            sequence.context_tokens += self._workload.observation_tokens
            after = self._workload.environment_s
            self._shared.clock.schedule(self._now + after, partial(self._answered, sequence))
            return
        self.columns.end(sequence.index)
        self.num_unfinished -= 1
        self._left[sequence.group] -= 1
        self._shared.report(What.SEQUENCE_FINISHED, sequence.index, sequence.generated)
        if not self._left[sequence.group]:
            self._shared.report(What.GROUP_FINISHED, sequence.group, self.group_tokens(sequence.group))
        self._ended(sequence, not self._left[sequence.group])

    def _answered(self, sequence: Sequence) -> None:
        self.columns.queue([sequence.index])
        bisect.insort(self.waiting, sequence, key=self._place)
        self.fill()

    def group_tokens(self, group: int) -> int:
        """The tokens of a group, contexts included: the work of inference and trainer."""
        size = self._workload.group_size
        return sum(each.num_tokens for each in self.sequences[group * size : (group + 1) * size])
