"""The transport within a device that several processes share: each rank copies its regions straight out of the others'
tensors, by CUDA's memory handles.

Order, each step on all members before the next one:
1. `announce`: a rank makes its work on the device complete, and describes the tensors that it sends.
2. `open`: a rank maps what it receives from. A rank that cannot says so, and then all ranks use the other transport.
3. `run`.

torch keeps a sender's memory until all that mapped it have let go. A rank lets go at the end of its `run`.

Invariants:
- What one rank cannot map, no rank copies this way. [test_device_memory: one_rank_that_cannot_map]
- No object is made of what another rank announced but tensors of its description.
  [test_device_memory: an_announcement_that_is_none]
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from pydantic import Base64Bytes, BaseModel, ConfigDict, NonNegativeInt, TypeAdapter

from tidegate.elastic.carry.transport import NO_STAND_INS, StandIns, Transport, copy_regions
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Part

_LOG = logging.getLogger("tidegate.elastic")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_STRICT = ConfigDict(extra="forbid", frozen=True)


class _Storage(BaseModel):
    """What torch needs to map a storage, in its order (`UntypedStorage._new_shared_cuda`)."""

    model_config = _STRICT

    device: int
    handle: Base64Bytes
    size_bytes: int
    offset_bytes: int
    ref_counter: Base64Bytes
    ref_counter_offset: int
    event: Base64Bytes
    needs_event: bool


class _Tensor(BaseModel):
    model_config = _STRICT

    name: str
    kind: StateKind
    storage: NonNegativeInt
    offset: NonNegativeInt
    num_elements: NonNegativeInt
    dtype: str


class _Announcement(BaseModel):
    model_config = _STRICT

    storages: Sequence[_Storage] = ()
    tensors: Sequence[_Tensor] = ()
    fault: str = ""
    """Why the rank can share nothing."""


_JSON = TypeAdapter(_Announcement)


class DeviceMemory:
    """`otherwise` carries everything where a rank cannot map another one's memory."""

    def __init__(self, otherwise: Transport) -> None:
        self._otherwise = otherwise
        self._mapped: Mapping[int, Tensors] | None = None

    def announce(self, part: Part, sources: Tensors) -> bytes:
        """What this rank sends, for `open` at the others. Says so where torch cannot share it."""
        torch.cuda.synchronize()
        try:
            return self._announcement(part, sources)
        except RuntimeError as error:  # torch raises nothing more exact, for allocators that share nothing, for one
            return _JSON.dump_json(_Announcement(fault=f"it cannot share its memory: {error}"))

    def open(self, part: Part, announced: Mapping[int, bytes]) -> bytes:
        """Map what this rank receives from. Returns why it cannot; nothing where it can."""
        needed: defaultdict[int, set[TensorKey]] = defaultdict(set)
        for copy in part.receives:
            needed[copy.source_rank].add((copy.name, copy.kind))
        try:
            self._mapped = {rank: _mapped(announced[rank], keys) for rank, keys in needed.items()}
        except (RuntimeError, ValueError, LookupError) as error:
            return f"{type(error).__name__}: {error}".encode()
        return b""

    def settle(self, answers: Mapping[int, bytes]) -> None:
        """All ranks' answers of `open`."""
        reasons = {rank: answer.decode() for rank, answer in answers.items() if answer}
        if reasons:
            self._mapped = None
            _LOG.warning("ranks of one device exchange tensors through host memory: %s", reasons)

    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        if self._mapped is None:
            self._otherwise.run(part, sources, targets, stand_ins=stand_ins)
            return
        copy_regions(part.local, sources, targets)
        for copy in part.receives:
            copy_regions((copy,), self._mapped[copy.source_rank], targets)
        torch.cuda.synchronize()
        self._mapped = None

    def _announcement(self, part: Part, sources: Tensors) -> bytes:
        numbers: dict[int, int] = {}
        storages: list[_Storage] = []
        tensors: list[_Tensor] = []
        for name, kind in sorted({(copy.name, copy.kind) for copy in part.sends}):
            tensor = sources[name, kind].detach()
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(storages))
            if number == len(storages):
                storages.append(_shared(storage))
            tensors.append(
                _Tensor(
                    name=name,
                    kind=kind,
                    storage=number,
                    offset=int(tensor.storage_offset()),
                    num_elements=tensor.numel(),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                )
            )
        return _JSON.dump_json(_Announcement(storages=storages, tensors=tensors))


def _shared(storage: torch.UntypedStorage) -> _Storage:
    values = storage._share_cuda_()  # type: ignore[no-untyped-call]  # torch's method is untyped
    return _Storage.model_construct(**dict(zip(_Storage.model_fields, values, strict=True)))


def _mapped(announced: bytes, keys: set[TensorKey]) -> Tensors:
    """The announced tensors with these keys."""
    found = _JSON.validate_json(announced)
    if found.fault:
        raise ValueError(found.fault)
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[TensorKey, torch.Tensor] = {}
    for each in found.tensors:
        if (key := (each.name, each.kind)) not in keys:
            continue
        if each.storage not in storages:
            of = found.storages[each.storage]
            storages[each.storage] = torch.UntypedStorage._new_shared_cuda(
                *(getattr(of, name) for name in _Storage.model_fields)
            )
        storage, dtype = storages[each.storage], _DTYPES[each.dtype]
        flat = torch.empty(0, dtype=dtype, device=storage.device)
        tensors[key] = flat.set_(storage, each.offset, (each.num_elements,), (1,))
    if missing := keys - tensors.keys():
        raise ValueError(f"{len(missing)} tensors were not announced, {min(missing)} among them")
    return tensors
