"""Shares of a group: whole micro-batches, which a worker that gets them alone cuts into the same ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.inference.shares import HeldGroup, Share, share_of_waiting
from tests.unit.inference.deliveries import Delivered
from tests.watched_samples import ended_response, generated_group
from tidegate.megatron.batching import BatchLimits, cut
from tidegate.v1 import samples_pb2


def share_of(lengths: list[int], limits: BatchLimits) -> Share:
    """A group whose responses have so many tokens."""
    group = generated_group(0, rewards=[0.0] * len(lengths))
    for sample, length in zip(group.samples, lengths, strict=True):
        sample.response_tokens[:] = [5] * length
    held = HeldGroup(group)
    held.deliver(Delivered(group))
    return share_of_waiting(held, limits)


def micro_batches(group: samples_pb2.SampleGroup, limits: BatchLimits) -> list[list[int]]:
    """The draws of each micro-batch, as a worker cuts them."""
    lengths = [len(group.prompt_tokens) + len(sample.response_tokens) for sample in group.samples]
    return [[group.samples[index].id.draw for index in batch] for batch in cut(lengths, limits)]


LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=12)
LIMITS = st.builds(BatchLimits, max_tokens=st.sampled_from([8, 40, 64, 128, 4096]))


@given(LENGTHS, LIMITS, st.integers(1, 6))
def test_a_share_that_is_cut_again_has_the_same_micro_batches(
    lengths: list[int], limits: BatchLimits, num_pieces: int
) -> None:
    share = share_of(lengths, limits)
    want = micro_batches(share.group, limits)
    found = [batch for piece in share.split(num_pieces) for batch in micro_batches(piece.group, limits)]
    assert sorted(found) == sorted(want)


def test_a_response_with_other_tokens_is_another_response() -> None:
    group = generated_group(0)
    held = HeldGroup(group)
    assert held.add(ended_response(0, 0))
    assert not held.add(ended_response(0, 0))
    share = share_of_waiting(held, BatchLimits())
    assert held.add(ended_response(0, 0, tokens=[9]))
    (first,) = share.responses
    assert not held.has(first)
    assert share.present.batches == ()
    other_prompt = ended_response(0, 1)
    other_prompt.prompt_tokens.append(5)
    held.add(other_prompt)
    assert [each.id.draw for each in held.waiting] == [1], "the others had another prompt"


def test_a_share_ahead_is_sent_with_its_groups_place_and_its_responses_alone() -> None:
    held = HeldGroup(ended_response(0, 1))
    held.add(ended_response(0, 1))
    want = ended_response(0, 1)
    assert share_of_waiting(held, BatchLimits()).group == want


@given(LENGTHS, LIMITS, st.integers(1, 6))
def test_the_pieces_of_a_share_have_each_sample_once(lengths: list[int], limits: BatchLimits, num_pieces: int) -> None:
    share = share_of(lengths, limits)
    pieces = share.split(num_pieces)
    assert 1 <= len(pieces) <= num_pieces
    assert all(piece.batches for piece in pieces)
    assert sorted(sample.id.draw for piece in pieces for sample in piece.group.samples) == list(range(len(lengths)))
    assert sum(piece.num_tokens for piece in pieces) == share.num_tokens == sum(lengths)
