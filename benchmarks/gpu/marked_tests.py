"""The tests marked `gpu`, in one run of pytest. Its report of each test is the part's log."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.report import PartReport, Skipped

SELECTION = ("tests/gpu", "-m", "gpu")
"""One folder alone: pytest imports all that it collects, and other tests import packages that the wheels lack."""
_NEEDED = ("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis")


def measure(device: str, report: PartReport) -> None:
    if device == "cpu":
        raise Skipped("these tests need CUDA; `make test` runs the others")
    run_tests(SELECTION, report)


def run_tests(selection: tuple[str, ...], report: PartReport) -> None:
    """Run the tests that pytest's arguments select. RuntimeError where one fails, Skipped where pytest is missing."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise Skipped(f"{', '.join(missing)} are not installed: take the wheels of `make wheels`")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", *selection, f"--junitxml={found}", "-p", "no:cacheprovider"]
        status = subprocess.run(command, check=False).returncode
        cases = list(ElementTree.parse(found).iter("testcase")) if found.exists() else []
    named = {
        outcome: [str(case.get("name")) for case in cases if case.find(outcome) is not None]
        for outcome in ("failure", "error", "skipped")
    }
    failed = [*named["failure"], *named["error"]]
    report.note({"num_passed": len(cases) - len(failed) - len(named["skipped"]), "num_failed": len(failed)})
    report.note({"num_skipped": len(named["skipped"]), "failed": failed, "skipped": named["skipped"]})
    if status:
        raise RuntimeError(f"pytest ended with {status}, failed tests: {', '.join(failed) or 'none'}")
