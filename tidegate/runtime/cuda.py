"""Whether this machine has the CUDA devices for the slots of a job with `cluster.device: cuda`.

Ask on the machine that holds the slots. The launcher starts all nodes on its own machine, so it asks there.
"""

from __future__ import annotations

import warnings

from tidegate.config.checks.job import devices_fault
from tidegate.config.sections.job import ClusterSection


def cuda_devices() -> list[str]:
    """The names of the devices. NoCuda where there is none."""
    try:
        # Import here: torch takes a second, which a job on CPU slots must not pay for this question.
        import torch
    except ImportError as error:
        raise NoCuda("torch is not installed") from error
    if torch.version.cuda is None:
        raise NoCuda(f"torch {torch.__version__} is built without CUDA")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    # torch warns where the driver is too old or fails.
    why = f" ({str(caught[0].message).splitlines()[0]})" if caught else ""
    raise NoCuda(f"torch {torch.__version__} finds no CUDA device{why}")


def cuda_fault(cluster: ClusterSection) -> str:
    """Why this machine cannot hold the slots of the cluster, with the remedy. Empty where it can."""
    if cluster.device != "cuda":
        return ""
    try:
        names = cuda_devices()
    except NoCuda as none:
        return (
            f"cluster.device=cuda, but on this machine {none}: set cluster.device to cpu, or run it where "
            "`tidegate doctor` lists a CUDA device"
        )
    return devices_fault(cluster, len(names)) or ""


class NoCuda(LookupError):
    """This machine has no CUDA device that torch can use. The message says why."""
