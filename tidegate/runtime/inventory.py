"""What this machine has, for the machines that share jobs with it and for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil

from tidegate.machines import boot_id, versions
from tidegate.runtime.cores import num_cores
from tidegate.runtime.cuda import CudaDevice
from tidegate.runtime.interfaces import addresses_here
from tidegate.v1 import machine_pb2


def this_machine(host_memory_root: Path, devices: Sequence[CudaDevice] = ()) -> machine_pb2.GetMachineResponse:
    """`devices`: those that it lends. OSError where there is no such folder."""
    memory, host_memory = psutil.virtual_memory(), os.statvfs(host_memory_root)
    block = host_memory.f_frsize
    return machine_pb2.GetMachineResponse(
        versions=versions(),
        user=os.getuid(),
        addresses=addresses_here(),
        hostname=platform.node(),
        num_cores=num_cores(),
        memory=machine_pb2.Memory(total_bytes=memory.total, available_bytes=memory.available),
        host_memory=machine_pb2.Memory(
            total_bytes=host_memory.f_blocks * block, available_bytes=host_memory.f_bavail * block
        ),
        host_memory_root=str(host_memory_root),
        host_memory_id=host_memory_id(host_memory_root),
        cuda_devices=[machine_pb2.CudaDevice(name=each.name, total_bytes=each.total_bytes) for each in devices],
    )


def host_memory_id(folder: Path) -> str:
    """Names one folder on one machine, until that starts again. Containers have a host memory each. OSError."""
    there = folder.stat()
    return f"{boot_id()}/{there.st_dev}/{there.st_ino}"
