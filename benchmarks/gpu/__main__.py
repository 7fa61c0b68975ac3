"""`make gpu`: runs the parts on this machine's CUDA device. Exits with 1 if a part failed, with 2 if none could run."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import Part, chosen, parts

_ON_CPU = Path("build/gpu")
"""The folder of results of tiny sizes on a CPU. Git ignores it: they are no measurements."""

_TRY_ON_CPU = "DEVICE=cpu tries the parts at a tiny size"


def main() -> int:
    options = _options()
    try:
        to_run = chosen(parts(options.device), options.part)
    except ValueError as error:
        return _refuse(str(error))
    if options.dry_run:
        for part in to_run:
            print(f"{part.name:10} at most {part.limit_s:4.0f} s  {part.about}")
        return 0
    if options.device == "cuda" and not _driver_has_device():
        return _refuse(f"NVIDIA's driver shows no device here; {_TRY_ON_CPU}")
    return 0 if options.check else _run(to_run, options)


def _run(to_run: Sequence[Part], options: argparse.Namespace) -> int:
    device = options.device
    # Import only now: a dry run and a check need no installed package.
    from benchmarks.gpu.machine import facts
    from benchmarks.gpu.runner import run_parts, table
    from benchmarks.report import RESULTS, commit

    try:
        machine = facts()
    except RuntimeError as error:
        return _refuse(str(error))
    if device == "cuda" and machine["device"] is None:
        return _refuse(f"torch {machine['torch']} sees no CUDA device; {_TRY_ON_CPU}")
    folder = options.results or (RESULTS / "gpu" if device == "cuda" else _ON_CPU)
    # Forked ranks ask whether there is CUDA: by NVML, for a context cannot be forked.
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    results = run_parts(
        to_run,
        folder=folder,
        facts=machine,
        commit=options.commit or commit(),
        say=lambda line: print(f"gpu: {line}", flush=True),
    )
    print(table(results))
    print(f"gpu: results are in {folder}")
    return int(any(result.is_bad for result in results))


def _driver_has_device() -> bool:
    """Asks the driver's library, which torch loads too. It opens no context, and needs no package."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    num_devices = ctypes.c_int(0)
    return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(num_devices)) == 0 and num_devices.value > 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="What Tidegate does on a CUDA device."
    )
    parser.add_argument("--part", metavar="NAME", help="run one part")
    parser.add_argument("--dry-run", action="store_true", help="list the parts with their limits")
    parser.add_argument("--check", action="store_true", help="refuse what cannot run here, and run nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the parts at a tiny size")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where to write the results")
    parser.add_argument("--commit", metavar="HASH", help="the commit of a copy that has no repository")
    return parser.parse_args()


def _refuse(why: str) -> int:
    print(f"gpu: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
