"""The effect of each move, the moves that are refused, and the effect of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.scheduler.state.observed import AWAY
from simulator.faults import EngineFault, Fault, GpuFault, LateFault, NodeFault, Outage
from simulator.gpus import Holder, MoveRefused
from simulator.happenings import What
from simulator.workload import Workload
from simulator.world import Opening, Placement, Stalled, World
from tests.unit.simulator.small import CLUSTER, COSTS, shown, workload, world
from tidegate.types import Layout, MinibatchOrder, NodeId

EIGHT_GROUPS = [((30 + 7 * group,), (90,)) for group in range(8)]


def run(over: World) -> list[What]:
    return [happening.what for happening in over.happenings()]


def until(over: World, what: What) -> float:
    return next(happening.at_s for happening in over.happenings() if happening.what is what)


def minibatches(over: World) -> list[list[int]]:
    """The groups of each minibatch in the order of training."""
    taken: list[list[int]] = []
    for happening in over.happenings():
        if happening.what is What.MINIBATCH_CLOSED:
            taken.append([group for group, _ in over.trainer.taken])
    return taken


def test_an_iteration_in_a_fixed_placement_ends_with_every_sequence_once() -> None:
    kinds = run(world(workload(EIGHT_GROUPS)))
    assert kinds.count(What.SEQUENCE_FINISHED) == 16
    assert kinds.count(What.GROUP_INFERRED) == 8
    assert kinds.count(What.MINIBATCH_FINISHED) == 2
    assert kinds[-1] is What.ITERATION_FINISHED


def test_fixed_order_trains_groups_by_number_and_arrival_order_as_they_arrive() -> None:
    lengths = [((900,), (900,)), *EIGHT_GROUPS[:5]]
    fixed = minibatches(world(workload(lengths, order=MinibatchOrder.FIXED)))
    assert [sorted(groups) for groups in fixed] == [[0, 1, 2], [3, 4, 5]]
    assert 0 in minibatches(world(workload(lengths)))[1]


def test_a_minibatch_without_streaming_starts_with_its_last_group() -> None:
    started = {
        streams: until(world(workload(EIGHT_GROUPS, streams=streams)), What.MINIBATCH_STARTED)
        for streams in (False, True)
    }
    assert started[True] < started[False]


def test_the_sequences_of_a_released_engine_continue_elsewhere_with_their_tokens() -> None:
    over = world(workload(EIGHT_GROUPS))
    over.wake_at(0.8)
    until(over, What.WOKE)
    before = shown(over)
    moved = before.running(0)
    over.release_engines([0])
    until(over, What.GPUS_FREED)
    after = shown(over)
    assert max(before.lengths[number] for number in moved) > 0
    assert all(map(int.__ge__, after.lengths, before.lengths))
    assert after.engines == before.engines[1:]
    assert after.held_by(Holder.FREE) == CLUSTER[4:6]


def test_an_engine_that_starts_later_takes_waiting_sequences() -> None:
    over = world(workload(EIGHT_GROUPS * 3), actor=0, inference=4)
    over.resize_inference(CLUSTER[:2])
    until(over, What.GPUS_FREED)
    over.acquire_engines(CLUSTER[2:4])
    until(over, What.ENGINE_ACQUIRED)
    assert shown(over).running(len(over.rollout.engines) - 1)


def test_migrating_sequences_continue_on_the_engine_with_the_fewest() -> None:
    over = world(workload([((200,), (200,))] * 2))
    over.wake_at(0.3)
    until(over, What.WOKE)
    moved = shown(over).running(0)
    over.migrate(moved)
    assert shown(over).running(0) == []
    assert {shown(over).places[number] for number in moved} == {AWAY}
    over.wake_at(over.now_s + 1.5)
    until(over, What.WOKE)
    assert sum(place >= 0 for place in shown(over).places) == 4


def test_the_queue_follows_the_requested_order() -> None:
    over = world(workload(EIGHT_GROUPS))
    over.order_queue([15, 3])
    assert shown(over).queue[:4] == (15, 3, 0, 1)


def test_the_trainer_is_resized_between_two_optimizer_steps_only() -> None:
    over = world(workload(EIGHT_GROUPS), actor=4)
    kinds = []
    for happening in over.happenings():
        kinds.append(happening.what)
        if happening.what is What.MINIBATCH_STARTED and len(over.trainer.gpus) == 4:
            over.resize_trainer(CLUSTER[:2], Layout(dp=2))
    assert kinds.index(What.TRAINER_RESIZED) > kinds.index(What.MINIBATCH_FINISHED)
    assert over.gpus.holder(CLUSTER[3]) is Holder.FREE


def test_with_carried_gradients_the_trainer_is_resized_between_two_groups_and_trains_none_again() -> None:
    over = world(workload(EIGHT_GROUPS, carries=True), actor=4)
    kinds, taken = [], []
    for happening in over.happenings():
        kinds.append(happening.what)
        if happening.what is What.MINIBATCH_STARTED and len(over.trainer.gpus) == 4:
            over.resize_trainer(CLUSTER[:2], Layout(dp=2))
        if happening.what is What.TRAINER_RESIZED:
            taken = list(over.trainer.taken)
    assert kinds.index(What.TRAINER_RESIZED) < kinds.index(What.MINIBATCH_FINISHED)
    assert [group for group, _ in taken] == [0, 1], "group 0 stays trained, so group 1 is next"
    assert sorted(over.trainer.trained) == list(range(8))


def test_a_trainer_that_gives_up_all_gpus_ends_its_minibatch_first() -> None:
    over = world(workload(EIGHT_GROUPS, carries=True), actor=4)
    for happening in over.happenings():
        if happening.what is What.MINIBATCH_STARTED and over.trainer.gpus:
            over.resize_trainer((), None)
        if happening.what is What.TRAINER_RESIZED and not over.trainer.gpus:
            assert over.trainer.is_at_boundary
            assert over.trainer.minibatch == 1
            over.resize_trainer(CLUSTER[:4], Layout(dp=4))
    assert over.trainer.minibatch == 2


def test_training_on_hold_begins_at_the_end_of_the_hold() -> None:
    over = world(workload(EIGHT_GROUPS))
    over.hold_training(50.0)
    assert until(over, What.MINIBATCH_STARTED) == 50.0


@pytest.mark.parametrize(
    ("move", "want"),
    {
        "a GPU of the rollout to the trainer": (
            lambda over: over.resize_trainer(CLUSTER[5:6], Layout()),
            "n0/5 is rollout and cannot go to the actor",
        ),
        "a GPU of the inference to the trainer": (
            lambda over: over.resize_trainer(CLUSTER[2:3], Layout()),
            "n0/2 is promised to another component",
        ),
        "a layout of more ranks": (
            lambda over: over.resize_trainer(CLUSTER[:2], Layout(dp=3)),
            "layout dp3 has 3 ranks and the actor 2 GPUs",
        ),
        "half an engine": (lambda over: over.acquire_engines(CLUSTER[:1]), "1 GPUs make no whole engines of 2"),
        "an engine on held GPUs": (lambda over: over.acquire_engines(CLUSTER[4:6]), "cannot go from free to rollout"),
        "an engine that is not there": (lambda over: over.release_engines([7]), "engines [7] do not run"),
        "a sequence that does not run": (lambda over: over.migrate([99]), "sequences [99] do not run"),
        "a GPU outside of the cluster": (
            lambda over: over.resize_inference(["n9/0"]),
            "GPU n9/0 is not in the cluster, which has 8: n0/0 to n0/7",
        ),
        "a GPU twice": (lambda over: over.resize_inference(CLUSTER[2:3] * 2), "named twice"),
    }.values(),
)
def test_a_refused_move_changes_nothing(move: Callable[[World], None], want: str) -> None:
    over = world(workload(EIGHT_GROUPS))
    before = shown(over)
    with pytest.raises(MoveRefused) as caught:
        move(over)
    assert want in str(caught.value)
    assert shown(over) == before


def test_a_gpu_leaves_the_inference_between_two_groups() -> None:
    over = world(workload(EIGHT_GROUPS))
    until(over, What.GROUP_FINISHED)
    assert over.inference.is_busy
    over.resize_inference(CLUSTER[2:3])
    assert over.inference.gpus == CLUSTER[2:4]
    until(over, What.GROUP_INFERRED)
    until(over, What.INFERENCE_RESIZED)
    assert over.inference.gpus == CLUSTER[2:3]
    assert over.gpus.holder(CLUSTER[3]) is Holder.FREE


def test_work_without_gpus_stalls_with_the_waiting_work_in_the_message() -> None:
    with pytest.raises(Stalled, match="4 groups wait for 0 inference GPUs"):
        run(world(workload(EIGHT_GROUPS[:4]), inference=0))


def test_the_sequences_of_a_dead_engine_continue_and_its_gpus_become_free() -> None:
    over = world(workload(EIGHT_GROUPS), faults=[EngineFault(0.5, 0)])
    assert run(over).count(What.SEQUENCE_FINISHED) == 16
    assert over.gpus.held_by(Holder.FREE) == CLUSTER[4:6]


def test_a_fault_of_an_engine_that_does_not_run_is_reported_as_missed() -> None:
    over = world(workload(EIGHT_GROUPS), faults=[EngineFault(0.5, 9)])
    missed = [each for each in over.happenings() if each.what is What.FAULT_MISSED]
    assert [(each.at_s, each.number, each.count) for each in missed] == [(0.5, 9, 2)]
    assert not over.gpus.held_by(Holder.LOST)


def test_a_lost_gpu_takes_its_engine_and_is_never_free_again() -> None:
    over = world(workload(EIGHT_GROUPS), faults=[GpuFault(0.5, CLUSTER[4])])
    assert run(over).count(What.SEQUENCE_FINISHED) == 16
    assert over.gpus.held_by(Holder.LOST) == CLUSTER[4:5]
    assert over.gpus.held_by(Holder.FREE) == CLUSTER[5:6]


def test_a_gpu_that_comes_back_is_free() -> None:
    over = world(workload(EIGHT_GROUPS), faults=[GpuFault(0.5, CLUSTER[4], back_after_s=1.0)])
    freed = [happening for happening in over.happenings() if happening.what is What.GPUS_FREED]
    assert [(round(each.at_s, 3), each.gpus) for each in freed] == [(0.7, CLUSTER[5:6]), (1.5, CLUSTER[4:5])]
    assert over.gpus.held_by(Holder.FREE) == CLUSTER[4:6]


RETURNS: dict[str, tuple[list[Fault], float | None]] = {
    "a GPU that is lost for good before its node": ([GpuFault(0.2, CLUSTER[4])], None),
    "a GPU that is lost for good while its node is lost": ([GpuFault(0.7, CLUSTER[4])], None),
    "a GPU that is lost for longer than its node": ([GpuFault(0.2, CLUSTER[4], back_after_s=2.0)], 2.2),
    "a GPU that is lost for less time than its node": ([GpuFault(0.2, CLUSTER[4], back_after_s=0.5)], 1.5),
    "a GPU that is lost with its node only": ([], 1.5),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_gpu_is_free_again_after_the_last_of_its_own_and_its_nodes_faults(name: str) -> None:
    """The node is lost from 0.5 s to 1.5 s."""
    faults, want = RETURNS[name]
    over = world(workload(EIGHT_GROUPS), faults=[*faults, NodeFault(0.5, NodeId("n0"), back_after_s=1.0)])
    with pytest.raises(Stalled):
        run(over)
    freed = [each.at_s for each in over.history if each.what is What.GPUS_FREED and CLUSTER[4] in each.gpus]
    assert freed == ([want] if want is not None else [])


def test_a_node_that_is_lost_already_is_not_lost_again() -> None:
    faults = [NodeFault(0.5, NodeId("n0"), back_after_s=1.0), NodeFault(0.7, NodeId("n0"), back_after_s=9.0)]
    over = world(workload(EIGHT_GROUPS), faults=faults)
    with pytest.raises(Stalled):
        run(over)
    missed = [(each.at_s, each.gpus) for each in over.history if each.what is What.FAULT_MISSED]
    assert missed == [(0.7, CLUSTER)]
    assert [each.at_s for each in over.history if each.what is What.NODE_BACK] == [1.5]


def test_an_outage_goes_on_in_the_next_world_and_a_fault_that_is_over_strikes_at_its_beginning() -> None:
    outage = Outage((CLUSTER[6],), back_at_s=11.0)
    opening = Opening(at_s=10.0, outages=(outage,))
    placement = Placement(CLUSTER, CLUSTER[4:6], CLUSTER[2:4], CLUSTER[:2], Layout(dp=2))
    over = World(workload(EIGHT_GROUPS), COSTS, placement, [GpuFault(9.0, CLUSTER[7])], opening=opening)
    assert over.gpus.held_by(Holder.LOST) == (CLUSTER[6],)
    list(over.happenings())
    assert [each.at_s for each in over.history if each.what is What.GPU_LOST] == [10.0]
    freed = [each.at_s for each in over.history if each.what is What.GPUS_FREED and CLUSTER[6] in each.gpus]
    assert freed == [11.0]
    assert not over.pending_faults
    assert [each.gpus for each in over.outages] == [(CLUSTER[7],)]


@pytest.mark.parametrize("scores_ahead", [False, True])
def test_a_filtered_group_is_handed_on_and_neither_scored_nor_trained(scores_ahead: bool) -> None:
    plain = workload(EIGHT_GROUPS, scores_ahead=scores_ahead)
    runs = []
    for filtered in (frozenset[int](), frozenset({1, 2})):
        over = world(replace(plain, filtered=filtered))
        tokens = {each.number: each.count for each in over.happenings() if each.what is What.GROUP_INFERRED}
        trained = sum(each.count for each in over.history if each.what is What.MINIBATCH_FINISHED)
        assert sorted(over.trainer.trained) == sorted(tokens) == list(range(8))
        runs.append((tokens, trained, over.now_s))
        assert over.inference.num_tokens_ahead == 0
    (tokens, trained, seconds), (fewer, less, sooner) = runs
    assert fewer == tokens | {1: 0, 2: 0}
    assert less == trained - tokens[1] - tokens[2]
    assert sooner < seconds


def test_a_lost_gpu_of_the_inference_costs_a_group_its_computation_only() -> None:
    over = world(workload(EIGHT_GROUPS), faults=[GpuFault(0.5, CLUSTER[2])])
    assert run(over).count(What.GROUP_INFERRED) == 8
    assert over.inference.gpus == CLUSTER[3:4]


def test_a_response_that_is_computed_ahead_is_not_computed_again() -> None:
    lengths, rate = [*EIGHT_GROUPS[:5], ((300,), (900,))], COSTS.inference.rate_tokens_per_s
    waits_s = {}
    for scores_ahead in (False, True):
        over = world(workload(lengths, scores_ahead=scores_ahead), actor=1, inference=1)
        at = {(each.what, each.number): each for each in over.happenings()}
        waits_s[scores_ahead] = at[What.GROUP_INFERRED, 5].at_s - at[What.GROUP_FINISHED, 5].at_s
        assert at[What.GROUP_INFERRED, 5].count == 310 + 910
    assert waits_s == {False: pytest.approx(1220 / rate), True: pytest.approx(910 / rate)}


def test_a_lost_gpu_of_the_inference_costs_responses_ahead_their_computation_only() -> None:
    slow = COSTS.model_copy(update={"inference": COSTS.inference.model_copy(update={"rate_tokens_per_s": 50.0})})
    work = workload([((10,), (900,)), *EIGHT_GROUPS[1:4]], scores_ahead=True)
    over = world(work, faults=[GpuFault(0.5, CLUSTER[2])], costs=slow)
    inferred = [each.number for each in over.happenings() if each.what is What.GROUP_INFERRED]
    assert sorted(inferred) == [0, 1, 2, 3]
    assert over.inference.num_tokens_ahead == 0


def test_after_a_death_the_trainer_repeats_its_open_minibatch_with_a_cold_start() -> None:
    over = world(workload(EIGHT_GROUPS), faults=[GpuFault(6.0, CLUSTER[0])])
    tokens, died = [], 0.0
    for happening in over.happenings():
        if happening.what is What.TRAINER_DIED:
            died = happening.at_s
            over.resize_trainer(CLUSTER[1:2], Layout())
        if happening.what is What.TRAINER_RESIZED:
            assert happening.at_s == pytest.approx(died + COSTS.switch.trainer_cold_s)
        if happening.what is What.MINIBATCH_FINISHED:
            tokens.append(happening.count)
    assert died == 6.0
    assert sum(tokens) == total_tokens(workload(EIGHT_GROUPS))


def test_a_late_happening_is_reported_once_and_changes_nothing_else() -> None:
    on_time, late = (
        world(workload(EIGHT_GROUPS)),
        world(workload(EIGHT_GROUPS), faults=[LateFault(0, What.GROUP_FINISHED, 2)]),
    )
    run(on_time)
    run(late)
    (delayed,) = [each for each in late.history if each.reported_s is not None]
    assert delayed.reported_s == delayed.at_s + 2
    assert late.now_s == on_time.now_s
    assert len(late.history) == len(on_time.history)


def total_tokens(work: Workload) -> int:
    return work.lengths.num_tokens + work.prompt_tokens * work.num_groups * work.group_size
