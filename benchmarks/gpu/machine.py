"""The facts of a machine that every result has: `python -m benchmarks.gpu.machine` prints them as one JSON object.

A process of its own asks for them, because asking opens a context on the device, which holds its memory.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import TypedDict

_TIMEOUT_S = 60.0
_DRIVER_TIMEOUT_S = 30.0
"""Shorter, so that the process that asks for the facts still says that it was nvidia-smi."""


class Facts(TypedDict):
    """`device` is None without CUDA."""

    device: str | None
    driver: str
    torch: str
    python: str


def facts(*, timeout_s: float = _TIMEOUT_S) -> Facts:
    """Asks another process. RuntimeError where torch cannot be imported, or no answer comes in time."""
    asked = _answer([sys.executable, "-m", "benchmarks.gpu.machine"], timeout_s)
    if asked.returncode:
        raise RuntimeError(f"torch does not start: {(asked.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: Facts = json.loads(asked.stdout.splitlines()[-1])
    return found


def driver() -> str:
    """The version of NVIDIA's driver, or `none`. RuntimeError where nvidia-smi does not answer in time."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    asked = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], _DRIVER_TIMEOUT_S)
    return (asked.stdout.split() or ["none"])[0] if asked.returncode == 0 else "none"


def main() -> None:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    found = Facts(device=device, driver=driver(), torch=torch.__version__, python=platform.python_version())
    print(json.dumps(found))


def _answer(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """What the command said. RuntimeError where it takes longer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)} did not answer within {timeout_s:g} s") from None


if __name__ == "__main__":
    main()
