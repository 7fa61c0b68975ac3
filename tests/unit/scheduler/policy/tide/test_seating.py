"""Which GPUs a component gets, once their numbers are known."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.policy.situation import Split
from services.scheduler.policy.tide.cluster import fitting, gpus_there
from services.scheduler.policy.tide.seating import seated
from services.scheduler.state.layouts import replicas
from services.scheduler.state.remembered import Assignment, as_configured
from services.scheduler.state.values import Placed
from tests.unit.scheduler.fake_parts import gpu
from tests.unit.scheduler.situations import generation, job, seen
from tidegate.types import GpuId, Layout, Role, node_of

SPEC = job(actor=4, rollout=8, inference=4, actor_tp=4, rollout_tp=2, prompts=8, minibatches=2)
NODES = tuple(gpu(f"n{node}", index) for node in range(2) for index in range(8))


def across_nodes(spec_gpus: tuple[GpuId, ...] = NODES) -> Assignment:
    """Everything generates, on two nodes of eight GPUs."""
    return Assignment(replicas(spec_gpus, 2), None, ())


def sit(assignment: Assignment, *, num_unfinished: int = 8):  # type: ignore[no-untyped-def]
    situation = seen(SPEC, as_configured(SPEC), num_unfinished=0)
    picture = generation(
        SPEC, assignment.engines, lengths=(5,) * 8, places=(0,) * num_unfinished + (-3,) * (8 - num_unfinished)
    )
    inferring = replace(situation.inference, gpus=(), inferring=replace(situation.inference.inferring, ready=()))
    trainer = replace(situation.trainer, placed=None)
    return replace(
        situation,
        generation=picture,
        inference=inferring,
        trainer=trainer,
        free=(),
    )


def test_the_trainer_gets_whole_copies_inside_a_node() -> None:
    before = across_nodes()
    found = seated(sit(before), Split(5, 4, 2), before, NODES)
    assert found.trainer is not None
    assert found.trainer.layout == Layout(tp=4, dp=1)
    assert len({node_of(each) for each in found.trainer.gpus}) == 1
    assert len(found.engines) == 5
    assert len(found.inference) == 2


def test_engines_beside_the_trainer_leave_first() -> None:
    before = across_nodes()
    first = seated(sit(before), Split(6, 4, 0), before, NODES)
    second = seated(sit(before), Split(4, 8, 0), first, NODES)
    assert first.trainer is not None
    assert second.trainer is not None
    assert second.trainer.gpus[:4] == first.trainer.gpus
    assert len({node_of(each) for each in second.trainer.gpus}) == 1


def test_components_keep_their_gpus_and_nothing_is_left_over() -> None:
    before = seated(sit(across_nodes()), Split(4, 4, 4), across_nodes(), NODES)
    found = seated(sit(across_nodes()), Split(5, 4, 2), before, NODES)
    assert found.trainer == before.trainer
    assert set(found.inference) < set(before.inference)
    assert set(found.engines) > set(before.engines)
    assert sorted(found.gpus) == sorted(NODES)


def test_a_lost_gpu_takes_its_engine_with_it_and_the_others_are_used() -> None:
    before = across_nodes()
    there = tuple(each for each in NODES if each != NODES[3])
    found = seated(sit(before), Split(8, 0, 0), before, there)
    assert len(found.engines) == 7
    assert found.inference == (NODES[2],)


def test_gpus_that_make_no_copy_of_the_trainer_go_to_inference() -> None:
    before = Assignment((), Placed(NODES[:4], Layout(tp=4)), NODES[4:])
    found = seated(sit(across_nodes(), num_unfinished=0), Split(0, 12, 2), before, NODES[:14])
    assert found.trainer is not None
    assert len(found.trainer.gpus) == 12
    assert found.inference
    assert sorted(found.gpus) == sorted(NODES[:14])


def test_gpus_beyond_the_trainers_largest_layout_go_to_engines() -> None:
    situation = sit(across_nodes())
    reproducible = replace(situation, spec=replace(SPEC, num_logical_shards=2))
    found = seated(reproducible, Split(1, 12, 2), across_nodes(), NODES)
    assert found.trainer is not None
    assert found.trainer.layout == Layout(tp=4, dp=2)
    assert len(found.engines) == 3
    assert sorted(found.gpus) == sorted(NODES)


def test_inference_has_whole_copies_of_its_layout() -> None:
    situation = sit(across_nodes(), num_unfinished=0)
    placed = Placed(SPEC.placement[Role.INFERENCE].gpus, Layout(tp=2, dp=2))
    pairs = replace(situation, spec=replace(SPEC, placement={**SPEC.placement, Role.INFERENCE: placed}))
    assert fitting(pairs, Split(0, 4, 1), 11) == Split(0, 4, 6)
    before = Assignment((), Placed(NODES[:4], Layout(tp=4)), NODES[4:])
    assert len(seated(pairs, Split(0, 4, 6), before, NODES[:11]).inference) == 6


def test_gpus_of_all_components_are_there() -> None:
    situation = seen(SPEC, as_configured(SPEC), num_unfinished=2)
    assert gpus_there(situation) == SPEC.gpus


def test_only_gpus_that_are_there_are_assigned() -> None:
    before = seated(sit(across_nodes()), Split(4, 4, 4), across_nodes(), NODES)
    for missing in NODES:
        there = tuple(each for each in NODES if each != missing)
        situation = sit(across_nodes())
        found = seated(situation, fitting(situation, Split(4, 4, 4), len(there)), before, there)
        assert set(found.gpus) <= set(there)
