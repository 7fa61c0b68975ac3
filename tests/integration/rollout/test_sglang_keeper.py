"""Whichever of an SGLang server's processes ends first, none is left, nor what they had in shared memory."""

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
    "its owner is killed": lambda processes: processes[0].kill(),
    "it is told to": lambda processes: processes[1].terminate(),
    "the server is killed": lambda processes: processes[2].kill(),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_server_is_ended_with_all_that_is_its_when(how: str) -> None:
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
    told, _ = owner.communicate(timeout=30)
    assert told == ("" if how == "its owner is killed" else "-9\n"), "it ends as the server did"
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not shared.exists()
