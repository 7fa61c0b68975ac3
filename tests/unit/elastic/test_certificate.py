"""The certificate accepts the result of a plan, and names the tensor and the ranks of any difference."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import pytest
import torch

from tests.unit.elastic import cutter
from tidegate.elastic.check.certificate import (
    Certificate,
    CertificateMismatch,
    RankSums,
    certify,
    decode_all,
    encode_all,
    sum_part,
)
from tidegate.elastic.check.level import Level
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.gpt import EMBEDDING, FINAL_NORM, GptShape, gpt_parameters
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import DistributedOptimizer, StateKind
from tidegate.elastic.plan.plan import Plan
from tidegate.elastic.plan.planner import Planner
from tidegate.types import Layout

PARAMETERS = gpt_parameters(
    GptShape(
        num_layers=2,
        hidden_size=4,
        ffn_hidden_size=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=1,
        vocab_size=13,
        padded_vocab_size=16,
        tied_embeddings=True,
        itemsize=4,
    )
)
WHOLE = cutter.whole_tensors(PARAMETERS)
Tensors = dict[TensorKey, torch.Tensor]


class Resharded:
    """Both ends after a transfer. A test may damage them."""

    def __init__(self, source: Layout, target: Layout, *, first_target: int = 0) -> None:
        self.source = state_of(source, 0)
        self.target = state_of(target, first_target)
        self.plan: Plan = Planner(PARAMETERS, self.source, self.target).whole()
        self.before, self.after = tensors_of(self.source), tensors_of(self.target)

    def certify(self, level: Level = Level.FULL, *, dead: frozenset[int] = frozenset()) -> Certificate:
        sums = {
            part.rank: RankSums.decode(
                sum_part(level, part, self.before.get(part.rank, {}), self.after.get(part.rank, {})).encode()
            )
            for part in self.plan.parts
            if part.rank not in dead
        }
        return certify(level, sums, self.source.mesh, self.target.mesh)


def state_of(layout: Layout, first: int) -> State:
    mesh = Mesh(layout, tuple(range(first, first + layout.num_ranks)), even_chunks(2, pp=layout.pp))
    return State(mesh, DistributedOptimizer(cutter.shares(mesh, PARAMETERS, per_bucket=3)))


def tensors_of(state: State) -> Mapping[int, Tensors]:
    held = cutter.world(state, PARAMETERS, WHOLE)
    return {rank: {key: torch.from_numpy(flat.astype("i4")) for key, flat in of.items()} for rank, of in held.items()}


SWITCHES = {
    "data to tensor parallel": (Layout(dp=4), Layout(tp=2, dp=2)),
    "to a pipeline with tied copies": (Layout(tp=2, dp=2), Layout(tp=2, pp=2)),
    "from a pipeline with tied copies and ranges": (Layout(pp=2, dp=2), Layout(tp=4)),
    "growing": (Layout(tp=2), Layout(dp=8)),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("level", Level)
def test_the_result_of_a_plan_is_certified(switch: tuple[Layout, Layout], level: Level) -> None:
    resharded = Resharded(*switch)
    got = resharded.certify(level)
    assert got.unchecked == ()
    assert got.moved_bytes == got.minimum_bytes == resharded.plan.received_bytes
    assert bool(got.digest) == (level is not Level.OFF)


def test_the_digest_is_that_of_the_logical_state_in_every_layout_and_on_all_ranks() -> None:
    want = Resharded(Layout(dp=4), Layout(tp=2, dp=2)).certify().digest
    assert Resharded(Layout(pp=2), Layout(tp=4), first_target=2).certify().digest == want
    changed = Resharded(Layout(dp=4), Layout(tp=2, dp=2))
    for tensors in (*changed.before.values(), *changed.after.values()):
        tensors[FINAL_NORM, StateKind.WEIGHT][0] += 1
    assert changed.certify().digest != want


def test_sums_travel_as_plain_integers_and_come_back_equal() -> None:
    resharded = Resharded(Layout(dp=4), Layout(tp=2, dp=2))
    sums = {
        part.rank: sum_part(Level.FULL, part, resharded.before[part.rank], resharded.after[part.rank])
        for part in resharded.plan.parts
    }

    payload = encode_all(sums)

    assert decode_all(payload) == sums
    with pytest.raises((struct.error, UnicodeDecodeError, IndexError)):
        decode_all(repr(sums).encode())


@pytest.mark.parametrize("end", ["before", "after"])
def test_a_flipped_bit_is_named_with_the_ranks_that_differ(end: str) -> None:
    resharded = Resharded(Layout(dp=2), Layout(tp=2))
    tensors = resharded.before if end == "before" else resharded.after
    tensors[1][EMBEDDING, StateKind.EXP_AVG][3] ^= 1 << 20
    with pytest.raises(CertificateMismatch, match=rf"{EMBEDDING} exp_avg: target ranks \(0, 1\) .* ranks \(0, 1\)"):
        resharded.certify()


def test_two_elements_that_changed_places_are_caught() -> None:
    resharded = Resharded(Layout(dp=2), Layout(tp=2))
    weight = resharded.after[0]["decoder.layers.1.mlp.linear_fc2.weight", StateKind.WEIGHT]
    weight[[2, 9]] = weight[[9, 2]]
    with pytest.raises(CertificateMismatch, match=r"layers\.1\.mlp\.linear_fc2\.weight weight"):
        resharded.certify()


def test_a_replica_that_differs_is_caught_before_sums_are_added_up() -> None:
    resharded = Resharded(Layout(dp=2), Layout(tp=2, dp=2))
    resharded.after[3][FINAL_NORM, StateKind.WEIGHT][0] += 1
    with pytest.raises(CertificateMismatch, match=rf"{FINAL_NORM} weight: ranks 0 and 3 hold the same 4 elements"):
        resharded.certify()


def test_a_tied_copy_that_differs_is_caught() -> None:
    resharded = Resharded(Layout(dp=2), Layout(pp=2))
    resharded.after[1][EMBEDDING, StateKind.WEIGHT][0] += 1
    with pytest.raises(CertificateMismatch, match=rf"{EMBEDDING} weight: .* and ranks \(1,\)"):
        resharded.certify()


def test_padding_is_not_certified() -> None:
    resharded = Resharded(Layout(dp=2), Layout(tp=2))
    want = resharded.certify().digest
    resharded.after[1][EMBEDDING, StateKind.WEIGHT][-1] += 1
    assert resharded.certify().digest == want


def test_at_level_new_received_regions_are_compared_with_sent_ones() -> None:
    resharded = Resharded(Layout(tp=2), Layout(tp=2, dp=2))
    copy = resharded.plan.part(2).receives[0]
    resharded.after[2][copy.name, copy.kind][copy.target_offset] += 1
    with pytest.raises(CertificateMismatch, match=rf"{copy.name} {copy.kind}: rank {copy.source_rank} sent .*rank 2"):
        resharded.certify(Level.NEW)


def test_a_dead_rank_leaves_a_tensor_unchecked_only_where_no_replica_has_it() -> None:
    resharded = Resharded(Layout(tp=2, dp=2), Layout(tp=2))
    got = resharded.certify(dead=frozenset({3}))
    assert got.unchecked
    assert all(kind is not StateKind.WEIGHT for _, kind in got.unchecked)
    resharded.after[0][EMBEDDING, StateKind.WEIGHT][0] += 1
    with pytest.raises(CertificateMismatch, match="weight"):
        resharded.certify(dead=frozenset({3}))
