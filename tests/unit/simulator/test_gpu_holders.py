"""A GPU of the simulated cluster has one holder."""

from __future__ import annotations

import pytest

from simulator.gpus import Gpus, Holder, MoveRefused
from tests.unit.simulator.small import CLUSTER


def test_a_gpu_moves_only_from_its_present_holder() -> None:
    gpus = Gpus(CLUSTER[:2])
    gpus.move(CLUSTER[:1], Holder.FREE, Holder.ROLLOUT, 1.0)
    with pytest.raises(MoveRefused, match=r"n0/0 \(rollout\) cannot go from free to actor"):
        gpus.move(CLUSTER[:2], Holder.FREE, Holder.ACTOR, 2.0)
    assert [gpus.holder(gpu) for gpu in CLUSTER[:2]] == [Holder.ROLLOUT, Holder.FREE]
