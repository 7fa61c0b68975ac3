"""What an agent leaves for the program in its place is what that reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.node.handed import ClusterLeft, Left
from services.node.jobs import Start
from services.node.machine_left import Kept, MachineLeft
from tidegate.cluster.keepers import Term
from tidegate.job import JobFolder
from tidegate.launcher.outcome import End
from tidegate.runtime import handover
from tidegate.runtime.cuda import CudaDevice
from tidegate.runtime.embedded import RunningServers
from tidegate.runtime.processes import ServiceEnd, ServiceSpec, Watched
from tidegate.types import JobId

ROOT = Path("/jobs/.cluster")
RECORD = Path(__file__).with_name("handover_form_1.json")


@pytest.fixture
def fds() -> Iterator[list[int]]:
    found = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    for fd in found:
        os.set_inheritable(fd, True)
    yield found
    for fd in found:
        os.close(fd)


@pytest.mark.parametrize("stands_by", [True, False])
def test_what_is_read_is_what_was_left(fds: list[int], *, stands_by: bool) -> None:
    cluster = cluster_left(*fds[1:])
    left = Left(ROOT, fds[0], None if stands_by else cluster)
    assert left.descriptors == (fds[0], *(() if stands_by else fds[1:]))
    assert Left.of(json.loads(json.dumps(left.to_json()))) == left
    assert not any(os.get_inheritable(fd) for fd in left.descriptors), "no child gets them"


def test_a_state_of_another_shape_is_of_another_form() -> None:
    """Who changes what is left changes `handover.FORM` and the record too: programs of both releases meet."""
    process = Watched(ServiceSpec("actor@n0", ("/bin/true",), ROOT / "log"), 14)
    end = ServiceEnd("actor@n0", 15, -9, was_asked=False, restarts_in_s=None)
    kept = (Kept(ROOT, process, (), "actor@n0", 14), Kept(ROOT, None, (end,), "actor@n0", 15))
    machine = MachineLeft(kept, 7.5, {ROOT: "digest"}, (CudaDevice("NVIDIA H200", 150_754_820_096),))
    found = {"cluster": Left(ROOT, 3, cluster_left(4, 5, 6)).to_json(), "machine": machine.to_json()}
    assert json.loads(json.dumps(found)) == json.loads(RECORD.read_text())
    assert RECORD.stem == f"handover_form_{handover.FORM}"
    assert MachineLeft.of(json.loads(RECORD.read_text())["machine"]) == machine


def cluster_left(lock_fd: int, *listeners: int) -> ClusterLeft:
    return ClusterLeft(
        Term(3, "a", "10.0.0.7", "digest", beat=5),
        RunningServers(lock_fd, (4222, 11), (6379, None)),
        listeners,
        (Watched(ServiceSpec("job-one", ("/bin/true",), ROOT / "log", env={"A": "b"}, stays=True), 12),),
        (ServiceEnd("scheduler", 13, 0, was_asked=True, restarts_in_s=None),),
        {
            JobId("one"): Start(1, JobFolder(ROOT / "one")),
            JobId("two"): Start(2, JobFolder(ROOT / "two"), End.FAILED, "why", has_begun=False, iteration=4),
        },
        {JobId("one"): "forkserver"},
        (CudaDevice("NVIDIA H200", 150_754_820_096),),
    )
