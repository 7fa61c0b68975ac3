"""Whatever is asked for and whatever dies: no sequence is lost, no token made twice, each GPU has one holder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.faults import EngineFault, Fault, GpuFault, LateFault
from simulator.gpus import Holder, MoveRefused
from simulator.happenings import Happening, What
from simulator.workload import Workload
from simulator.world import World
from tests.unit.simulator.small import CLUSTER, workload, world
from tidegate.types import GpuId, Layout, MinibatchOrder

Move = Callable[[World], None]
subsets = st.lists(st.sampled_from(CLUSTER), max_size=5, unique=True)
numbers = st.lists(st.integers(0, 11), max_size=4)


def _trainer(gpus: list[GpuId]) -> Move:
    return lambda over: over.resize_trainer(gpus, Layout(dp=len(gpus)) if gpus else None)


moves: st.SearchStrategy[Move] = st.one_of(
    st.builds(lambda names: lambda over: over.release_engines(names), st.lists(st.integers(0, 5), max_size=2)),
    st.builds(lambda gpus: lambda over: over.acquire_engines(gpus), subsets),
    st.builds(lambda gpus: lambda over: over.resize_inference(gpus), subsets),
    st.builds(_trainer, subsets),
    st.builds(lambda found: lambda over: over.migrate(found), numbers),
    st.builds(lambda found: lambda over: over.order_queue(found), numbers),
    st.builds(lambda wait: lambda over: over.hold_training(over.now_s + wait), st.floats(0, 5)),
)
faults: st.SearchStrategy[Fault] = st.one_of(
    st.builds(GpuFault, st.floats(0, 20), st.sampled_from(CLUSTER[::3])),
    st.builds(EngineFault, st.floats(0, 5), st.integers(0, 3)),
    st.builds(LateFault, st.floats(0, 5), st.sampled_from(list(What)), st.floats(0, 5)),
)
turns = st.lists(st.integers(1, 120), min_size=1, max_size=3).map(tuple)
workloads = st.builds(
    lambda rows, order, streams: workload(rows, order=order, streams=streams),
    st.lists(st.tuples(turns, turns), min_size=2, max_size=6),
    st.sampled_from(MinibatchOrder),
    st.booleans(),
)


@dataclass
class Watch:
    """Checks a world after every happening, and sees to it that it can end once the moves are used up."""

    over: World
    moves: list[Move]

    def run(self) -> list[Happening]:
        for tick in range(400):
            self.over.wake_at(2.0 * tick)
        tokens = [0] * len(self.over.rollout.sequences)
        for _ in self.over.happenings():
            self.check(tokens)
            if self.moves:
                self.try_move(self.moves.pop())
            else:
                self.rescue()
        return self.over.history

    def try_move(self, move: Move) -> None:
        before = self.over.view(), len(self.over.gpus.changes)
        try:
            move(self.over)
        except MoveRefused:
            assert (self.over.view(), len(self.over.gpus.changes)) == before

    def check(self, tokens: list[int]) -> None:
        """Owners, places and tokens."""
        over, view = self.over, self.over.view()
        engines = [gpu for engine in view.engines for gpu in engine.gpus]
        used = Counter([*engines, *view.inference.gpus, *view.trainer.gpus, *view.free, *view.leaving, *view.lost])
        assert max(used.values()) == 1
        assert set(engines) <= set(over.gpus.held_by(Holder.ROLLOUT))
        assert set(view.inference.gpus) <= set(over.gpus.held_by(Holder.INFERENCE))
        assert set(view.trainer.gpus) <= set(over.gpus.held_by(Holder.ACTOR))
        places = Counter(number for engine in view.engines for number, _ in engine.running)
        places.update(number for number, _ in view.waiting)
        assert not places or max(places.values()) == 1
        for engine in view.engines:
            contexts = sum(over.rollout.sequences[number].context_tokens for number, _ in engine.running)
            assert engine.kv_tokens == contexts + sum(done for _, done in engine.running)
        seen = [pair for engine in view.engines for pair in engine.running] + list(view.waiting)
        for number, done in seen:
            assert done >= tokens[number]
            tokens[number] = done

    def rescue(self) -> None:
        """One GPU, or one engine, for whatever stage has nothing and is needed."""
        over, view = self.over, self.over.view()
        if over.trainer.waiting_resize is not None:
            over.resize_trainer(view.trainer.gpus, view.trainer.layout)
        elif view.num_unfinished:
            if not over.gpus.held_by(Holder.ROLLOUT):
                self.generate()
        elif view.engines:
            over.release_engines([engine.name for engine in view.engines])
        elif not over.inference.wanted and view.free:
            over.resize_inference(view.free[:1])
        elif not view.trainer.gpus and not view.trainer.is_resizing and view.free:
            over.resize_trainer(view.free[:1], Layout())
        elif len(over.inference.wanted) > 1:
            over.resize_inference(over.inference.wanted[:1])
        elif len(view.trainer.gpus) > 1 and not over.inference.wanted:
            over.resize_trainer(view.trainer.gpus[:1], Layout())

    def generate(self) -> None:
        over, view = self.over, self.over.view()
        if len(view.free) >= 2:
            over.acquire_engines(view.free[:2])
        elif over.inference.wanted:
            over.resize_inference(())
        elif view.trainer.gpus and not view.trainer.is_resizing:
            over.resize_trainer((), None)


def made(work: Workload, found: list[Fault]) -> World:
    return world(work, faults=found)


@settings(max_examples=60)
@given(workloads, st.lists(moves, max_size=25), st.lists(faults, max_size=3))
def test_every_sequence_ends_once_with_its_tokens_and_is_trained_once(
    work: Workload, asked: list[Move], found: list[Fault]
) -> None:
    over = made(work, found)
    history = Watch(over, list(asked)).run()
    ended = Counter(each.number for each in history if each.what is What.SEQUENCE_FINISHED)
    inferred = Counter(each.number for each in history if each.what is What.GROUP_INFERRED)
    assert ended == Counter(range(work.num_groups * work.group_size))
    assert inferred == Counter(range(work.num_groups))
    assert all(sequence.generated == sequence.turn_ends[-1] for sequence in over.rollout.sequences)
    want = sum(over.rollout.group_tokens(group) for group in range(work.num_groups))
    assert sum(each.count for each in history if each.what is What.MINIBATCH_FINISHED) == want


@settings(max_examples=15)
@given(workloads, st.lists(moves, max_size=25), st.lists(faults, max_size=3))
def test_the_same_moves_give_the_same_history_byte_for_byte(
    work: Workload, asked: list[Move], found: list[Fault]
) -> None:
    first, second = (Watch(made(work, found), list(asked)).run() for _ in range(2))
    assert [each.line() for each in first] == [each.line() for each in second]
