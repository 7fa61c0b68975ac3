"""Whatever the model, the two layouts and their ranks: a plan brings everything to its place, once, and no more.

Up to 16 virtual ranks. The arrays are cut by `tests.unit.elastic.cutter`, which knows nothing of the planner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.elastic import cutter
from tests.unit.elastic.message_simulation import carry_out
from tidegate.elastic.plan.buckets import schedule
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import (
    ADAM,
    DistributedOptimizer,
    Optimizer,
    PlainOptimizer,
    StateKind,
    StateTensor,
)
from tidegate.elastic.plan.parameters import Parameter, Whole
from tidegate.elastic.plan.plan import Plan
from tidegate.elastic.plan.planner import Planner, RankTraffic
from tidegate.types import Layout

NUM_RANKS = 16
NUM_EXPERTS = 4
LAYOUTS = tuple(
    Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    for tp, pp, dp, cp, ep in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 8), (1, 2), (1, 2, 4))
    if tp * pp * dp * cp <= NUM_RANKS and dp * cp % ep == 0
)
OPTIMIZERS = ("none", "plain", "distributed")


@dataclass(frozen=True)
class Resize:
    """What a reshard starts from and is to arrive at."""

    parameters: tuple[Parameter, ...]
    source: State
    target: State
    hosts: dict[int, str]

    def planner(self) -> Planner:
        return Planner(self.parameters, self.source, self.target, hosts=self.hosts)

    def back(self) -> Planner:
        return Planner(self.parameters, self.target, self.source, hosts=self.hosts)

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.source.mesh.ranks, *self.target.mesh.ranks})


@st.composite
def models(draw: st.DrawFn) -> tuple[Parameter, ...]:
    """Every size divides by every tp; a layer's expert count by every ep. One layer is frozen now and then."""
    shape = GptShape(
        num_layers=draw(st.integers(1, 4)),
        hidden_size=draw(st.sampled_from((1, 3, 4))),
        ffn_hidden_size=12,
        num_heads=draw(st.sampled_from((12, 24))),
        num_kv_heads=12,
        head_dim=1,
        vocab_size=draw(st.integers(5, 24)),
        padded_vocab_size=24,
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_experts=draw(st.sampled_from((None, NUM_EXPERTS))),
        sequence_parallel=draw(st.booleans()),
    )
    frozen = draw(st.integers(0, 2 * shape.num_layers))
    return tuple(replace(parameter, trainable=parameter.place != frozen) for parameter in gpt_parameters(shape))


@st.composite
def meshes(draw: st.DrawFn, num_layers: int, among: Sequence[int]) -> Mesh:
    """Any layout that fits on the ranks, in any order, with stages of any sizes."""
    layout = draw(st.sampled_from([layout for layout in LAYOUTS if layout.num_ranks <= len(among)]))
    ranks = tuple(draw(st.permutations(among)))[: layout.num_ranks]
    num_chunks = draw(st.sampled_from((1, 2))) if layout.pp > 1 else 1
    num_cells = num_chunks * layout.pp
    bounds = sorted(draw(st.lists(st.integers(0, num_layers), min_size=num_cells - 1, max_size=num_cells - 1)))
    sizes = [high - low for low, high in zip([0, *bounds], [*bounds, num_layers], strict=True)]
    chunks = tuple(tuple(sizes[v * layout.pp : (v + 1) * layout.pp]) for v in range(num_chunks))
    return Mesh(replace(layout, vpp=num_chunks), ranks, chunks)


@st.composite
def resizes(draw: st.DrawFn, optimizers: Sequence[str] = OPTIMIZERS) -> Resize:
    parameters = draw(models())
    num_layers = 1 + max(parameter.place for parameter in parameters if isinstance(parameter.place, int))
    source = draw(meshes(num_layers, range(NUM_RANKS)))
    apart = [rank for rank in range(NUM_RANKS) if rank not in source.ranks]
    is_disjoint: bool = draw(st.booleans())
    target = draw(meshes(num_layers, apart if apart and is_disjoint else range(NUM_RANKS)))
    states = draw(st.sampled_from((ADAM, (StateTensor(StateKind.EXP_AVG, 2), StateTensor(StateKind.EXP_AVG_SQ, 4)))))
    step = draw(st.sampled_from((4, None)))
    first = draw(st.sampled_from(optimizers))
    second = "none" if first == "none" else draw(st.sampled_from(optimizers))

    def state(mesh: Mesh, kind: str) -> State:
        optimizer: Optimizer | None = None
        if kind == "plain":
            optimizer = PlainOptimizer(states, step)
        elif kind == "distributed":
            per_bucket = draw(st.sampled_from((1, 3, 100)))
            optimizer = DistributedOptimizer(cutter.shares(mesh, parameters, per_bucket=per_bucket), states, step)
        return State(mesh, optimizer)

    per_host = draw(st.sampled_from((1, 4, 6, NUM_RANKS)))
    hosts = {rank: f"host-{rank // per_host}" for rank in range(NUM_RANKS)}
    return Resize(parameters, state(source, first), state(target, second), hosts)


@settings(max_examples=examples(100))
@given(resizes())
def test_applied_to_arrays_a_plan_gives_exactly_the_targets_shards(resize: Resize) -> None:
    whole = cutter.whole_tensors(resize.parameters)
    source = cutter.world(resize.source, resize.parameters, whole)
    want = cutter.world(resize.target, resize.parameters, whole)
    got = cutter.empty_like(want)
    cutter.apply(resize.planner().whole(), source, got)
    cutter.assert_same(got, want)


