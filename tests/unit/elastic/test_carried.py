"""The announcement of carried gradients survives the wire."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from tidegate.elastic.model.memory import OwnArena, Place
from tidegate.elastic.state.carried import Announcement, CarriedGradients, decode, encode


def test_decoded_sums_and_places_equal_the_encoded() -> None:
    announcement = Announcement((1 / 3, -0.0, math.inf), {"p": Place("/dev/shm/x", 64, 7, torch.float32)})

    assert decode(encode(announcement)) == announcement
    (nan,) = decode(encode(Announcement((math.nan,)))).sums
    assert math.isnan(nan)


@pytest.mark.parametrize("payload", [b"", b"[[1.0]]", b'[["a"],{}]', b'[[1.0],{"p":["x",0,1]}]'])
def test_a_malformed_announcement_is_refused(payload: bytes) -> None:
    with pytest.raises(ValidationError):
        decode(payload)


def test_discarded_gradients_have_no_memory() -> None:
    arena = OwnArena(torch.device("cpu"))
    carried = CarriedGradients(arena, {"p": arena.empty(8, torch.float32)})

    carried.discard()

    assert carried.gradients["p"].untyped_storage().nbytes() == 0
