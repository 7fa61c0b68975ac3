"""State is shared where its folder is in memory and it fits. Otherwise members keep it privately, with a reason."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.actor.arena_folder import choose, file_system, most_bytes
from tidegate.elastic.settings import CopyTo
from tidegate.types import Precision

CPU = torch.device("cpu")
MOUNTS = """overlay / overlay rw 0 0
tmpfs /dev tmpfs rw 0 0
shm /dev/shm tmpfs rw 0 0
/dev/sda1 /dev/shm/big\\040disk ext4 rw 0 0
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("path", "want"),
    [("/data/jobs", "overlay"), ("/dev/shm/job", "tmpfs"), ("/dev/shm/big disk/job", "ext4"), ("/dev/shmem", "tmpfs")],
)
def test_a_path_is_on_the_innermost_mount_above_it(path: str, want: str) -> None:
    assert file_system(Path(path), MOUNTS) == want


NEEDS = {
    (Precision.FP32, CopyTo.NOWHERE): 2 * (3 * 4000 + 8000),
    (Precision.FP32, CopyTo.NODE): 6 * (3 * 4000 + 8000),
    (Precision.FP32, CopyTo.PEER): 10 * (3 * 4000 + 8000),
    (Precision.BF16, CopyTo.NOWHERE): 2 * (3 * 2000 + 12000),
}


@pytest.mark.parametrize(("precision", "copies"), NEEDS)
def test_a_node_needs_room_for_two_layouts_whose_members_all_have_all_weights(
    precision: Precision, copies: CopyTo
) -> None:
    want = NEEDS[precision, copies]
    assert most_bytes(1000, num_members=3, copies=copies, precision=precision, carries=False) == want


def test_a_node_needs_room_for_carried_gradients_in_both_layouts_and_for_no_copies_of_them() -> None:
    found = most_bytes(1000, num_members=3, copies=CopyTo.NODE, precision=Precision.FP32, carries=True)
    assert found == 6 * (3 * 4000 + 8000) + 2 * 4000


def test_state_that_fits_in_memory_is_shared_there(memory: Path) -> None:
    choice = choose(memory / "state", needed_bytes=1 << 20, device=CPU)
    assert choice.folder == memory / "state"
    assert (memory / "state").is_dir()


def test_bytes_that_members_hold_already_count_as_free(memory: Path) -> None:
    room = int(choose(memory, needed_bytes=1 << 60, device=CPU).reason.split(" has ")[1].split(";")[0])
    (memory / "arena").write_bytes(b"x" * (8 << 20))
    again = int(choose(memory, needed_bytes=1 << 60, device=CPU).reason.split(" has ")[1].split(";")[0])
    assert abs(again - room) < 4 << 20, "other processes of the machine may take a little meanwhile"


def test_state_that_does_not_fit_is_not_shared(memory: Path) -> None:
    choice = choose(memory, needed_bytes=1 << 60, device=CPU)
    assert choice.folder is None
    assert f"takes up to {1 << 60} bytes" in choice.reason
    assert "--shm-size" in choice.reason


def test_state_on_a_device_has_a_folder_only_for_its_copies_while_the_actor_is_suspended(memory: Path) -> None:
    choice = choose(memory / "state", needed_bytes=1 << 20, device=torch.device("cuda"))
    assert (choice.folder, choice.host_memory) == (None, memory / "state")
    assert choice.reason == "state is on cuda"
