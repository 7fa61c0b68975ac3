"""A joint step succeeds on all members or fails on all."""

from __future__ import annotations

import pytest

from tests.unit.elastic.fake_world import FakeWorld
from tidegate.elastic.epoch.joint_step import MemberFailed, run_on_all


def failing() -> bytes:
    raise MemoryError("no room")


def test_a_step_returns_each_member_s_result() -> None:
    world = FakeWorld(1, lambda payload: {2: b"+two"})

    assert run_on_all(world.as_world(), lambda: b"one") == {1: b"one", 2: b"two"}


def test_a_failure_of_one_member_fails_all_and_is_sent_before_it_is_raised() -> None:
    first = FakeWorld(1, lambda payload: {2: b"+two"})
    with pytest.raises(MemoryError, match="no room"):
        run_on_all(first.as_world(), failing)
    (failure,) = first.sent

    second = FakeWorld(2, lambda payload: {1: failure})
    with pytest.raises(MemberFailed, match=r"\{1: 'MemoryError: no room'\}"):
        run_on_all(second.as_world(), lambda: b"two")
