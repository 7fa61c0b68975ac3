"""What an agent leaves for the program in its place is what that reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.node.handed import ClusterLeft, Left
from services.node.jobs import Start
from tidegate.cluster.keepers import Term
from tidegate.job import JobFolder
from tidegate.launcher.outcome import End
from tidegate.runtime.embedded import RunningServers
from tidegate.runtime.processes import ServiceEnd, ServiceSpec, Watched
from tidegate.types import JobId


@pytest.fixture
def fds() -> Iterator[list[int]]:
    found = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    for fd in found:
        os.set_inheritable(fd, True)
    yield found
    for fd in found:
        os.close(fd)


@pytest.mark.parametrize("stands_by", [True, False])
def test_what_is_read_is_what_was_left(tmp_path: Path, fds: list[int], *, stands_by: bool) -> None:
    cluster = ClusterLeft(
        Term(3, "a", "10.0.0.7", "digest", beat=5),
        RunningServers(fds[1], (4222, 11), (6379, None)),
        (fds[2], fds[3]),
        (Watched(ServiceSpec("job-one", ("/bin/true",), tmp_path / "log", env={"A": "b"}, stays=True), 12),),
        (ServiceEnd("scheduler", 13, 0, was_asked=True, restarts_in_s=None),),
        {
            JobId("one"): Start(1, JobFolder(tmp_path / "one")),
            JobId("two"): Start(2, JobFolder(tmp_path / "two"), End.FAILED, "why", has_begun=False, iteration=4),
        },
        {JobId("one"): "forkserver"},
    )
    left = Left(tmp_path, fds[0], None if stands_by else cluster)
    assert left.descriptors == (fds[0], *(() if stands_by else fds[1:]))
    assert Left.of(json.loads(json.dumps(left.to_json()))) == left
    assert not any(os.get_inheritable(fd) for fd in left.descriptors), "no child gets them"
