"""A policy's memory is written under the policy's name and read by its type."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from services.scheduler.policy.rlinf import RLinfMemory
from services.scheduler.shell.codecs.memory_codec import MemoryCodec
from services.scheduler.state.remembered import PolicyMemory

CODEC = MemoryCodec({"rlinf": RLinfMemory})


@dataclass(frozen=True, slots=True)
class Foreign(PolicyMemory):
    number: int = 1


@pytest.mark.parametrize("memory", [None, RLinfMemory(is_begun=True, num_answered=3)])
def test_a_memory_comes_back_from_its_plain_form(memory: PolicyMemory | None) -> None:
    assert CODEC.decode(CODEC.encode(memory), "memory") == memory


def test_a_memory_whose_type_is_not_registered_is_not_written() -> None:
    with pytest.raises(
        ValueError, match=r"Foreign is no policy's memory \(known: rlinf\): add it to policy/registry.py"
    ):
        CODEC.encode(Foreign())


@pytest.mark.parametrize(
    ("plain", "want"),
    [
        ({"other": {}}, "memory is of the policy 'other', which this code does not know .* use the code that wrote it"),
        ({"rlinf": {"is_begun": True}}, "memory.rlinf does not hold the fields of RLinfMemory: num_answered"),
        ([], "memory must be null, or one policy's name"),
        ({}, "memory must be null, or one policy's name"),
    ],
)
def test_a_memory_that_cannot_be_read_is_refused_with_its_place(plain: object, want: str) -> None:
    with pytest.raises(ValueError, match=want):
        CODEC.decode(plain, "memory")
