"""The server of rank processes itself: a rank that hangs or fails ends the call, not the server."""

from __future__ import annotations

import pytest

from tests.ranks import RankServer

JOBS = "tests.integration.megatron.actor_trainer_ranks"


def test_ranks_past_their_timeout_are_killed_and_the_next_call_is_served(ranks: RankServer) -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] had not ended at the timeout"):
        ranks.run(f"{JOBS}:hang", 2, timeout_s=0.5)
    assert ranks.run(f"{JOBS}:fail_on", 2, {"rank": 2})


def test_a_rank_that_fails_ends_those_that_wait_for_it(ranks: RankServer) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1: (?s:.*)ArithmeticError: rank 1 fails as requested"):
        ranks.run(f"{JOBS}:fail_on", 2, {"rank": 1, "others_hang": True})
