"""The copies between processes of one device. A fake stands for CUDA's handles: here both ends are one process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tidegate.elastic.carry.device_memory import DeviceMemory
from tidegate.elastic.carry.transport import NO_STAND_INS, StandIns, TransferFailed
from tidegate.elastic.model.tensors import Tensors
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Holding, Part, RegionCopy
from tidegate.elastic.plan.regions import Block

WEIGHT = ("p", StateKind.WEIGHT)


class Otherwise:
    """Notes that it was used."""

    def __init__(self) -> None:
        self.num_runs = 0

    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        self.num_runs += 1


@pytest.fixture(autouse=True)
def handles(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, torch.UntypedStorage]:
    shared: dict[bytes, torch.UntypedStorage] = {}

    def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        handle = b"\xff handle %d" % len(shared)
        shared[handle] = storage
        return 0, handle, storage.nbytes(), 0, b"counter", 7, b"event", False

    def mapped(device: int, handle: bytes, *rest: Any) -> torch.UntypedStorage:
        assert (device, rest) == (0, (shared[handle].nbytes(), 0, b"counter", 7, b"event", False))
        return shared[handle]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(mapped))
    return shared


def copy_of(name: str) -> RegionCopy:
    """Four elements, from the second of rank 0's tensor to the third of rank 1's."""
    return RegionCopy(name, StateKind.WEIGHT, 4, 0, 1, 0, 1, 1, 4, 1, 8, 2, 4)


def held(name: str, num_elements: int, block: Block) -> Holding:
    return Holding(name, StateKind.WEIGHT, 4, num_elements, (block,))


def sends(*names: str) -> Part:
    holdings = tuple(held(name, 8, Block(0, 0, 1, 8, 0, 8)) for name in names)
    return Part(0, holdings, (), (), tuple(map(copy_of, names)), ())


SENDS = sends("p")
RECEIVES = Part(1, (), (held("p", 8, Block(0, 1, 1, 4, 2, 4)),), (), (), (copy_of("p"),))


def tensors() -> tuple[Tensors, Tensors]:
    """The sender's, which lie in a larger storage, and the receiver's."""
    return {WEIGHT: torch.arange(20.0)[10:18]}, {WEIGHT: torch.zeros(8)}


def test_a_rank_copies_its_regions_out_of_the_others_tensors(handles: dict[bytes, torch.UntypedStorage]) -> None:
    sources, targets = tensors()
    sender, receiver = DeviceMemory(Otherwise()), DeviceMemory(otherwise := Otherwise())
    announced = {0: sender.announce(SENDS, sources), 1: receiver.announce(RECEIVES, {})}
    receiver.settle({1: receiver.open(RECEIVES, announced), 0: sender.open(SENDS, announced)})
    receiver.run(RECEIVES, {}, targets)
    assert targets[WEIGHT].tolist() == [0, 0, 11, 12, 13, 14, 0, 0]
    assert (len(handles), otherwise.num_runs) == (1, 0)


def test_of_two_tensors_in_one_storage_the_storage_is_announced_once(
    handles: dict[bytes, torch.UntypedStorage],
) -> None:
    whole, other = torch.arange(20.0), ("q", StateKind.WEIGHT)
    announced = DeviceMemory(Otherwise()).announce(sends("p", "q"), {WEIGHT: whole[:8], other: whole[8:16]})
    assert (len(handles), len(json.loads(announced)["tensors"])) == (1, 2)


def test_with_one_rank_that_cannot_map_all_use_the_other_transport() -> None:
    sources, targets = tensors()
    receiver = DeviceMemory(otherwise := Otherwise())
    announced = {0: DeviceMemory(Otherwise()).announce(SENDS, sources)}
    assert receiver.open(RECEIVES, announced) == b""
    receiver.settle({0: b"RuntimeError: no peer access", 1: b""})
    receiver.run(RECEIVES, {}, targets)
    assert otherwise.num_runs == 1
    assert not targets[WEIGHT].any()


def test_a_rank_whose_memory_cannot_be_shared_keeps_all_from_mapping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(storage: torch.UntypedStorage) -> None:
        raise RuntimeError("this allocator shares nothing")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", refused)
    sources, targets = tensors()
    receiver = DeviceMemory(otherwise := Otherwise())
    answer = receiver.open(RECEIVES, {0: DeviceMemory(Otherwise()).announce(SENDS, sources)})
    receiver.settle({0: b"", 1: answer})
    receiver.run(RECEIVES, {}, targets)
    assert otherwise.num_runs == 1
    assert "through host memory: {1: " in caplog.text
    assert "this allocator shares nothing" in caplog.text


@pytest.mark.parametrize(
    ("payload", "want"),
    [
        (b"", "JSON"),
        (b'{"storage": []}', "Extra inputs are not permitted"),
        (b'{"storages": [], "tensors": []}', "1 tensors were not announced"),
        (
            b'{"storages": [], "tensors": [{"name": "p", "kind": "weight", "storage": 3, "offset": 0,'
            b' "num_elements": 1, "dtype": "float32"}]}',
            "IndexError",
        ),
        (
            b'{"storages": [], "tensors": [{"name": "p", "kind": "weight", "storage": -1, "offset": 0,'
            b' "num_elements": 1, "dtype": "float32"}]}',
            "greater than or equal to 0",
        ),
    ],
    ids=["nothing", "another field", "no tensors", "a storage that is not there", "a storage from the end"],
)
def test_an_announcement_that_is_none_is_answered_with_the_reason(payload: bytes, want: str) -> None:
    assert want in DeviceMemory(Otherwise()).open(RECEIVES, {0: payload}).decode()


def test_a_region_outside_its_tensor_is_refused(handles: dict[bytes, torch.UntypedStorage]) -> None:
    sources, _ = tensors()
    receiver = DeviceMemory(Otherwise())
    receiver.open(RECEIVES, {0: DeviceMemory(Otherwise()).announce(SENDS, sources)})
    with pytest.raises(TransferFailed, match="the plan does not belong to these skeletons"):
        receiver.run(RECEIVES, {}, {WEIGHT: torch.zeros(5)})
