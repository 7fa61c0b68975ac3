"""Which backend of torch.distributed a world uses. One rule for all worlds: `backend_of`.

NCCL refuses a communicator that has two ranks on one GPU, and gloo sends from host memory only. So ranks that share a
device use gloo with copies of their tensors in host memory (`staged_group`). CPU slots that share a device do the same:
tests on CPUs run what shared GPUs run.

Invariant: all members of a world choose the same backend, since all of them read the same names of devices.
[test_staged_group: every_rank_chooses]
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch._C._distributed_c10d import Store

from tidegate.elastic.epoch.staged_group import STAGED_BACKEND, register_staged_backend


class Backend(StrEnum):
    """The values are torch's names."""

    NCCL = "nccl"
    GLOO = "gloo"
    STAGED = STAGED_BACKEND


def backend_of(device_type: str, devices: Sequence[str]) -> Backend:
    """The backend of a world whose ranks have these devices, by name.

    A world of one rank has a device of its own, whatever processes of other worlds are there.
    """
    if len(set(devices)) < len(devices):
        return Backend.STAGED
    return Backend.NCCL if device_type == "cuda" else Backend.GLOO


def agreed_backend(
    store: Store, device: torch.device, *, me: int, members: Sequence[int], slot_device: str | None
) -> Backend:
    """The backend for these members, each of which calls this. It can be used once this returns.

    `slot_device` names the device that a slot on a CPU stands for; None: it shares none. GPUs are told apart by their
    UUIDs. Raises DistStoreError, or as the store does, when a member does not come in time.
    """
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    else:
        name = f"member {me}" if slot_device is None else slot_device
    store.set(f"device/{me}", name)
    names = [value.decode() for value in store.multi_get([f"device/{member}" for member in members])]
    backend = backend_of(device.type, names)
    if backend is Backend.STAGED:
        register_staged_backend()
    return backend
