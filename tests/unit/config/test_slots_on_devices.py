"""The slots of a job's nodes and the devices of this machine."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.unit.config.valid_config import VALID, valid_with
from tidegate.config.checks.job import devices_fault
from tidegate.config.job_config import ConfigError, parse_config
from tidegate.config.sections.job import MachineSection


def test_slots_that_share_a_device_are_a_warning_that_this_is_for_trials() -> None:
    (warning,) = parse_config(valid_with("cluster.slots_per_gpu", 3)).warnings()
    assert warning.startswith("cluster.slots_per_gpu=3: up to 3 slots share a device and its memory")
    assert warning.endswith("this is for trials, not for speed")
    assert parse_config(valid_with("cluster.slots_per_gpu", 1)).warnings() == ()


@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_a_device_has_a_whole_number_of_slots_and_at_least_one(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^cluster.slots_per_gpu=.*: Input should be"):
        parse_config(valid_with("cluster.slots_per_gpu", value))


@pytest.mark.parametrize(
    ("cluster", "num_found", "want"),
    [
        ({"device": "cpu"}, 0, None),
        ({"nodes": {"n0": 8}}, 8, None),
        ({"nodes": {"n0": 8}}, 1, "cluster.nodes: n0 has 8 slots, which with cluster.slots_per_gpu=1 need 8 CUDA"),
        ({"nodes": {"n0": 8}}, 1, "or set cluster.slots_per_gpu=8 for a trial in which slots share a device"),
        ({"nodes": {"n0": 8}}, 3, "and torch finds 3: name fewer slots, or set cluster.slots_per_gpu=3 for a trial"),
        ({"nodes": {"n0": 8}, "slots_per_gpu": 3}, 3, None),
        ({"nodes": {"n0": 8}, "slots_per_gpu": 8}, 1, None),
        ({"nodes": {"n0": 4, "n1": 4}}, 8, "cluster.nodes: n0, n1 are all on this machine and would each take"),
        ({"nodes": {"n0": 8}, "slots_per_gpu": 4}, 1, "with cluster.slots_per_gpu=4 need 2 CUDA devices"),
    ],
    ids=[
        "CPU slots need none",
        "one for each slot",
        "too few",
        "the remedy for one",
        "the remedy for three",
        "the remedy works",
        "all slots on one",
        "two nodes on one machine",
        "slots for two",
    ],
)
def test_a_job_starts_only_on_devices_that_its_slots_fit(
    cluster: dict[str, Any], num_found: int, want: str | None
) -> None:
    raw = copy.deepcopy(VALID)
    raw["cluster"] |= {"device": "cuda"} | cluster
    fault = devices_fault(parse_config(raw).cluster, num_found)
    assert fault == want or (want is not None and fault is not None and want in fault)


@pytest.mark.parametrize(
    ("nodes", "machine", "want"),
    [
        ({"n0": 4, "n1": 8}, "", None),
        ({"n0": 4, "n1": 8}, "b", "cluster.nodes: n1 has 8 slots, which with cluster.slots_per_gpu=1 need 8 CUDA"),
        ({"n0": 8, "n1": 4}, "b", None),
        ({"n0": 4, "n1": 4, "n2": 4}, "b", "cluster.nodes: n1, n2 are all on b and would each take its CUDA devices"),
        ({"n0": 4, "n1": 4, "n2": 4}, "c", None),
    ],
)
def test_each_machine_of_a_job_has_the_devices_of_its_own_nodes(
    nodes: dict[str, int], machine: str, want: str | None
) -> None:
    cluster = parse_config(valid_with("cluster.device", "cuda")).cluster
    b = MachineSection(name="b", agent="10.0.0.8:7400", nodes=tuple(node for node in nodes if node != "n0"))
    fault = devices_fault(cluster.model_copy(update={"nodes": nodes, "machines": (b,)}), 4, machine=machine)
    assert fault == want or (want is not None and fault is not None and want in fault)
