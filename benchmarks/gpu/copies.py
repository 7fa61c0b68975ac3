"""The rates of plain copies on a device: what every transfer through host memory is measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_NUM_RUNS = 5


def copy_rates(device: torch.device, *, size_bytes: int) -> dict[str, float]:
    """Bytes a second, the median of five copies: from pinned host memory to the device, back, and on the device.

    A copy on the device counts its bytes once, though they are read and written.
    """
    on_device = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_device)
    on_host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return {
        "host_to_device_bytes_per_s": size_bytes / _seconds(lambda: on_device.copy_(on_host), device),
        "device_to_host_bytes_per_s": size_bytes / _seconds(lambda: on_host.copy_(on_device), device),
        "device_to_device_bytes_per_s": size_bytes / _seconds(lambda: other.copy_(on_device), device),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(copy: Callable[[], object], device: torch.device) -> float:
    copy()
    runs = []
    for _ in range(_NUM_RUNS):
        synchronize(device)
        began = time.perf_counter()
        copy()
        synchronize(device)
        runs.append(time.perf_counter() - began)
    return statistics.median(runs)
