"""The bytes and times of a simulated trainer's reshards, and a policy's closed form against their plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.scheduler.state.switch_costs import ReshardCosts
from simulator.faults import GpuFault
from simulator.happenings import What
from simulator.model import ModelSection
from simulator.reshard_costs import change_of, moved_bytes
from simulator.world import World
from tests.unit.simulator.small import CLUSTER, COSTS, workload, world
from tidegate.types import GpuId, Layout, NodeId, Precision, gpu_id

GPUS = tuple(gpu_id(NodeId(f"n{index // 8}"), index % 8) for index in range(128))
QWEN25_7B = ModelSection()
QWEN25_32B = ModelSection(num_layers=64, hidden_size=5120, ffn_hidden_size=27_648, num_heads=40, num_kv_heads=8)
GROUPS = [((30 + 7 * group,), (90,)) for group in range(8)]
SWITCH = COSTS.switch


def bytes_of(model: ModelSection, tp: int, before: int, after: int) -> int:
    """The bytes of a reshard between two numbers of copies, on adjacent GPUs."""
    source, target = Layout(tp=tp, dp=before), Layout(tp=tp, dp=after)
    return moved_bytes(model, change_of(GPUS[: source.num_ranks], source, GPUS[: target.num_ranks], target))


def resized(over: World, gpus: tuple[GpuId, ...]) -> float:
    """The seconds of a resize from now. The trainer has not begun a minibatch."""
    began_s = over.now_s
    over.resize_trainer(gpus, Layout(dp=len(gpus)))
    ended = next(happening for happening in over.happenings() if happening.what is What.TRAINER_RESIZED)
    return ended.at_s - began_s


def held(model: ModelSection | None, faults: tuple[GpuFault, ...] = ()) -> World:
    """A world with two GPUs that train, and with training on hold."""
    over = world(workload(GROUPS), model=model, faults=faults)
    over.hold_training(math.inf)
    return over


def test_the_7b_and_32b_models_have_the_published_numbers_of_parameters() -> None:
    assert QWEN25_7B.num_parameters == 7_615_616_512
    assert QWEN25_32B.num_parameters == 32_763_876_352
    assert (QWEN25_7B.weight_bytes, QWEN25_7B.optimizer_bytes) == (2 * 7_615_616_512, 12 * 7_615_616_512)
    in_fp32 = QWEN25_7B.model_copy(update={"precision": Precision.FP32})
    assert (in_fp32.weight_bytes, in_fp32.optimizer_bytes) == (4 * 7_615_616_512, 8 * 7_615_616_512)


def test_a_remaining_gpu_keeps_its_shards_and_a_joining_one_gets_all_of_its_own() -> None:
    """In bf16 a parameter has 2 bytes of weights and 12 of the optimizer. The padding of the vocabulary adds little."""
    num = QWEN25_7B.num_parameters
    assert bytes_of(QWEN25_7B, 1, 2, 1) == pytest.approx(12 * num / 2, rel=1e-4)
    assert bytes_of(QWEN25_7B, 1, 1, 2) == pytest.approx(2 * num + 12 * num / 2, rel=1e-4)
    same = Layout(tp=4, dp=2)
    assert moved_bytes(QWEN25_7B, change_of(GPUS[:8], same, GPUS[:8], same)) == 0
    assert moved_bytes(QWEN25_7B, change_of(GPUS[:8], same, GPUS[8:16], same)) == pytest.approx(
        (2 * num + 12 * num / 2) / 4, rel=1e-4
    )


def test_a_change_depends_on_ranks_and_shared_hosts_and_not_on_the_names_of_gpus() -> None:
    before, after = Layout(tp=2, dp=2), Layout(tp=2, dp=4)
    here = change_of(GPUS[:4], before, GPUS[:8], after)
    there = change_of(GPUS[64:68], before, GPUS[64:72], after)
    across = change_of(GPUS[4:8], before, GPUS[4:12], after)
    assert here == there
    assert here != across


def test_a_reshard_of_twice_the_bytes_takes_twice_the_transfer_time() -> None:
    sizes = {"num_layers": 56, "vocab_size": 2 * 152_064, "padded_vocab_size": 2 * 152_064}
    twice = QWEN25_7B.model_copy(update=sizes)
    once_s, twice_s = (resized(held(model), CLUSTER[:1]) for model in (QWEN25_7B, twice))
    transfer_s = 12 * QWEN25_7B.num_parameters / 2 / SWITCH.reshard_bytes_per_s
    assert once_s == pytest.approx(SWITCH.reshard_setup_s + SWITCH.communicators_s + transfer_s, rel=1e-4)
    assert twice_s - once_s == pytest.approx(transfer_s, rel=1e-4)


def test_without_a_model_every_reshard_takes_the_published_time() -> None:
    over = held(None)
    assert resized(over, CLUSTER[:1]) == SWITCH.reshard_s
    assert resized(over, CLUSTER[:2]) == pytest.approx(SWITCH.reshard_s)


def test_communicators_are_built_once_for_a_layout_on_its_gpus_and_again_after_a_death() -> None:
    over = held(QWEN25_7B, (GpuFault(20.0, CLUSTER[1], back_after_s=1.0),))
    resized(over, CLUSTER[:1])
    growing_s = 8 * QWEN25_7B.num_parameters / SWITCH.reshard_bytes_per_s
    assert resized(over, CLUSTER[:2]) == pytest.approx(SWITCH.reshard_setup_s + growing_s, rel=1e-4)
    assert any(happening.what is What.TRAINER_DIED for happening in over.happenings())
    assert resized(over, CLUSTER[:1]) == pytest.approx(SWITCH.trainer_cold_s)
    anew_s = SWITCH.reshard_setup_s + SWITCH.communicators_s + growing_s
    assert resized(over, CLUSTER[:2]) == pytest.approx(anew_s, rel=1e-4)


RESHAPES = (
    (Layout(tp=4, dp=2), Layout(tp=2, dp=4)),
    (Layout(tp=4, dp=2), Layout(tp=2, dp=6)),
    (Layout(tp=2, dp=4), Layout(tp=4, dp=2)),
    (Layout(tp=2, dp=5), Layout(tp=4, dp=1)),
    (Layout(tp=4), Layout(tp=2, dp=3)),
    (Layout(tp=2, pp=2, dp=2), Layout(tp=4, dp=4)),
    (Layout(pp=4, dp=2), Layout(tp=4, dp=3)),
    (Layout(tp=4, dp=8), Layout(pp=2, dp=8)),
)


@pytest.mark.parametrize("change", RESHAPES, ids=lambda change: f"{change[0]} to {change[1]}")
def test_the_closed_form_of_a_change_between_kinds_of_copies_is_near_the_bytes_of_the_plan(
    change: tuple[Layout, Layout],
) -> None:
    (source, target), model = change, QWEN25_7B
    tolerance = 0.001 if source.pp == target.pp == 1 else 0.2
    costs = ReshardCosts(0.0, 0.0, 1.0, model.weight_bytes, model.optimizer_bytes, gpus_per_host=8)
    planned = moved_bytes(model, change_of(GPUS[: source.num_ranks], source, GPUS[: target.num_ranks], target))
    sizes = {"copy_size": source.num_ranks // source.dp, "new_size": target.num_ranks // target.dp}
    closed = float(costs.reshaped_bytes(np.array(float(source.dp)), np.array(float(target.dp)), **sizes))
    assert closed == pytest.approx(planned, rel=tolerance)


SMALL_STEPS = ((1, 2), (2, 5), (3, 4), (3, 7), (7, 12), (8, 14), (15, 16), (16, 15), (14, 4), (4, 1))
CASES = {
    "7B, tp 4": (QWEN25_7B, 4, SMALL_STEPS),
    "7B, tp 2": (QWEN25_7B, 2, ((4, 10), (6, 9), (20, 12))),
    "32B, tp 4": (QWEN25_32B, 4, ((3, 7), (4, 10), (14, 4))),
    "32B, tp 8": (QWEN25_32B, 8, ((1, 4), (2, 3), (8, 5))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_within_five_percent_of_the_bytes_of_the_plan(name: str) -> None:
    model, tp, pairs = CASES[name]
    costs = ReshardCosts(0.0, 0.0, 1.0, model.weight_bytes, model.optimizer_bytes, gpus_per_host=8)
    for before, after in pairs:
        closed = costs.busiest_bytes(np.array(float(before)), np.array(float(after)), copy_size=tp)
        assert float(closed) == pytest.approx(bytes_of(model, tp, before, after), rel=0.05), (before, after)
