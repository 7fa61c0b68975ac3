"""A running job's switch of layout, ours and others': `python -m benchmarks.reshard [--json] [--quick] [--save]`.

A GPT in fp32 with Adam changes its layout on forked ranks of this machine. Each case runs in one tree of processes, one
side after the other:
- ours by shared memory, into kept memory and into new memory, and ours by gloo;
- ours by shared memory to a layout that was built ahead, as one that a policy foresees;
- Megatron's dist_checkpointing and torch's checkpoint, to memory and back, with new groups, model and optimizer;
- for the weights alone, Megatron's refit.
Every side's result is checked element by element. The first switch of a side is reported separately, since it plans and
makes groups and tensors; where the layout was built ahead, `first_s_over_cached` compares it with the later ones.
Medians cover the later switches. `total_over_floor` ends with the switch, which a job proves beside its first
micro-batches. `proved_over_floor` adds the proof with nothing beside it. A figure is that of its worst case. The model
has 97.5M parameters, or fewer layers if the predicted peak of memory does not fit.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import Report, arguments, publish, spread
from benchmarks.reshard_ranks import SIDES
from benchmarks.reshard_state import Width, model, num_parameters, peak_bytes
from tests.ranks import RankServer, Results, rank_server
from tidegate.types import Layout

TMPFS = Path("/dev/shm")
NUM_LAYERS = (12, 8, 4)
"""The numbers of layers to choose from. Every pp of the cases divides them."""
SHARE_OF_MEMORY = 0.8
"""The usable share of the available memory. The prediction leaves out the interpreters, 0.15 GB a rank, and the memory
of gloo."""
_TIMEOUT_S = 1800.0
_OWN_CLOCKS = ("began", "ended")

CHECKPOINTS = {"dist_checkpointing", "dcp"}
"""The sides with 3 later runs in place of 7: they take most of the time, and their spread is far below their ratio."""
CASES = (
    (Layout(dp=4), Layout(tp=2, dp=2)),
    (Layout(tp=2, dp=2), Layout(dp=8)),
    (Layout(tp=4), Layout(tp=2, pp=2)),
    (Layout(dp=2), Layout(dp=8)),
)
GOALS = {
    "speedup_vs_dist_checkpointing": ">= 20",
    "speedup_vs_dcp": ">= 20",
    "speedup_vs_mcore_refit": ">= 1",
    "over_floor_shm": "<= 1.25",
    "over_floor_gloo": "<= 1.5",
    "groups_cached_ms": "<= 20",
    "first_s_over_cached": "<= 1.5",
    "total_over_floor": "<= 2",
}


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a case's model, and its reason."""

    num_layers: int
    width: Width
    num_parameters: int
    peak_bytes: Mapping[str, int]
    remark: str


def size_of(source: Layout, target: Layout, *, is_quick: bool) -> Size:
    """The largest model that fits. If none fits, the smallest one."""
    budget = int(SHARE_OF_MEMORY * _available_bytes())
    width = Width.SMALL if is_quick else Width.USUAL
    for num_layers in NUM_LAYERS if not is_quick else NUM_LAYERS[-1:]:
        count = num_parameters(model(num_layers, width=width))
        peaks = peak_bytes(count, source, target)
        if max(peaks.values()) <= budget or num_layers == NUM_LAYERS[-1]:
            break
    remark = f"{count / 1e6:.1f}M parameters, predicted peak {max(peaks.values()) / 1e9:.1f} GB of {budget / 1e9:.1f}"
    if is_quick:
        remark += "; a small model, for a quick answer"
    elif num_layers != NUM_LAYERS[0]:
        remark += f"; with {NUM_LAYERS[0]} layers the peak would not fit"
    return Size(num_layers, width, count, peaks, remark)


def measure(
    server: RankServer, source: Layout, target: Layout, size: Size, num_runs: Mapping[str, int]
) -> list[Results]:
    """`num_runs`: the later runs of each side."""
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        call = {
            "source": asdict(source),
            "target": asdict(target),
            "num_layers": size.num_layers,
            "width": size.width,
            "num_runs": {side: num + 1 for side, num in num_runs.items()},
            "folder": folder,
        }
        num_ranks = max(source.num_ranks, target.num_ranks)
        return server.run("benchmarks.reshard_ranks:measure_case", num_ranks, call, timeout_s=_TIMEOUT_S)


def seconds_of(side: str, found: Sequence[Results]) -> dict[str, npt.NDArray[np.float64]]:
    """The seconds of the slowest rank, by part and in total, for each run."""
    began, ended = (np.array([of_rank[f"{side}/{clock}"] for of_rank in found]) for clock in _OWN_CLOCKS)
    parts = {key.partition("/")[2] for of_rank in found for key in of_rank if key.startswith(f"{side}/")}
    of_part = {
        part: np.max([of_rank[f"{side}/{part}"] for of_rank in found if f"{side}/{part}" in of_rank], axis=0)
        for part in sorted(parts - set(_OWN_CLOCKS))
    }
    return {"total": ended.max(axis=0) - began.min(axis=0), **of_part}


