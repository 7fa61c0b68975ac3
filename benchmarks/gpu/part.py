"""Runs one part in this process: `python -m benchmarks.gpu.part NAME --device DEVICE REPORT`.

A part is a module of this folder with `measure(device, report)`. It takes its sizes from the device: those of a GPU, or
tiny ones on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.gpu.parts import parts
from benchmarks.gpu.report import SKIPPED_STATUS, PartReport, Skipped
from tidegate.megatron import cpu_stand_in

_MODULES = {"tests": "marked_tests"}
"""The modules that are not called as their parts."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part")
    parser.add_argument("name", choices=[part.name for part in parts("cpu")])
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    report = PartReport(options.report)
    # Before a part imports Megatron. It changes nothing where CUDA is present.
    cpu_stand_in.install()
    try:
        importlib.import_module(module_of(options.name)).measure(options.device, report)
    except Skipped as reason:
        report.skip(str(reason))
        return SKIPPED_STATUS
    return 0


def module_of(part: str) -> str:
    return f"benchmarks.gpu.{_MODULES.get(part, part)}"


if __name__ == "__main__":
    sys.exit(main())
