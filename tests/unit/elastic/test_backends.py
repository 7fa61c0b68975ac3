"""Which backend a world has, by the devices of its ranks."""

from __future__ import annotations

import pytest

from tidegate.elastic.epoch.backends import Backend, backend_of


@pytest.mark.parametrize(
    ("device_type", "devices", "want"),
    [
        ("cuda", ["GPU-a", "GPU-b", "GPU-c"], Backend.NCCL),
        ("cuda", ["GPU-a"], Backend.NCCL),
        ("cuda", ["GPU-a", "GPU-a"], Backend.STAGED),
        ("cuda", ["GPU-a", "GPU-b", "GPU-a"], Backend.STAGED),
        ("cpu", ["member 0", "member 1"], Backend.GLOO),
        ("cpu", ["n0/cpu:0"], Backend.GLOO),
        ("cpu", ["n0/cpu:0", "n0/cpu:0", "n0/cpu:1", "n0/cpu:1"], Backend.STAGED),
    ],
    ids=[
        "GPUs of their own",
        "one rank alone",
        "one GPU",
        "one shared GPU among several",
        "CPUs",
        "one rank alone on a CPU",
        "shared slots on CPUs",
    ],
)
def test_only_ranks_that_share_a_device_exchange_through_host_memory(
    device_type: str, devices: list[str], want: Backend
) -> None:
    assert backend_of(device_type, devices) is want
