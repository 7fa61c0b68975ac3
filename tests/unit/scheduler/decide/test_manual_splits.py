"""Which GPUs a person's request gives to each component, and what a refusal names.

The job: actor on n0/0 and n1/0 (dp 2), rollout on n0/1, n1/1 and n1/3, inference on n0/2 and n1/2 (tp 2), n0/3 on
standby; 4 samples a minibatch, 8 GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from services.scheduler.decide.manual_splits import MoveRefused, Wish, drained_by, migration_of, split_of
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Absence
from services.scheduler.state.manual_moves import ManualMoves
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.types import GpuId, Layout, Role

ACTOR, ROLLOUT, INFERENCE = Role.ACTOR, Role.ROLLOUT, Role.INFERENCE
SPARE = gpu("n0", 3)
HOME = spec().placement
STATIC = StaticPolicy()


@pytest.fixture(scope="module")
def running() -> ClusterState:
    drive = booted(FakeCluster(spec(standby=(SPARE,))))
    return drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))


def no_fault(layout: Layout) -> str | None:
    return None


def split(state: ClusterState, wish: Wish) -> dict[Role, tuple[GpuId, ...]]:
    found = split_of(state, STATIC, wish, no_fault)
    assert all(placed.layout.num_ranks == len(placed.gpus) for placed in found.values())
    return {role: placed.gpus for role, placed in found.items()}


def slots(*names: str) -> tuple[GpuId, ...]:
    return tuple(GpuId(name) for name in names)


CHOSEN: dict[str, tuple[Wish, dict[Role, tuple[GpuId, ...]]]] = {
    "one that shrinks keeps its first GPUs": (Wish({ROLLOUT: 1}), {ROLLOUT: slots("n0/1")}),
    "one that grows gets its own slots first": (Wish({ACTOR: 3}), {ACTOR: slots("n0/0", "n1/0", "n0/3")}),
    "then what others give up": (
        Wish({ACTOR: 4, ROLLOUT: 2}),
        {ACTOR: slots("n0/0", "n1/0", "n0/3", "n1/3"), ROLLOUT: slots("n0/1", "n1/1")},
    ),
    "all three at once": (
        Wish({ACTOR: 1, ROLLOUT: 5, INFERENCE: 2}),
        {ACTOR: slots("n0/0"), ROLLOUT: slots("n0/1", "n1/1", "n1/3", "n0/3", "n1/0")},
    ),
    "the actor in another layout": (Wish({}, Layout(tp=2)), {ACTOR: slots("n0/0", "n1/0")}),
    "the actor on GPUs by name, also those that the wish takes away": (
        Wish({ROLLOUT: 2}, Layout(dp=2), slots("n1/3", "n0/3")),
        {ACTOR: slots("n1/3", "n0/3"), ROLLOUT: slots("n0/1", "n1/1")},
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_gpus_are_chosen_for_each_component(running: ClusterState, case: str) -> None:
    wish, want = CHOSEN[case]
    found = split(running, wish)
    assert found == {role: placed.gpus for role, placed in HOME.items()} | want
    held = [slot for gpus in found.values() for slot in gpus]
    assert len(set(held)) == len(held)


def test_no_drained_gpu_and_no_gone_one_is_chosen(running: ClusterState) -> None:
    token = running.gpus[SPARE].token
    closed = {
        "drained": replace(running, manual=ManualMoves(drained=(SPARE,))),
        "gone": replace(running, absent={SPARE: Absence(token, 1, is_long=True)}),
    }
    for state in closed.values():
        assert split(state, Wish({ACTOR: 3, ROLLOUT: 2}))[ACTOR] == slots("n0/0", "n1/0", "n1/3")


def test_a_later_wish_goes_on_from_the_split_that_was_asked_for(running: ClusterState) -> None:
    asked = {**HOME, ROLLOUT: Placed(HOME[ROLLOUT].gpus[:1], Layout())}
    state = replace(running, manual=ManualMoves(split=asked))
    assert split(state, Wish({ACTOR: 1}))[ROLLOUT] == slots("n0/1")


REFUSED: dict[str, tuple[Wish, str]] = {
    "no whole copies": (
        Wish({INFERENCE: 3}),
        "3 GPUs make no whole copies of the inference, which is tp2, 2 GPUs a copy; with the others so, the inference "
        "can have 2",
    ),
    "more replicas than samples": (Wish({ACTOR: 5, ROLLOUT: 1}), "cannot share a minibatch of 4 samples"),
    "more GPUs than there are": (
        Wish({ACTOR: 4, ROLLOUT: 3}),
        "actor 4, rollout 3, inference 2 are 9 GPUs, and the job has 8; with the others so, the actor can have 1, 2, 3",
    ),
    "nothing is left": (
        Wish({ROLLOUT: 8}),
        "actor 2, rollout 8, inference 2 are 12 GPUs, and the job has 8; with the others so, the rollout can have "
        "1, 2, 3, 4",
    ),
    "another's GPU": (
        Wish({}, Layout(dp=2), slots("n0/0", "n0/1")),
        "n0/1 is the rollout's; --rollout 2 takes GPUs from it, or name others of n0/0, n0/3, n1/0",
    ),
    "the last copy of another": (Wish({}, Layout(), slots("n0/2")), "n0/2 is the inference's; it has one copy alone"),
    "fewer GPUs than ranks": (Wish({}, Layout(dp=2), slots("n0/0")), "2 ranks on 1 GPUs; name 2 of n0/0, n1/0, n0/3"),
    "16 ranks": (
        Wish({}, Layout(dp=16)),
        "dp=16 replicas cannot share a minibatch of 4 samples",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wish_that_cannot_be_is_refused_with_the_numbers(running: ClusterState, case: str) -> None:
    wish, want = REFUSED[case]
    with pytest.raises(MoveRefused, match=re.escape(want)):
        split(running, wish)


POSSIBLE = {(ACTOR, 3), (ROLLOUT, 3)}
"""Sizes of the test below that need no refusal."""


@pytest.mark.parametrize(
    ("role", "size"), [(role, size) for role in Role for size in (3, 5, 6, 8, 16) if (role, size) not in POSSIBLE]
)
def test_what_a_refusal_names_works(running: ClusterState, role: Role, size: int) -> None:
    with pytest.raises(MoveRefused) as refused:
        split(running, Wish({role: size}))
    named = re.search(r"can have ([0-9, ]+)", str(refused.value))
    assert named is not None, refused.value
    for works in map(int, named[1].split(", ")):
        assert len(split(running, Wish({role: works}))[role]) == works


def test_a_drained_gpu_that_is_named_is_refused_with_the_undo(running: ClusterState) -> None:
    state = replace(running, manual=ManualMoves(drained=(SPARE,)))
    with pytest.raises(MoveRefused, match="n0/3: drained by hand; `tidegate drain JOB n0/3 --undo`"):
        split(state, Wish({}, Layout(), (SPARE,)))


def test_a_split_from_which_the_policy_cannot_go_on_is_refused_in_its_words(running: ClusterState) -> None:
    @dataclass(frozen=True)
    class Picky:
        def check(self, spec: JobSpec) -> None:
            if len(spec.placement[ROLLOUT].gpus) < 3:
                raise ValueError("picky needs 3 engines")

        def choose(self, situation: Situation) -> Choice:
            raise AssertionError("not asked")

    with pytest.raises(MoveRefused, match="the job's policy cannot go on from there: picky needs 3 engines"):
        split_of(running, Picky(), Wish({ROLLOUT: 2}), no_fault)


def migrated(state: ClusterState, leaving: tuple[GpuId, ...], coming: tuple[GpuId, ...]) -> Mapping[Role, Placed]:
    return migration_of(state, STATIC, leaving, coming)


def test_an_engine_and_a_rank_migrate_in_place(running: ClusterState) -> None:
    engine = migrated(running, slots("n1/1"), (SPARE,))
    assert engine == {**HOME, ROLLOUT: Placed(slots("n0/1", "n0/3", "n1/3"), Layout(dp=3))}
    rank = migrated(running, slots("n0/0"), (SPARE,))
    assert rank == {**HOME, ACTOR: Placed(slots("n0/3", "n1/0"), Layout(dp=2))}


UNMOVED: dict[str, tuple[tuple[GpuId, ...], tuple[GpuId, ...], str]] = {
    "to a GPU in use": (slots("n1/1"), slots("n0/0"), "n0/0 is the actor's, and a move needs free GPUs; free: n0/3"),
    "a part of a copy": (slots("n0/2"), slots("n0/3"), "n0/2, n1/2 are one copy of the inference and move together"),
    "of two components": (slots("n0/0", "n0/1"), slots("n0/3", "n1/3"), "not at home with one component (actor: n0/0"),
    "from a free one": (slots("n0/3"), slots("n1/1"), "n0/3: not at home with one component"),
    "the same one twice": (slots("n0/2", "n0/2"), slots("n0/3", "n1/3"), "--from names n0/2 twice; name each GPU once"),
    "to the same one": (slots("n0/2", "n1/2"), slots("n0/3", "n0/3"), "--to names n0/3 twice; name each GPU once"),
    "other numbers": (slots("n0/0", "n1/0"), slots("n0/3"), "2 GPUs go to 1; name as many that come as leave"),
}


@pytest.mark.parametrize("case", UNMOVED)
def test_a_migration_that_cannot_be_is_refused_with_what_works(running: ClusterState, case: str) -> None:
    leaving, coming, want = UNMOVED[case]
    with pytest.raises(MoveRefused, match=re.escape(want)):
        migrated(running, leaving, coming)


def drained(state: ClusterState, *targets: str, undo: bool = False) -> tuple[GpuId, ...]:
    return drained_by(state, STATIC, targets, is_undone=undo)


def test_a_gpu_and_a_node_are_drained_by_name(running: ClusterState) -> None:
    assert drained(running, "n1/1", "n0/3") == slots("n1/1", "n0/3")
    assert running.spec is not None
    either = replace(running.spec.placement[INFERENCE], layout=Layout(dp=2))
    state = replace(running, spec=replace(running.spec, placement={**running.spec.placement, INFERENCE: either}))
    assert drained(state, "n1") == slots("n1/0", "n1/1", "n1/2", "n1/3")


UNDRAINED: dict[str, tuple[tuple[str, ...], bool, str]] = {
    "nothing of the job": (("n7",), False, "'n7' is no GPU and no node of the job; it has n0/0, n0/1"),
    "too much": (
        ("n0", "n1/0"),
        False,
        "a component would have no copy (home: actor 2, rollout 3, inference 2); each of these alone can be: n0/0",
    ),
    "not drained": (("n1/1",), True, "n1/1: not drained; drained are none"),
}


@pytest.mark.parametrize("case", UNDRAINED)
def test_a_drain_that_cannot_be_is_refused_with_what_works(running: ClusterState, case: str) -> None:
    targets, undo, want = UNDRAINED[case]
    with pytest.raises(MoveRefused, match=re.escape(want)):
        drained(running, *targets, undo=undo)


def test_a_drain_that_leaves_no_copy_beside_lost_gpus_is_refused(running: ClusterState) -> None:
    lost = slots("n0/0", "n0/1", "n0/2")
    state = replace(running, absent={slot: Absence(running.gpus[slot].token, 1, is_long=True) for slot in lost})
    want = "without n1/0, n1/1 and the lost n0/0, n0/1, n0/2 the job has 3 GPUs"
    with pytest.raises(MoveRefused, match=want) as refused:
        drained(state, "n1/0", "n1/1")
    assert drained(running, "n1/0", "n1/1") == slots("n1/0", "n1/1")
    named = re.search(r"each of these alone can be: (.+)$", str(refused.value))
    assert named is not None, refused.value
    for works in named[1].split(", "):
        assert drained(state, works) == slots(works)
