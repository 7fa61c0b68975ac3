"""What this machine has, for the machines that share jobs with it and for people."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from tidegate.machines import versions
from tidegate.runtime.cores import num_cores
from tidegate.runtime.interfaces import addresses_here
from tidegate.v1 import machine_pb2


def this_machine(host_memory_root: Path) -> machine_pb2.GetMachineResponse:
    """OSError where there is no such folder."""
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
    )
