"""A job's GPUs become free ones of the cluster, those of a node together and in their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster_jobs import config_of, of_size
from tidegate.cluster.placement import HostMemory, Room, cluster_gpus, misfit, needs_of, placed_config, placed_gpus
from tidegate.cluster.slots import Slots
from tidegate.config.job_config import ConfigError
from tidegate.types import GpuId, NodeId, Role, node_of

TWO = {NodeId("n0"): 8, NodeId("n1"): 4}


def gpus(text: str) -> tuple[GpuId, ...]:
    return tuple(GpuId(f"n{name}") for name in text.split())


def room(text: str) -> Room:
    return Room(TWO, frozenset(gpus(text)))


@given(st.sets(st.sampled_from(cluster_gpus(TWO))), st.integers(3, 9))
def test_a_placed_job_has_only_free_gpus_each_once(free: set[GpuId], size: int) -> None:
    found = placed_gpus((size,), Room(TWO, frozenset(free)))
    of_a_node = max(len([gpu for gpu in free if node_of(gpu) == node]) for node in TWO)
    if found is None:
        assert of_a_node < size
    else:
        assert len({*found}) == size
        assert free.issuperset(found)


def test_gpus_of_one_node_stay_together_in_the_fullest_node_with_room() -> None:
    config = of_size("one", 3)
    assert placed_gpus(needs_of(config), Room.whole(TWO)) == gpus("1/0 1/1 1/2"), "eight stay free for a large job"
    assert placed_gpus(needs_of(config), room("0/2 0/5 0/6 0/7 1/0 1/1")) == gpus("0/2 0/5 0/6")
    assert placed_gpus((3,), room("0/2 0/5 1/0 1/1")) is None, "four are free, but not on one node"


def test_nodes_of_a_job_may_share_one_of_the_cluster() -> None:
    needs, one = needs_of(config_of("two", {"a": 2, "b": 3}, "0,2", "1,3", "4")), {NodeId("n0"): 8}
    assert needs == (2, 3)
    assert placed_gpus(needs, Room.whole(one)) == gpus("0/3 0/4 0/0 0/1 0/2")
    assert placed_gpus(needs, room("0/0 0/1 0/2 1/3 1/0")) == gpus("1/0 1/3 0/0 0/1 0/2")


def test_a_placed_config_keeps_the_order_of_ranks_and_its_standbys() -> None:
    config = config_of("two", {"a": 2, "b": 4}, "2,0", "3,1", "4", actor__standby="5")
    there = gpus("1/0 1/3 0/1 0/2 0/5 0/7")
    placed = placed_config(config, Slots(TWO), there)
    names = dict(zip(config.gpus, there, strict=True))
    for role in Role:
        assert placed.placement(role) == tuple(names[gpu] for gpu in config.placement(role))
    assert placed.standby() == (GpuId("n0/7"),)
    assert placed.cluster.nodes == TWO
    assert placed.actor.layout == config.actor.layout


def test_a_job_that_can_never_fit_is_told_with_the_numbers() -> None:
    assert misfit(of_size("one", 8), Slots(TWO)) is None
    found = misfit(of_size("one", 9), Slots(TWO))
    assert found == (
        "job one needs 9 GPUs (9 on a), those of a node together; n0 has 8, n1 has 4: give it fewer, or submit it to a "
        "larger cluster"
    )
    assert "the cluster's slots are cuda" in (misfit(of_size("one", 3), Slots(TWO, "cuda")) or "")
    shared = Slots(TWO, per_gpu=4)
    assert "has cluster.slots_per_gpu=1, and in the cluster 4 slots share a GPU" in (
        misfit(of_size("one", 3), shared) or ""
    )
    config = of_size("one", 3)
    addressed = {"addresses": dict.fromkeys(config.cluster.nodes, "127.0.0.2")}
    found = misfit(config.model_copy(update={"cluster": config.cluster.model_copy(update=addressed)}), Slots(TWO))
    assert found == "job one has cluster.addresses, and the cluster's nodes have their own: leave it out"
    with pytest.raises(ConfigError, match="slots_per_gpu=4"):
        placed_config(of_size("one", 3), shared, gpus("0/0 0/1 0/2"))


def test_a_job_with_servers_of_its_own_is_refused_and_placed_without_them() -> None:
    """An earlier release took such jobs into its queue."""
    config = of_size("one", 3)
    own = {"redis_url": "rediss://u:hunter2@h", "nats_replicas": 3, "redis_replicas": 1, "credentials_travel": True}
    with_own = config.model_copy(update={"servers": config.servers.model_copy(update=own)})
    assert misfit(with_own, Slots(TWO)) == (
        "job one has servers.redis_url, servers.nats_replicas, servers.redis_replicas, servers.credentials_travel, and "
        "a cluster has its own servers: leave servers out, or start the job by tidegate run, which uses yours"
    )
    there = gpus("0/0 0/1 0/2")
    assert placed_config(with_own, Slots(TWO), there) == placed_config(config, Slots(TWO), there)


@pytest.mark.parametrize("text", ["0", "1,0"])
def test_an_empty_list_stays_empty(text: str) -> None:
    config = config_of("two", {"a": 4}, text, "2", "3")
    there = placed_gpus(needs_of(config), Room.whole(TWO))
    assert there is not None
    assert placed_config(config, Slots(TWO), there).actor.standby == ""


N0, N1 = TWO
TOGETHER = (HostMemory((N0, N1), 10),)
APART = (HostMemory((N0,), 4), HostMemory((N1,), 10))


def test_jobs_of_a_machine_need_no_more_host_memory_than_it_has() -> None:
    assert placed_gpus((3,), Room.whole(TWO, APART), node_bytes=4) == gpus("1/0 1/1 1/2")
    assert placed_gpus((4, 4), Room.whole(TWO, APART), node_bytes=4) == gpus("1/0 1/1 1/2 1/3 0/0 0/1 0/2 0/3")
    assert placed_gpus((3,), Room.whole({N0: 8}, APART), node_bytes=5) is None
    assert placed_gpus((4, 4), Room.whole(TWO, APART), node_bytes=5) is None, (
        "the second has to be on the other machine"
    )
    assert placed_gpus((8, 4), Room.whole(TWO, TOGETHER), node_bytes=6) is None, "one machine has both"
    assert placed_gpus((3, 3), Room.whole({N0: 8}, TOGETHER), node_bytes=6), "both are on one node, which has it once"
    left = Room.whole(TWO, TOGETHER).without((gpus("0/0 1/0"), 4))
    assert (len(left.free), left.memory[0].num_bytes, left.bytes_on(N1)) == (10, 2, 2)
    assert placed_gpus((3,), left, node_bytes=3) is None
    assert placed_gpus((3,), left, node_bytes=2) == gpus("1/1 1/2 1/3")
    unequal = Room.whole({N0: 4, N1: 8}, TOGETHER)
    assert placed_gpus((4, 4), unequal, node_bytes=8) == cluster_gpus({N1: 8}), "both on the larger one, which has room"
    over = Room.whole(TWO, TOGETHER).without((gpus("0/0"), 11))
    assert placed_gpus((3,), over) == gpus("1/0 1/1 1/2"), "who needs none does not wait for it"


def test_a_job_that_needs_more_host_memory_than_any_machine_has_is_told_with_the_numbers() -> None:
    memory, slots = (HostMemory((N0, N1), 3 << 30),), Slots(TWO)
    assert misfit(of_size("one", 3), slots, node_bytes=3 << 30, memory=memory) is None
    assert misfit(of_size("one", 3), slots, node_bytes=4 << 30, memory=memory) == (
        "job one needs 4.0 GiB of host memory on each of its nodes; n0 and n1 together have 3.0 GiB: make it larger "
        "there (mount -o remount,size=..., docker run --shm-size)"
    )
    assert misfit(of_size("one", 3), slots, node_bytes=4 << 30) is None, "nobody has told how much there is"
