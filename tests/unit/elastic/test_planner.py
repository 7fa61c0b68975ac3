"""Small reshards with known plans, and refused ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.unit.elastic import cutter
from tidegate.elastic.plan.gpt import EMBEDDING, GptShape, gpt_parameters
from tidegate.elastic.plan.holders import RangesRefused, SourceMissing, State
from tidegate.elastic.plan.layout import LayoutRefused, Mesh, even_chunks
from tidegate.elastic.plan.optimizers import (
    DistributedOptimizer,
    FlatRange,
    Optimizer,
    OptimizerRefused,
    PlainOptimizer,
    StateKind,
    require_supported,
)
from tidegate.elastic.plan.parameters import Parameter, Split, Whole
from tidegate.elastic.plan.plan import RegionCopy
from tidegate.elastic.plan.planner import Planner
from tidegate.types import Layout

VECTOR = Parameter("vector", (8,), 2, Split(0), 0)
NORM = Parameter("norm", (4,), 2, Whole(), 0)
SHAPE = GptShape(
    num_layers=4,
    hidden_size=4,
    ffn_hidden_size=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=1,
    vocab_size=6,
    padded_vocab_size=8,
    tied_embeddings=True,
)


def state(layout: Layout, ranks: tuple[int, ...], optimizer: Optimizer | None = None, num_layers: int = 1) -> State:
    return State(Mesh(layout, ranks, even_chunks(num_layers, pp=layout.pp)), optimizer)


def shared(*shares: tuple[int, int], name: str = "vector") -> DistributedOptimizer:
    """The ranges of ranks 0, 1, ... of one parameter."""
    return DistributedOptimizer({rank: {name: FlatRange(*share)} for rank, share in enumerate(shares)})


def pairs(copies: tuple[RegionCopy, ...]) -> Counter[tuple[int, int]]:
    return Counter((copy.source_rank, copy.target_rank) for copy in copies)


def test_a_rank_that_keeps_its_shard_copies_it_locally() -> None:
    plan = Planner([VECTOR], state(Layout(tp=2, dp=2), (0, 1, 2, 3)), state(Layout(tp=2), (2, 3))).whole()
    assert plan.received_bytes == 0
    assert [len(part.local) for part in plan.parts] == [0, 0, 1, 1]


def test_new_replicas_are_served_by_the_old_ones_in_turns() -> None:
    plan = Planner([NORM], state(Layout(dp=2), (0, 1)), state(Layout(dp=6), tuple(range(6)))).whole()
    want = Counter({(0, 2): 1, (1, 3): 1, (0, 4): 1, (1, 5): 1})
    assert sum((pairs(part.sends) for part in plan.parts), Counter()) == want


def test_the_turns_of_the_next_parameter_continue_where_the_last_one_stopped() -> None:
    parameters = [replace(NORM, name=f"norm.{index}") for index in range(4)]
    plan = Planner(parameters, state(Layout(dp=2), (0, 1)), state(Layout(dp=3), (0, 1, 2))).whole()
    assert sum((pairs(part.sends) for part in plan.parts), Counter()) == Counter({(0, 2): 2, (1, 2): 2})


def test_a_holder_on_the_same_host_serves_before_one_afar() -> None:
    hosts = {rank: "ab"[rank % 2] for rank in range(4)}
    plan = Planner([NORM], state(Layout(dp=2), (0, 1)), state(Layout(dp=2), (3, 2)), hosts=hosts).whole()
    assert sum((pairs(part.sends) for part in plan.parts), Counter()) == Counter({(0, 2): 1, (1, 3): 1})


def test_the_copies_of_tied_embeddings_are_one_logical_parameter() -> None:
    """Each of the two target copies comes from the nearest holder, once. A rank that holds a copy keeps it."""
    parameters = [parameter for parameter in gpt_parameters(SHAPE) if parameter.name == EMBEDDING]
    source = state(Layout(pp=2), (0, 1), PlainOptimizer(), num_layers=4)
    target = state(Layout(pp=4), (2, 3, 0, 1), PlainOptimizer(), num_layers=4)
    plan = Planner(parameters, source, target).whole()
    assert sum((pairs(part.sends) for part in plan.parts), Counter()).keys() == {(0, 2)}
    assert {copy.kind for copy in plan.part(1).local} == set(cutter.KINDS)
    assert plan.part(0).target_holdings == plan.part(3).target_holdings == ()
    to_one = Planner(parameters, source, state(Layout(), (5,), PlainOptimizer(), num_layers=4)).whole()
    assert len(to_one.part(5).receives) == len(cutter.KINDS)


def test_sequence_parallel_marks_change_no_copy() -> None:
    unmarked = gpt_parameters(SHAPE)
    marked = gpt_parameters(replace(SHAPE, sequence_parallel=True))
    assert sum(parameter.sequence_parallel for parameter in marked) == 2 * SHAPE.num_layers + 1
    source = state(Layout(tp=4, dp=2), tuple(range(8)), num_layers=4)
    target = state(Layout(tp=2, pp=2), (7, 1, 9, 3), num_layers=4)
    assert Planner(marked, source, target).whole() == Planner(unmarked, source, target).whole()


def test_virtual_stages_and_uneven_ones_move_only_the_layers_that_change_stage() -> None:
    parameters = [replace(NORM, name=f"layers.{layer}", place=layer) for layer in range(6)]
    source = State(Mesh(Layout(pp=2, vpp=2), (0, 1), ((2, 1), (1, 2))))
    target = State(Mesh(Layout(pp=2), (0, 1), ((4, 2),)))
    plan = Planner(parameters, source, target).whole()
    assert [copy.name for part in plan.parts for copy in part.sends] == ["layers.2"]


def test_frozen_parameters_move_without_optimizer_state() -> None:
    frozen = replace(VECTOR, trainable=False)
    plan = Planner(
        [frozen], state(Layout(), (0,), PlainOptimizer()), state(Layout(tp=2), (1, 2), PlainOptimizer())
    ).whole()
    assert {copy.kind for part in plan.parts for copy in part.sends} == {StateKind.WEIGHT}


def test_a_flat_range_goes_to_its_next_owner() -> None:
    source = state(Layout(dp=2), (0, 1), shared((0, 6), (6, 8)))
    target = state(Layout(dp=2), (0, 1), shared((0, 3), (3, 8)))
    (moment,) = (copy for copy in Planner([VECTOR], source, target).part(1).receives if copy.kind is StateKind.EXP_AVG)
    assert (moment.source_rank, moment.col, moment.cols, moment.source_offset, moment.target_offset) == (0, 3, 3, 3, 0)


def test_a_step_stays_on_its_rank_and_goes_once_to_a_new_holder() -> None:
    source = state(Layout(), (0,), shared((0, 8)))
    target = state(Layout(dp=2), (0, 1), shared((0, 5), (5, 8)))
    plan = Planner([VECTOR], source, target).whole()
    assert [copy.target_rank for copy in plan.part(0).local if copy.kind is StateKind.STEP] == [0]
    assert [copy.target_rank for copy in plan.part(0).sends if copy.kind is StateKind.STEP] == [1]


def test_weights_alone_go_to_a_target_without_an_optimizer() -> None:
    plan = Planner([VECTOR], state(Layout(), (0,), shared((0, 8))), state(Layout(), (1,))).whole()
    assert [copy.kind for copy in plan.part(1).receives] == [StateKind.WEIGHT]


def test_replicas_replace_lost_ranks() -> None:
    source, target = state(Layout(dp=3), (0, 1, 2)), state(Layout(dp=2), (2, 3))
    plan = Planner([NORM], source, target, lost=frozenset({0, 1})).whole()
    assert [part.rank for part in plan.parts] == [2, 3]
    assert pairs(plan.part(3).receives) == Counter({(2, 3): 1})


@pytest.mark.parametrize("optimizer", [None, shared((0, 5), (5, 8))], ids=["weights", "optimizer state"])
def test_elements_that_only_lost_ranks_held_are_named(optimizer: DistributedOptimizer | None) -> None:
    ranks, lost = ((0, 1), frozenset({1})) if optimizer else ((0,), frozenset({0}))
    target = None if optimizer is None else DistributedOptimizer({7: {"vector": FlatRange(0, 8)}})
    planner = Planner(
        [VECTOR], state(Layout(dp=len(ranks)), ranks, optimizer), state(Layout(), (7,), target), lost=lost
    )
    want = r"vector: no rank holds elements 5 to 8" if optimizer else r"shard 0 of \(8,\) .* all its holders are lost"
    with pytest.raises(SourceMissing, match=want):
        planner.part(7)


GAPS = {
    "a gap": ((0, 3), (4, 8)),
    "an overlap": ((0, 5), (4, 8)),
    "too late a beginning": ((1, 5), (5, 8)),
    "too early an end": ((0, 5), (5, 7)),
    "too late an end": ((0, 5), (5, 9)),
}


@pytest.mark.parametrize("name", GAPS)
def test_target_ranges_that_do_not_cover_a_shard_once_are_refused(name: str) -> None:
    source = state(Layout(dp=2), (0, 1), shared((0, 4), (4, 8)))
    target = state(Layout(dp=2), (0, 1), shared(*GAPS[name]))
    with pytest.raises(RangesRefused, match="must follow each other from 0 to 8"):
        Planner([VECTOR], source, target).part(0)


def test_target_ranges_of_one_tp_rank_alone_are_refused() -> None:
    both = DistributedOptimizer({0: {"norm": FlatRange(0, 4)}, 1: {"norm": FlatRange(0, 4)}})
    one = DistributedOptimizer({0: {"norm": FlatRange(0, 4)}})
    with pytest.raises(RangesRefused, match="norm, stage 0, tp rank 1"):
        Planner([NORM], state(Layout(tp=2), (0, 1), both), state(Layout(tp=2), (0, 1), one)).part(0)


def test_ranges_of_a_parameter_that_the_rank_does_not_train_are_refused() -> None:
    source = state(Layout(), (0,), DistributedOptimizer({0: {"vector": FlatRange(0, 8), "other": FlatRange(0, 1)}}))
    with pytest.raises(RangesRefused, match="such as other"):
        Planner([VECTOR], source, state(Layout(), (0,), shared((0, 8)))).part(0)


def test_ends_that_keep_different_state_are_refused() -> None:
    source, target = PlainOptimizer(), PlainOptimizer(step_itemsize=None)
    with pytest.raises(ValueError, match="both must keep the same"):
        Planner([VECTOR], state(Layout(), (0,), source), state(Layout(), (0,), target))
    with pytest.raises(ValueError, match="the source's keeps None"):
        Planner([VECTOR], state(Layout(), (0,)), state(Layout(), (0,), target))


def test_a_model_with_more_layers_than_the_stages_hold_is_refused() -> None:
    with pytest.raises(LayoutRefused, match=r"deep is of layer 1; the stages \(\(1,\),\) hold 1 layers"):
        Planner([replace(NORM, name="deep", place=1)], state(Layout(), (0,)), state(Layout(), (0,)))


def test_a_wrong_rank_and_two_parameters_with_one_name_are_refused() -> None:
    source, target = state(Layout(), (0,)), state(Layout(), (1,))
    with pytest.raises(ValueError, match="rank 2 is in neither layout"):
        Planner([NORM], source, target).part(2)
    with pytest.raises(LayoutRefused, match=r"ranks \[1\] are lost, and the target layout has them"):
        Planner([NORM], source, target, lost=frozenset({1}))
    with pytest.raises(ValueError, match="have the same name"):
        Planner([NORM, NORM], source, target)


def test_optimizers_that_cannot_be_described_are_refused_by_name() -> None:
    require_supported(["DistributedOptimizer", "FP32Optimizer", "Float16OptimizerWithFloat16Params"])
    for name in ("LayerWiseDistributedOptimizer", "HybridDeviceOptimizer", "Shampoo"):
        with pytest.raises(OptimizerRefused, match=f"optimizer {name} cannot change its layout"):
            require_supported(["DistributedOptimizer", name])


def test_the_cutter_makes_ranges_that_cover_every_shard() -> None:
    """The planner checks the tests' own ranges only as targets, so this test checks them too."""
    parameters = gpt_parameters(SHAPE)
    mesh = Mesh(Layout(tp=2, dp=3), tuple(range(6)), even_chunks(4, pp=1))
    shares = cutter.shares(mesh, parameters, per_bucket=3)
    for parameter in parameters:
        for tp_rank in range(2):
            size = cutter.cut(
                parameter, cutter.whole_tensors([parameter])[parameter.name, StateKind.WEIGHT], 2, tp_rank
            )
            owned = [shares[rank].get(parameter.name, FlatRange(0, 0)) for rank in mesh.holders(0, tp=tp_rank, ep=None)]
            assert sum(share.end - share.start for share in owned) == size.size
