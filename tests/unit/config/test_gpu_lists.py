"""Lists of GPUs in configs and scenarios, and their faults in one line."""

from __future__ import annotations

import pytest

from tidegate.config.gpu_lists import gpu_indices, gpu_list, list_fault


@pytest.mark.parametrize(("text", "want"), [("0", [0]), ("0-3,6", [0, 1, 2, 3, 6]), ("5, 2", [5, 2])])
def test_a_gpu_list_is_read_in_its_order(text: str, want: list[int]) -> None:
    assert gpu_indices(text) == want


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0-3-5", "0-65536", "\u0663", "9" * 5000])
def test_a_text_that_is_no_gpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of GPUs"):
        gpu_indices(text)


def test_ranges_that_are_more_than_a_cluster_together_are_refused_before_they_are_listed() -> None:
    """The first text has ten thousand whole clusters: 655 million numbers, if they were listed."""
    for text, last in ((",".join(["0-65535"] * 10_000), "0-65535"), ("0-65535, 7", "7-7")):
        with pytest.raises(
            ValueError, match=rf"the ranges up to {last} are [\d,]+ together; name each GPU once$"
        ) as error:
            gpu_indices(text)
        assert "names more GPUs than the 65,536 that a cluster may have" in str(error.value)
        assert len(str(error.value)) < 250
    assert len(gpu_indices("0-32767,32768-65535")) == 65_536


def test_a_written_gpu_list_reads_as_the_same_gpus() -> None:
    assert gpu_list([6, 1, 0, 2, 2]) == "0-2,6"
    assert gpu_list(gpu_indices("0-3,6,8-9")) == "0-3,6,8-9"


def test_gpus_that_are_held_repeated_or_beyond_are_one_line() -> None:
    holder = {0: "actor", 1: "actor", 4: "inference"}
    want = (
        "placement names GPUs 0-1, which actor has already, GPU 3, which rollout has already, GPU 4, which inference "
        "has already: list each GPU once; GPUs 8-9, the cluster has 8 (0-7)"
    )
    assert list_fault("placement", [0, 1, 3, 3, 4, 8, 9], own="rollout", num_gpus=8, holder=holder) == want
    assert list_fault("placement", [2, 3], own="rollout", num_gpus=8, holder=holder) is None
