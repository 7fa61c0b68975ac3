"""GPUs by name: the peaks that the laws of the physics divide by."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from simulator.assumptions import Source
from tidegate.config.base import Section

Rate = Annotated[float, Field(ge=1e6, le=1e18)]
"""Bytes or operations, or these a second: a slower or smaller part would not end or hold anything."""
_SHEET = Source("P: the data sheet of the GPU that physics.hardware names")


class GpuName(StrEnum):
    H100 = "H100"
    H200 = "H200"
    H20 = "H20"
    H800 = "H800"


class GpuSection(Section):
    """One GPU and its links. The defaults are an H100 SXM. Rates of links are those of one direction."""

    memory_bytes: Annotated[Rate, _SHEET] = 80e9
    memory_bytes_per_s: Annotated[Rate, _SHEET] = 3.35e12
    flops_per_s: Annotated[Rate, Source("P: the data sheet: dense bf16")] = 989e12
    nvlink_bytes_per_s: Annotated[Rate, _SHEET] = 450e9
    network_bytes_per_s: Annotated[Rate, Source("A: one 400 Gb/s port a GPU, as in DGX nodes")] = 50e9
    gpus_per_node: Annotated[int, Field(ge=1, le=1024), Source("P: GPUs that NVLink joins")] = 8


GPUS = {
    GpuName.H100: GpuSection(),
    GpuName.H200: GpuSection(memory_bytes=141e9, memory_bytes_per_s=4.8e12),
    GpuName.H20: GpuSection(memory_bytes=96e9, memory_bytes_per_s=4.0e12, flops_per_s=148e12),
    GpuName.H800: GpuSection(nvlink_bytes_per_s=200e9),
}
