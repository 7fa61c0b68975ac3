"""Another layout for a running job, on ranks that share the device, against torch's DCP to memory and back.

The state of a layout and that of the next one are on the device at once. The certificate is on, and every element is
checked after the first and the last switch. The first switch also plans, and makes groups and tensors.

    share of the copy rate = bytes moved between ranks / transfer seconds / rate

The rate is that of a plain copy on the device (`copies`). Ranks of one device copy out of each other's tensors where
CUDA lets them map these; elsewhere every byte goes through host memory.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.copies import copy_rates
from benchmarks.gpu.report import PartReport
from benchmarks.reshard_state import Width, model, num_parameters
from tests.ranks import RankServer, Results, rank_server
from tidegate.types import Layout

_MEMORY = Path("/dev/shm")
_TIMEOUT_S = 150.0
_OWN_CLOCKS = ("began", "ended", "moved_bytes")
_CASES = ((Layout(dp=4), Layout(tp=2, dp=2)), (Layout(tp=2, dp=4), Layout(tp=4, dp=2)))
"""On 4 and on 8 ranks. In fp32 with Adam both ends of either case take 64 bytes a parameter together."""
_STATE_BYTES = 64
_SHARE_OF_MEMORY = 0.85


@dataclass(frozen=True, slots=True)
class Size:
    width: Width
    num_layers: int
    copy_bytes: int
    num_runs: int = 2
    cases: tuple[tuple[Layout, Layout], ...] = _CASES


TINY = Size(Width.SMALL, num_layers=2, copy_bytes=1 << 20, cases=_CASES[:1])


def measure(device: str, report: PartReport) -> None:
    measure_at(size_on_gpu() if device == "cuda" else TINY, device, report)


def size_on_gpu() -> Size:
    """1.0G parameters, or fewer layers where both layouts do not fit into the free memory."""
    free_bytes, _ = torch.cuda.mem_get_info()
    for num_layers in (20, 12, 4):
        count = num_parameters(model(num_layers, width=Width.LARGE))
        if count * _STATE_BYTES <= _SHARE_OF_MEMORY * free_bytes:
            break
    return Size(Width.LARGE, num_layers, copy_bytes=1 << 30)


def measure_at(size: Size, device: str, report: PartReport) -> None:
    rates = copy_rates(torch.device(device), size_bytes=size.copy_bytes)
    report.note({"num_parameters": num_parameters(model(size.num_layers, width=size.width))})
    report.note(rates)
    # torch's store warns at each wait that reaches its deadline, and members poll for a decision.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with rank_server() as server:
        # Ours first: the other side may run into the part's limit.
        for side in ("tidegate", "dcp"):
            for source, target in size.cases:
                found = _run(server, side, source, target, size, "cuda:0" if device == "cuda" else device)
                report.note({f"{side}, {source} to {target}": _figures(found, rates)})


def _run(server: RankServer, side: str, source: Layout, target: Layout, size: Size, device: str) -> list[Results]:
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="tidegate-gpu-") as folder:
        call = {
            "side": side,
            "source": asdict(source),
            "target": asdict(target),
            "num_layers": size.num_layers,
            "width": size.width,
            "num_runs": size.num_runs,
            "device": device,
            "folder": folder,
        }
        num_ranks = max(source.num_ranks, target.num_ranks)
        return server.run("benchmarks.gpu.reshard_ranks:measure_side", num_ranks, call, timeout_s=_TIMEOUT_S)


def _figures(found: list[Results], rates: dict[str, float]) -> dict[str, Any]:
    """The seconds of the slowest rank in the last run, in total and by part. `first_s` is the total of the first."""
    totals = [
        float(max(rank["ended"][run] for rank in found) - min(rank["began"][run] for rank in found)) for run in (0, -1)
    ]
    parts = {part for rank in found for part in rank} - set(_OWN_CLOCKS)
    seconds = {part: float(max(rank[part][-1] for rank in found if part in rank)) for part in sorted(parts)}
    figures: dict[str, Any] = {"first_s": totals[0], "total_s": totals[1], "parts_s": seconds}
    moved_bytes = int(found[0]["moved_bytes"])
    if moved_bytes >= 0:
        share = moved_bytes / seconds["transfer"] / rates["device_to_device_bytes_per_s"]
        figures |= {"moved_bytes": moved_bytes, "share_of_copy_rate": share}
    return figures