def row_of(source: Layout, target: Layout, size: Size, found: Sequence[Results]) -> dict[str, Any]:
    """The row of a case. Its medians leave the first run out."""
    seconds = {side: seconds_of(side, found) for side in SIDES}
    median = {side: {part: float(np.median(runs[1:])) for part, runs in of.items()} for side, of in seconds.items()}
    ours, fresh = median["tidegate"], median["tidegate_fresh"]
    foreseen_first_s = float(seconds["tidegate_foreseen"]["total"][0])
    return {
        "case": f"{source} to {target}",
        "num_ranks": len(found),
        "num_parameters": size.num_parameters,
        "size": size.remark,
        "predicted_peak_bytes": dict(size.peak_bytes),
        "speedup_vs_dist_checkpointing": median["dist_checkpointing"]["total"] / ours["total"],
        "speedup_vs_dcp": median["dcp"]["total"] / ours["total"],
        "speedup_vs_mcore_refit": median["mcore_refit"]["total"] / median["tidegate_weights"]["total"],
        "over_floor_shm": fresh["transfer"] / fresh["floor"],
        "over_one_stretch_shm": fresh["transfer"] / fresh["floor_one_stretch"],
        "over_floor_gloo": median["tidegate_gloo"]["transfer"] / median["tidegate_gloo"]["floor"],
        "total_over_floor": ours["total"] / ours["floor_one_stretch"],
        "proved_over_floor": (ours["total"] + ours["proof"]) / ours["floor_one_stretch"],
        "first_s_over_cached": foreseen_first_s / median["tidegate_foreseen"]["total"],
        "first_foreseen_s": foreseen_first_s,
        "first_unforeseen_s": float(seconds["tidegate"]["total"][0]),
        "total_s": ours["total"],
        "total_fresh_s": fresh["total"],
        "groups_cached_ms": 1e3 * ours["groups"],
        "groups_first_ms": 1e3 * float(seconds["tidegate"]["groups"][0]),
        "sides": {
            side: {
                **{
                    f"{key}_s" if key != "runs" else key: value
                    for key, value in spread(of["total"][1:].tolist()).items()
                },
                "first_s": float(of["total"][0]),
                "parts_s": {part: value for part, value in median[side].items() if part != "total"},
            }
            for side, of in seconds.items()
        },
    }


def figures_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The worst case of each figure. The figure of groups is that of the case with the most ranks."""
    rows = list(rows)
    worst = {key: min if goal.startswith(">=") else max for key, goal in GOALS.items()}
    figures = {
        key: worst.get(key, max)(row[key] for row in rows)
        for key in (
            *GOALS,
            "over_one_stretch_shm",
            "proved_over_floor",
            "first_foreseen_s",
            "first_unforeseen_s",
            "total_s",
            "total_fresh_s",
            "groups_first_ms",
        )
    }
    most = max(row["num_ranks"] for row in rows)
    for key in ("groups_cached_ms", "groups_first_ms"):
        figures[key] = max(row[key] for row in rows if row["num_ranks"] == most)
    return figures


def main() -> int:
    options = arguments("A running job's switch of layout, ours and others'.")
    # torch's store warns at each wait that reaches its deadline, and members poll for a decision.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Otherwise a run that ends early would leave gigabytes in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = {side: 2 if options.quick else 3 if side in CHECKPOINTS else 7 for side in SIDES}
    rows = []
    with rank_server() as server:
        for source, target in CASES[:1] if options.quick else CASES:
            size = size_of(source, target, is_quick=options.quick)
            print(f"{source} to {target}: {size.remark}", flush=True)
            row = row_of(source, target, size, measure(server, source, target, size, runs))
            rows.append(row)
            for side, of in row["sides"].items():
                parts = " ".join(f"{part} {value:.3f}" for part, value in of["parts_s"].items())
                print(f"  {side:20} {of['median_s']:8.3f} s ({of['min_s']:.3f}-{of['max_s']:.3f}), {parts}", flush=True)
    against = (
        "dist_checkpointing (fully reshardable) and torch.distributed.checkpoint to tmpfs with groups, model and "
        "optimizer built anew, and megatron.core.resharding for the weights alone, in the same processes"
    )
    # A small model shows only latencies, so no goal applies to it.
    goals = {} if options.quick else GOALS
    return publish(Report("reshard", figures_of(rows), goals, rows, against), options)


def _available_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) << 10


if __name__ == "__main__":
    sys.exit(main())
