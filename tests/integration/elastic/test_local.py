"""`local.run` ends with its members: no process and no folder of theirs stays."""

from __future__ import annotations

import subprocess
import sys
from tempfile import TemporaryDirectory

import pytest

SCRIPT = """
from tidegate.elastic import local

local.on_cpu()

import os
import sys
import time
from pathlib import Path

local.SHARED_MEMORY = Path(sys.argv[1])


def folders():
    return {path.name for path in local.SHARED_MEMORY.iterdir()}


def fails(world, folder):
    (folder / "left").touch()
    if world.me == 1:
        raise ValueError("the second member fails")
    time.sleep(60)


def succeeds(world, folder):
    (folder / str(world.me)).touch()


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def outcome(member):
    try:
        local.run(member, 2)
    except local.MemberFailed as error:
        return str(error)
    return "done"


for member in (succeeds, fails):
    began = time.monotonic()
    print(outcome(member))
    print(sorted(folders()), children(), time.monotonic() - began < 30)
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    """Two lines of each run. One process makes both runs, because it takes seconds to start."""
    # A folder of its own: tests in other processes have folders in shared memory too.
    with TemporaryDirectory(prefix="tidegate-test-", dir="/dev/shm") as shared_memory:
        command = [sys.executable, "-c", SCRIPT, shared_memory]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_run_leaves_no_member_and_no_folder(said: list[str]) -> None:
    assert said[:2] == ["done", "[] [] True"]


def test_one_failure_ends_the_others_and_leaves_no_folder(said: list[str]) -> None:
    error, rest = said[2:]

    assert error.startswith("member 1 ended with status 1")
    assert rest == "[] [] True"