@settings(max_examples=examples(50))
@given(resizes(optimizers=("plain", "distributed")))
def test_a_plan_and_the_plan_back_are_the_identity(resize: Resize) -> None:
    source = cutter.world(resize.source, resize.parameters, cutter.whole_tensors(resize.parameters))
    there = cutter.empty_like(cutter.world(resize.target, resize.parameters, cutter.whole_tensors(resize.parameters)))
    again = cutter.empty_like(source)
    cutter.apply(resize.planner().whole(), source, there)
    cutter.apply(resize.back().whole(), there, again)
    cutter.assert_same(again, source)


@settings(max_examples=examples(45))
@given(resizes())
def test_a_rank_alone_plans_exactly_its_part_of_the_whole(resize: Resize) -> None:
    whole = resize.planner().whole()
    assert [part.rank for part in whole.parts] == resize.ranks
    for part in whole.parts:
        assert resize.planner().part(part.rank) == part


@settings(max_examples=examples(45))
@given(resizes())
def test_the_bytes_of_each_rank_are_those_of_its_part(resize: Resize) -> None:
    want = {part.rank: RankTraffic(part.sent_bytes, part.received_bytes) for part in resize.planner().whole().parts}
    assert resize.planner().bytes_by_rank() == want


@settings(max_examples=examples(50))
@given(resizes())
def test_a_rank_receives_exactly_the_regions_that_it_lacks(resize: Resize) -> None:
    whole = cutter.whole_tensors(resize.parameters)
    source = cutter.world(resize.source, resize.parameters, whole)
    target = cutter.world(resize.target, resize.parameters, whole)
    for part in resize.planner().whole().parts:
        itemsizes = {(holding.name, holding.kind): holding.itemsize for holding in part.target_holdings}
        held = source.get(part.rank, {})
        want = 0
        for key, flat in target.get(part.rank, {}).items():
            missing = np.setdiff1d(flat, held.get(key, np.array([], np.int64)))
            want += int((missing != cutter.PADDING).sum()) * itemsizes.get(key, 0)
        assert part.received_bytes == want


@settings(max_examples=examples(50))
@given(resizes())
def test_the_holders_of_a_shard_serve_numbers_of_regions_that_differ_by_at_most_one(resize: Resize) -> None:
    """On one host, of the weights of one shape and cut, between the same stages and experts' ranks."""
    plan = replace(resize, hosts={}).planner().whole()
    holders: dict[tuple[object, ...], list[int]] = {}
    served: defaultdict[tuple[object, ...], Counter[int]] = defaultdict(Counter)
    classes = {parameter.name: parameter for parameter in resize.parameters}
    sent = {
        (copy.name, copy.source_rank, copy.target_rank)
        for part in plan.parts
        for copy in part.sends
        if copy.kind is StateKind.WEIGHT
    }
    for name, source, target in sorted(sent):
        parameter = classes[name]
        homes = list(cutter.homes(resize.source.mesh, parameter))
        wanting = tuple(sorted(rank for rank, _, _ in cutter.homes(resize.target.mesh, parameter)))
        tp_rank = next(tp_rank for rank, tp_rank, _ in homes if rank == source)
        same = [rank for rank, tp, _ in homes if isinstance(parameter.cut, Whole) or tp == tp_rank]
        key: tuple[object, ...] = (parameter.shape, parameter.cut, tuple(sorted(same)), wanting)
        holders[key] = same
        served[key][source] += 1
        assert target in wanting
    for key, counts in served.items():
        numbers = [counts[rank] for rank in holders[key]]
        assert max(numbers) - min(numbers) <= 1


@settings(max_examples=examples(50))
@given(resizes())
def test_far_ranks_serve_only_what_nobody_on_the_host_holds(resize: Resize) -> None:
    whole = cutter.whole_tensors(resize.parameters)
    source = cutter.world(resize.source, resize.parameters, whole)
    for part in resize.planner().whole().parts:
        host = resize.hosts[part.rank]
        neighbours = [tensors for rank, tensors in source.items() if resize.hosts[rank] == host]
        for copy in part.receives:
            if resize.hosts[copy.source_rank] == host:
                continue
            key = (copy.name, copy.kind)
            taken = cutter.view(source[copy.source_rank][key], copy.source_offset, copy.source_stride, copy)
            near = [tensors[key] for tensors in neighbours if key in tensors]
            assert not np.isin(taken, np.concatenate([*near, np.array([cutter.PADDING])])).any()


@settings(max_examples=examples(50))
@given(resizes(), st.sampled_from((16, 100, 4096)), st.booleans())
def test_no_order_deadlocks_and_buckets_carry_everything_within_the_memory(
    resize: Resize, memory_bytes: int, is_blocking: bool
) -> None:
    plan: Plan = resize.planner().whole()
    whole = cutter.whole_tensors(resize.parameters)
    source = cutter.world(resize.source, resize.parameters, whole)
    want = cutter.world(resize.target, resize.parameters, whole)
    got = cutter.empty_like(want)
    for part in plan.parts:
        cutter.carry(part.local, source, got)
    batches = {
        part.rank: schedule(part, ranks=resize.ranks, memory_bytes=memory_bytes, hosts=resize.hosts)
        for part in plan.parts
    }
    for rank_batches in batches.values():
        assert all(sum(bucket.size_bytes for bucket in batch) <= memory_bytes for batch in rank_batches)
    if is_blocking:
        batches = {rank: tuple((b,) for batch in of for b in batch) for rank, of in batches.items()}
    carry_out(batches, source, got)
    cutter.assert_same(got, want)
