"""Whichever process of an SGLang server ends first, no process of it remains and no shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from services.rollout.sglang import keeper
from tidegate.runtime import dies_with_parent

SHARES = """
import mmap, os, signal, subprocess, sys
held = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(held, 4096)
mapped = mmap.mmap(held, 4096)
"""
CHILD = (
    SHARES
    + """
print("up", flush=True)
signal.pause()
"""
)
SERVER = (
    SHARES
    + f"""
subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]])
signal.pause()
"""
)
OWNER = """
import os, subprocess, sys
print(subprocess.run([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), *sys.argv[2:]]).returncode)
"""

ENDS: dict[str, Callable[[list[psutil.Process]], None]] = {
    "a kill of its owner": lambda processes: processes[0].kill(),
    "SIGTERM": lambda processes: processes[1].terminate(),
    "a kill of the server": lambda processes: processes[2].kill(),
}


@pytest.mark.parametrize("how", ENDS)
def test_no_process_and_no_shared_memory_remains_after_an_end_by(how: str) -> None:
    shared = Path(f"/dev/shm/sglang_test_{os.getpid()}")
    command = [sys.executable, "-c", SERVER, str(shared)]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, keeper.__file__, dies_with_parent.__file__, *command],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    top = psutil.Process(owner.pid)
    processes = [top, *top.children(recursive=True)]
    assert len(processes) == 4, "owner, keeper, server and its child"
    ENDS[how](processes)
    status, _ = owner.communicate(timeout=30)
    assert status == ("" if how == "a kill of its owner" else "-9\n"), "the keeper ends with the server's status"
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not shared.exists()
