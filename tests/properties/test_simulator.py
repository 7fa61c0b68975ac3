"""Whatever is asked for and whatever dies: no sequence is lost, no token made twice, each GPU has one holder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.state.observed import QUEUED
from simulator.faults import EngineFault, Fault, GpuFault, LateFault
from simulator.gpus import Holder, MoveRefused
from simulator.happenings import Happening, What
from simulator.workload import Workload
from simulator.world import World
from tests.effort import examples
from tests.unit.simulator.small import CLUSTER, shown, workload, world
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
        before = shown(self.over), len(self.over.gpus.changes)
        try:
            move(self.over)
        except MoveRefused:
            assert (shown(self.over), len(self.over.gpus.changes)) == before

    def check(self, tokens: list[int]) -> None:
        """Owners, places and tokens."""
        over, now = self.over, shown(self.over)
        engines = [gpu for gpus in now.engines for gpu in gpus]
        nobodys = [gpu for holder in (Holder.FREE, Holder.LEAVING, Holder.LOST) for gpu in now.held_by(holder)]
        assert max(Counter([*engines, *now.inference, *over.trainer.gpus, *nobodys]).values()) == 1
        assert set(engines) <= set(now.held_by(Holder.ROLLOUT))
        assert set(now.inference) <= set(now.held_by(Holder.INFERENCE))
        assert set(over.trainer.gpus) <= set(now.held_by(Holder.ACTOR))
        assert sorted(now.queue) == [number for number, place in enumerate(now.places) if place == QUEUED]
        for place, engine in enumerate(over.rollout.engines.values()):
            running = now.running(place)
            assert engine.progress() == tuple((number, now.lengths[number]) for number in running)
            contexts = sum(over.rollout.sequences[number].context_tokens for number in running)
            assert engine.kv_tokens == contexts + sum(now.lengths[number] for number in running)
        assert all(done >= before for done, before in zip(now.lengths, tokens, strict=True))
        tokens[:] = now.lengths

    def rescue(self) -> None:
        """One GPU, or one engine, for whatever stage has nothing and is needed."""
        over, trainer = self.over, self.over.trainer
        free = over.gpus.held_by(Holder.FREE)
        if trainer.waiting_resize is not None:
            over.resize_trainer(trainer.gpus, trainer.layout)
        elif over.rollout.num_unfinished:
            if not over.gpus.held_by(Holder.ROLLOUT):
                self.generate(free)
        elif over.rollout.engines:
            over.release_engines(list(over.rollout.engines))
        elif not over.inference.target_gpus and free:
            over.resize_inference(free[:1])
        elif not trainer.gpus and not trainer.is_resizing and free:
            over.resize_trainer(free[:1], Layout())
        elif len(over.inference.target_gpus) > 1:
            over.resize_inference(over.inference.target_gpus[:1])
        elif len(trainer.gpus) > 1 and not over.inference.target_gpus:
            over.resize_trainer(trainer.gpus[:1], Layout())

    def generate(self, free: tuple[GpuId, ...]) -> None:
        over, trainer = self.over, self.over.trainer
        if len(free) >= 2:
            over.acquire_engines(free[:2])
        elif over.inference.target_gpus:
            over.resize_inference(())
        elif trainer.gpus and not trainer.is_resizing:
            over.resize_trainer((), None)


def made(work: Workload, found: list[Fault]) -> World:
    return world(work, faults=found)


@settings(max_examples=examples(60))
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


@settings(max_examples=examples(15))
@given(workloads, st.lists(moves, max_size=25), st.lists(faults, max_size=3))
def test_the_same_moves_give_the_same_history_byte_for_byte(
    work: Workload, asked: list[Move], found: list[Fault]
) -> None:
    first, second = (Watch(made(work, found), list(asked)).run() for _ in range(2))
    assert [each.line() for each in first] == [each.line() for each in second]
