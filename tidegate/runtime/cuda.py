"""The CUDA devices of this machine, as torch finds them: `python -m tidegate.runtime.cuda` prints them as JSON.

A process of its own asks torch. Asking opens a context on the device, and a launcher that held one would take memory
from its workers. So nobody who asks has to import torch.

Ask on the machine that holds the slots: the agents of other machines tell theirs (`inventory`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass

from tidegate.config.checks.job import devices_fault
from tidegate.config.sections.job import ClusterSection

_TIMEOUT_S = 120.0


class NoCuda(LookupError):
    """This machine has no CUDA device that torch can use. The message says why."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    name: str
    total_bytes: int


def cuda_devices() -> list[CudaDevice]:
    """The devices in torch's order. NoCuda where there is none."""
    command = [sys.executable, "-m", "tidegate.runtime.cuda"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoCuda(f"torch did not say within {_TIMEOUT_S:g} s which devices there are") from error
    if asked.returncode:
        raise NoCuda(f"torch does not start: {(asked.stderr.strip().splitlines() or ['no message'])[-1]}")
    found = json.loads(asked.stdout.splitlines()[-1])
    if found["why"]:
        raise NoCuda(found["why"])
    return [CudaDevice(**device) for device in found["devices"]]


def cuda_fault(cluster: ClusterSection) -> str:
    """Why this machine cannot hold the slots of its own nodes, with the remedy. Empty where it can."""
    if cluster.device != "cuda" or len(cluster.far_nodes()) == len(cluster.nodes):
        return ""
    try:
        devices = cuda_devices()
    except NoCuda as none:
        return (
            f"cluster.device=cuda, but on this machine {none}: set cluster.device to cpu, or run it where "
            "`tidegate doctor` lists a CUDA device"
        )
    return devices_fault(cluster, len(devices)) or ""


def _ask_torch() -> list[CudaDevice]:
    try:
        import torch
    except ImportError as error:
        raise NoCuda("torch is not installed") from error
    if torch.version.cuda is None:
        raise NoCuda(f"torch {torch.__version__} is built without CUDA")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            return [CudaDevice(each.name, each.total_memory) for each in properties]
    # torch warns where the driver is too old or fails.
    why = f" ({str(caught[0].message).splitlines()[0]})" if caught else ""
    raise NoCuda(f"torch {torch.__version__} finds no CUDA device{why}")


def _main() -> None:
    try:
        found: dict[str, object] = {"devices": [asdict(device) for device in _ask_torch()], "why": ""}
    except NoCuda as none:
        found = {"devices": [], "why": str(none)}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
