"""Which device a slot has, and how much of it."""

from __future__ import annotations

import re

import pytest

from tidegate.device_slots import CONTEXT_BYTES, SlotDevice, memory_fraction, num_devices, slot_device
from tidegate.types import GpuId, NodeId, gpu_id

GIB = 2**30


def test_every_slot_has_a_device_of_its_own_by_default() -> None:
    devices = [slot_device(gpu_id(NodeId("n0"), index), kind="cuda", slots_per_gpu=1) for index in range(4)]

    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert len({device.name for device in devices}) == 4


@pytest.mark.parametrize(
    ("num_slots", "slots_per_gpu", "want"),
    [
        (8, 8, [0, 0, 0, 0, 0, 0, 0, 0]),
        (8, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (5, 2, [0, 0, 1, 1, 2]),
        (3, 8, [0, 0, 0]),
    ],
    ids=["all on one", "four on each", "the last one has fewer", "fewer slots than a device has room for"],
)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_neighbours_share_a_device(kind: str, num_slots: int, slots_per_gpu: int, want: list[int]) -> None:
    slots = [gpu_id(NodeId("n0"), index) for index in range(num_slots)]
    devices = [
        slot_device(slot, kind="cuda" if kind == "cuda" else "cpu", slots_per_gpu=slots_per_gpu) for slot in slots
    ]

    assert [device.index for device in devices] == want
    assert num_devices(num_slots, slots_per_gpu=slots_per_gpu) == len({device.name for device in devices})


def test_slots_of_two_nodes_never_share_a_device() -> None:
    first, second = (slot_device(GpuId(f"{node}/0"), kind="cpu", slots_per_gpu=4) for node in ("n0", "n1"))

    assert first == SlotDevice(NodeId("n0"), "cpu", 0, 4)
    assert first.name != second.name


@pytest.mark.parametrize("total_gib", [24, 80, 141])
@pytest.mark.parametrize("num_sharing", [2, 4, 8])
def test_contexts_and_shares_fit_into_the_device(total_gib: int, num_sharing: int) -> None:
    total_bytes = total_gib * GIB
    fraction = memory_fraction(total_bytes, num_sharing=num_sharing)

    assert 0 < fraction < 1 / num_sharing
    assert num_sharing * (fraction * total_bytes + CONTEXT_BYTES) == pytest.approx(total_bytes)


def test_a_slot_alone_on_its_device_has_all_of_it() -> None:
    assert memory_fraction(GIB // 4, num_sharing=1) == 1.0


@pytest.mark.parametrize(("total_gib", "largest"), [(12, 5), (13, 6), (16, 7)])
def test_the_largest_number_that_fits_is_named(total_gib: int, largest: int) -> None:
    with pytest.raises(ValueError, match=f"lower it to {largest} or less"):
        memory_fraction(total_gib * GIB, num_sharing=8)
    assert memory_fraction(total_gib * GIB, num_sharing=largest) > 0


def test_a_share_that_its_contexts_fill_is_refused_with_the_largest_number_that_fits() -> None:
    want = "cluster.slots_per_gpu=8 gives each slot 1.5 GiB of a GPU of 12.0 GiB, and its CUDA contexts need 2.0 GiB"
    with pytest.raises(ValueError, match=re.escape(want)) as refusal:
        memory_fraction(12 * GIB, num_sharing=8)

    assert str(refusal.value).endswith("lower it to 5 or less")
    assert memory_fraction(12 * GIB, num_sharing=5) > 0
