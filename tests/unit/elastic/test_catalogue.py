"""Announcements travel as plain values and come back equal."""

from __future__ import annotations

import pytest
import torch

from tidegate.elastic.model.memory import Place
from tidegate.elastic.plan.optimizers import FlatRange, StateKind
from tidegate.elastic.state.catalogue import Announcement, Extent, decode, decode_all, encode, encode_all

WEIGHT, STEP = ("a.weight", StateKind.WEIGHT), ("a.weight", StateKind.STEP)
SENT = Announcement(
    "host-a",
    {"a.weight": FlatRange(0, 5)},
    {WEIGHT: Extent(8, torch.bfloat16), STEP: Extent(1, torch.float32)},
)
SHARED = Announcement(
    "host-b",
    SENT.ranges,
    SENT.tensors,
    {WEIGHT: Place("/f", 0, 8, torch.bfloat16), STEP: Place("/f", 64, 1, torch.float32)},
    Place("/f", 128, 9, torch.uint8),
    "/copies",
)


@pytest.mark.parametrize("announcement", [SENT, SHARED], ids=["tensors are sent", "tensors are in shared memory"])
def test_decoded_announcements_equal_the_encoded_ones(announcement: Announcement) -> None:
    assert decode(encode(announcement)) == announcement
    assert decode_all(encode_all({3: announcement, 1: SENT})) == {3: announcement, 1: SENT}


MALFORMED = {
    "not JSON": b"\x80\x05c__main__",
    "cut short": encode(SHARED)[:-20],
    "an unknown dtype": encode(SENT).replace(b"torch.bfloat16", b"torch.strings"),
    "a place too few": encode(SHARED).replace(b'["/f",64,1,"torch.float32"]', b"").replace(b",]", b"]"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_announcements_are_refused(name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - pydantic's, json's and our own have no common words
        decode(MALFORMED[name])
