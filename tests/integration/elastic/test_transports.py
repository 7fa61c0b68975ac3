"""Every transport brings the target's bits to their places on real ranks. The reference is numpy's cut of both ends."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest

from tests.ranks import RankServer

TRANSFERS = "tests.integration.elastic.transport_ranks"
End = tuple[dict[str, int], list[int]]
DP4: End = ({"dp": 4}, [0, 1, 2, 3])
TP2_DP2: End = ({"tp": 2, "dp": 2}, [0, 1, 2, 3])
TP4: End = ({"tp": 4}, [0, 1, 2, 3])
TP2_PP2: End = ({"tp": 2, "pp": 2}, [0, 1, 2, 3])
PERMUTED: End = ({"tp": 2, "pp": 2, "vpp": 2}, [3, 1, 0, 2])
FRONT: End = ({"tp": 2}, [0, 1])
BACK: End = ({"pp": 2}, [3, 2])
ONE: End = ({}, [2])
SWITCHES = [
    (DP4, TP2_DP2),
    (TP2_DP2, DP4),
    (TP4, TP2_PP2),
    (DP4, PERMUTED),
    (PERMUTED, TP4),
    (FRONT, BACK),
    (BACK, TP2_DP2),
    (TP4, ONE),
]


@pytest.fixture
def tmpfs() -> Iterator[str]:
    with TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as folder:
        yield folder


def test_every_rank_has_the_bits_of_the_target_and_the_source_is_untouched(ranks: RankServer, tmpfs: str) -> None:
    transports = ["shared memory", "peer to peer", "small batches", "hybrid"]
    arguments = {"switches": SWITCHES, "transports": transports, "hosts": ["a", "b", "a", "b"], "folder": tmpfs}
    got = ranks.run(f"{TRANSFERS}:every_switch", 4, arguments)
    assert all(result["received_bytes"] > 1 << 20 for result in got)


def test_a_member_sends_for_a_dead_rank_and_a_member_on_its_host_reads_its_arena(ranks: RankServer, tmpfs: str) -> None:
    switch = (TP2_DP2, ({"dp": 3}, [2, 0, 1]))
    got = ranks.run(f"{TRANSFERS}:a_rank_is_dead", 3, {"switch": switch, "folder": tmpfs})
    assert got[0]["sent_bytes_of_the_dead_rank"] > 0


def test_a_death_before_its_sends_is_a_lost_peer_and_changes_no_source(ranks: RankServer, tmpfs: str) -> None:
    arguments = {"switch": (FRONT, BACK), "folder": tmpfs}
    got = ranks.run(f"{TRANSFERS}:a_sender_dies", 4, arguments, expect_death=[0])
    assert [bool(result["is_lost"]) for result in got[2:]] == [True, True]
