"""Whose folders an agent removes at its start."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path

from services.node.job_memories import MARK, JobMemories
from tidegate.launcher.lock import LOCK, held

HERE, ELSEWHERE = "10.0.0.7:7400", "10.0.0.7:7401"


def folder(root: Path, name: str) -> Path:
    return root / f"tidegate-{os.getuid()}-{name}"


def names_in(root: Path) -> set[str]:
    return {path.name[-2:] for path in root.iterdir()}


def begun(root: Path, listens: str) -> JobMemories:
    memories = JobMemories(root)
    if listens:
        memories.begin(listens)
        memories.finish()
    return memories


async def made(root: Path, name: str, listens: str) -> AsyncExitStack:
    """A folder that an agent has until the stack is closed. One that was killed never does that."""
    stack = AsyncExitStack()
    await stack.enter_async_context(begun(root, listens).of_job(folder(root, name), {}))
    return stack


async def test_the_folders_of_a_killed_agent_go_and_those_of_another_agent_stay(tmp_path: Path) -> None:
    async with AsyncExitStack() as all_of_them:
        for name, listens in (("a1", HERE), ("b2", ELSEWHERE), ("c3", "")):
            await all_of_them.enter_async_context(await made(tmp_path, name, listens))
        again = JobMemories(tmp_path)
        async with again.of_job(folder(tmp_path, "d4"), {}):
            again.begin(HERE)
            again.finish()
            assert names_in(tmp_path) == {"b2", "c3", "d4"}
        again.finish()
        assert names_in(tmp_path) == {"b2", "c3"}


async def test_a_folder_of_another_network_stays(tmp_path: Path) -> None:
    async with await made(tmp_path, "a1", HERE):
        mark = folder(tmp_path, "a1") / MARK
        address, _, network = mark.read_text().partition(" ")
        mark.write_text(f"{address} {int(network) + 1}")
        begun(tmp_path, HERE)
        assert mark.exists()


def test_the_folder_of_a_killed_launcher_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    for name in ("a1", "b2"):
        folder(tmp_path, name).mkdir()
        (folder(tmp_path, name) / LOCK).touch()
        os.utime(folder(tmp_path, name) / LOCK, (0, 0))
    with held(folder(tmp_path, "b2") / LOCK, ValueError):
        begun(tmp_path, HERE)
        assert names_in(tmp_path) == {"b2"}
