"""A member without a part in the old layout learns of the others' reduction, or of its failure."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.elastic.fake_world import FakeWorld
from tidegate.elastic.carried_update import CarriedUpdate
from tidegate.elastic.epoch.joint_step import MemberFailed
from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.minibatch import NextTokens
from tidegate.elastic.report import Stopwatch

PORTION = NextTokens([[1, 2, 3]], 8)


def standing_by(drops: list[str], answers: Sequence[bytes]) -> CarriedUpdate:
    """Member 1 stands by. Member 2 answers in turn."""
    turns = iter(answers)
    world = FakeWorld(1, lambda payload: {2: next(turns) if payload else b""})
    cache = cast("EpochCache", SimpleNamespace(world=world.as_world()))
    return CarriedUpdate([PORTION], None, cache, drop=lambda: drops.append("dropped"))


def test_a_failed_reduction_drops_the_portions() -> None:
    drops: list[str] = []
    with pytest.raises(MemberFailed, match="2: 'ValueError: bad'"):
        standing_by(drops, [b"+", b"-ValueError: bad"]).reduce(Stopwatch())
    assert drops == ["dropped"]


def test_a_member_without_room_keeps_the_portions() -> None:
    drops: list[str] = []
    with pytest.raises(MemberFailed, match="2: 'ArenaFull: no room'"):
        standing_by(drops, [b"-ArenaFull: no room"]).reduce(Stopwatch())
    assert drops == []
