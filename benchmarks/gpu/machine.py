"""The facts of a machine that every result has: `python -m benchmarks.gpu.machine` prints them as one JSON object.

A process of its own asks for them, because asking opens a context on the device, which holds its memory.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from typing import TypedDict

_TIMEOUT_S = 60.0


class Facts(TypedDict):
    """`device` is None without CUDA."""

    device: str | None
    driver: str
    torch: str
    python: str


def facts() -> Facts:
    """Asks another process. RuntimeError where torch cannot be imported."""
    asked = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.machine"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if asked.returncode:
        raise RuntimeError(f"torch does not start: {(asked.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: Facts = json.loads(asked.stdout.splitlines()[-1])
    return found


def driver() -> str:
    """The version of NVIDIA's driver, or `none`."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return (asked.stdout.split() or ["none"])[0] if asked.returncode == 0 else "none"


def main() -> None:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    found = Facts(device=device, driver=driver(), torch=torch.__version__, python=platform.python_version())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
