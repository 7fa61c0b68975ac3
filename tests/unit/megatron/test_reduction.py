"""Sums have the same bits wherever the cuts between ranks are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tidegate.elastic.epoch.rendezvous import use_interface
from tidegate.megatron.reduction import RunningTree, own_sum, sum_of_squares, tree_sum

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A group of one rank."""
    use_interface("lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def wide(count: int, *, seed: int = 0) -> torch.Tensor:
    """Numbers over twelve powers of ten, so that every order of addition rounds differently."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-9, 3, (count,), generator=generator)


@pytest.mark.parametrize("num_terms", [1, 2, 4, 8, 16])
def test_terms_added_one_by_one_make_the_same_tree_as_all_at_once(num_terms: int) -> None:
    terms = [wide(100, seed=seed) for seed in range(num_terms)]
    want = tree_sum(terms)
    tree, last = RunningTree(), terms[-1].clone()
    for term in terms[:-1]:
        tree.add(term.clone())
    tree.finish(last)
    assert torch.equal(last, want)
    if num_terms > 2:
        assert not torch.equal(last, torch.stack(terms).sum(dim=0)), "these terms must distinguish trees"


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_tree_over_ranks_of_their_trees_over_shards_is_the_tree_over_all(num_ranks: int) -> None:
    shards = [wide(100, seed=seed) for seed in range(8)]
    each = 8 // num_ranks
    by_rank = [tree_sum(shards[first : first + each]) for first in range(0, 8, each)]
    assert torch.equal(tree_sum(by_rank), tree_sum(shards))


def test_an_odd_term_waits_for_the_next_level() -> None:
    assert tree_sum([torch.tensor(float(2**power)) for power in range(5)]) == 31.0


def test_one_rank_has_the_sum_already(group: dist.ProcessGroup) -> None:
    gradient = wide(64)
    assert torch.equal(own_sum(gradient, [64], group), gradient)


@pytest.mark.parametrize("cuts", [[0, 10_000], [0, 64, 9_999, 10_000], [0, *range(3, 10_000, 997), 10_000]])
def test_squares_add_up_to_the_same_bits_however_the_elements_are_cut(
    group: dist.ProcessGroup, cuts: list[int]
) -> None:
    elements = wide(10_000)
    parts = [elements[start:stop] for start, stop in pairwise(cuts)]
    assert sum_of_squares(reversed(parts), group, device=CPU) == sum_of_squares([elements], group, device=CPU)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_squares_add_up_to_the_exact_sum(group: dist.ProcessGroup, scale: float) -> None:
    elements = wide(2_000) * scale
    want = sum(Fraction(element) ** 2 for element in elements.tolist())
    got = Fraction(sum_of_squares([elements], group, device=CPU))
    assert abs(got / want - 1) < Fraction(2_000, 2**59)


SPECIAL = {
    "no elements": ([], 0.0),
    "zeros": ([0.0, 0.0], 0.0),
    "one not a number": ([1.0, math.nan], math.inf),
    "one infinite": ([1.0, -math.inf], math.inf),
    "a power of two": ([2.0, 0.0], 4.0),
    "the largest that fp32 holds": ([torch.finfo(torch.float32).max], torch.finfo(torch.float32).max ** 2),
}


@pytest.mark.parametrize(("elements", "want"), SPECIAL.values(), ids=SPECIAL)
def test_squares_of_special_elements_have_the_expected_sums(
    group: dist.ProcessGroup, elements: list[float], want: float
) -> None:
    assert sum_of_squares([torch.tensor(elements, dtype=torch.float32)], group, device=CPU) == want
