"""The first part: what is on this machine, how fast it copies, and what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.copies import copy_rates
from benchmarks.gpu.machine import driver
from benchmarks.gpu.report import PartReport

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
_OPTIONAL = ("transformers", "transformer_engine", "apex", "sglang", "triton")
"""Packages that change what can be tried, or how fast it is."""


def measure(device: str, report: PartReport) -> None:
    report.note(copy_rates(torch.device(device), size_bytes=_COPY_BYTES[device]))
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        report.note({"free_bytes": free_bytes, "total_bytes": total_bytes, "capability": capability})
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call] # torch's is not annotated
        report.note({"num_devices": torch.cuda.device_count(), "nccl": ".".join(map(str, nccl))})
    report.note({"driver": driver(), "num_cores": len(os.sched_getaffinity(0))})
    report.note({"packages": {name: _version(name) for name in _OPTIONAL}})
    missing = _missing()
    report.note({"missing": missing})
    for line in missing:
        print(line)


def _missing() -> list[str]:
    """What `tidegate doctor` finds bad or warns of. It exits with 1 where something is bad."""
    command = [sys.executable, "-m", "cli", "doctor", "-o", "json"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    findings = json.loads(answer.stdout)
    return [f"{each['check']}: {each['found']}; {each['remedy']}" for each in findings if each["health"] != "ok"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
