"""`fused`: phases whose inference begins in the tail of the rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.policy.fused import FusedPolicy
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from tests.unit.scheduler.situations import after, job, seen

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)
HOME = as_configured(SPEC)
POLICY = FusedPolicy(0.25)


def sizes(at: Assignment) -> tuple[int, int, int]:
    return len(at.engines), len(at.trainer.gpus) if at.trainer else 0, len(at.inference)


def test_an_iteration_has_four_placements_and_home() -> None:
    memory, at, found = Remembered(), HOME, []
    for steps in (
        {"num_unfinished": 48},
        {"num_unfinished": 13},
        {"num_unfinished": 12, "max_running": 4},
        {"num_unfinished": 1, "max_running": 4},
        {"are_inferred": False},
        {"num_done": 0},
        {"num_done": 2},
        {"num_done": 3},
    ):
        choice = POLICY.choose(seen(SPEC, at, remembered=memory, **steps))
        memory, at = after(choice), choice.assignment
        assert choice.trains is (at.trainer is not None)
        found.append(sizes(at))
    assert found == [(8, 0, 0), (8, 0, 0), (3, 0, 5), (3, 0, 5), (0, 0, 5), (0, 8, 0), (0, 8, 0), (4, 2, 2)]


@pytest.mark.parametrize(
    ("steps", "want"),
    {
        "slots": ({"num_unfinished": 12, "max_running": 5}, 3),
        "one engine": ({"num_unfinished": 12}, 1),
        "KV tokens": ({"num_unfinished": 12, "kv_use": 0.35}, 4),
        "KV tokens that fill every engine": ({"num_unfinished": 12, "kv_use": 0.8}, 8),
        "too many for fewer": ({"num_unfinished": 12, "max_running": 1}, 8),
    }.values(),
)
def test_the_engines_that_go_on_hold_every_unfinished_sequence(steps: dict[str, float], want: int) -> None:
    opened = POLICY.choose(seen(SPEC, HOME, num_unfinished=48, remembered=Remembered()))
    situation = seen(SPEC, opened.assignment, remembered=after(opened), **steps)  # type: ignore[arg-type] # counts
    num_kept = len(POLICY.choose(situation).assignment.engines)
    assert num_kept == want


def test_the_engines_with_the_most_kv_tokens_go_on() -> None:
    opened = POLICY.choose(seen(SPEC, HOME, num_unfinished=48, remembered=Remembered()))
    situation = seen(SPEC, opened.assignment, remembered=after(opened), num_unfinished=12, max_running=6)
    picture = situation.generation
    engines = tuple(replace(each, num_kv_tokens=at) for at, each in enumerate(picture.engines))
    situation = replace(situation, generation=replace(picture, engines=engines))
    assert POLICY.choose(situation).assignment.engines == opened.assignment.engines[-2:]


def test_a_rollout_without_a_tail_is_followed_by_inference_on_every_gpu() -> None:
    opened = POLICY.choose(seen(SPEC, HOME, num_unfinished=48, remembered=Remembered()))
    ended = seen(SPEC, opened.assignment, are_inferred=False, remembered=after(opened))
    assert sizes(POLICY.choose(ended).assignment) == (0, 0, 8)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"tail_share={share} is a share"):
        FusedPolicy(share)
