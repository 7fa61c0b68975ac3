"""The driver's own servers leave nothing on the machine."""

from __future__ import annotations

import os
from pathlib import Path

from tests.chaos.stores import opened, remove_fake_time_files


def test_the_files_of_libfaketime_go_with_the_processes_that_made_them(tmp_path: Path) -> None:
    names = ["faketime_shm_7", "sem.faketime_sem_7", "faketime_shm_71", "sem.faketime_sem_71"]
    for name in names:
        (tmp_path / name).touch()
    remove_fake_time_files({7, 8}, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])


async def test_killed_servers_leave_no_files_of_libfaketime_in_shared_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as stores:
        await stores.kill(["valkey"])
        await stores.come_back()
        pids = set(stores.pids)
    assert len(pids) == 2
    left = os.listdir("/dev/shm")
    names = {f"{kind}_{pid}" for pid in pids for kind in ("faketime_shm", "sem.faketime_sem")}
    assert names.isdisjoint(left)
