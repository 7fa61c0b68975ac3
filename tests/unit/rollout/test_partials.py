"""Partials: kept until complete, never shortened, and complete where nothing is left to generate."""

from __future__ import annotations

import pytest

from services.rollout.partials import Partials, finish_of
from tidegate.types import SampleId
from tidegate.v1 import samples_pb2

SAMPLE = SampleId(1, 0, 3, 1)
STOP, LENGTH, ABORT = (
    samples_pb2.FINISH_REASON_STOP,
    samples_pb2.FINISH_REASON_LENGTH,
    samples_pb2.FINISH_REASON_ABORT,
)


def response(*tokens: int, finish: samples_pb2.FinishReason.ValueType = ABORT) -> samples_pb2.Sample:
    return samples_pb2.Sample(response_tokens=tokens, finish=finish)


def test_a_partial_only_grows_and_is_gone_once_its_response_is_complete() -> None:
    partials = Partials()
    partials.keep(SAMPLE, response())
    assert partials.figures() == {}, "nothing moved"
    assert (partials.of(SAMPLE), partials.num_moves) == (None, 0)
    partials.keep(SAMPLE, response(1, 2, 3))
    partials.keep(SAMPLE, response(1, 2))
    assert partials.of(SAMPLE) == response(1, 2, 3)
    assert (partials.num_tokens(SAMPLE), partials.num_moves, partials.num_moved_tokens) == (3, 2, 5)
    assert partials.figures() == {"num_moves": 2.0, "num_moved_tokens": 5.0, "num_lost_tokens": 0.0}
    partials.end(SAMPLE)
    assert (partials.of(SAMPLE), partials.num_tokens(SAMPLE)) == (None, 0)


@pytest.mark.parametrize(
    ("handed_back", "want"),
    [
        pytest.param(response(1, 2), ABORT, id="some tokens"),
        pytest.param(response(), ABORT, id="no token"),
        pytest.param(response(1, 9), STOP, id="the stop token last"),
        pytest.param(response(1, 2, 3, 4), LENGTH, id="all tokens"),
        pytest.param(response(1, 9, finish=STOP), STOP, id="finished just before"),
    ],
)
def test_a_response_with_nothing_left_to_generate_is_complete(
    handed_back: samples_pb2.Sample, want: samples_pb2.FinishReason.ValueType
) -> None:
    assert finish_of(handed_back, max_new_tokens=4, end_ids=(9,)) == want
