"""The parts of a move, from the records of a job."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.control_moves import Records, from_log, slot_moves

RELEASE, TAKE = "j/1/t1", "j/1/t2"


def planned(transition: str, role: str, at_ms: int, **gpus: list[str]) -> dict[str, Any]:
    one: dict[str, Any] = {
        "transition": transition,
        "role": role,
        "change": "resize",
        "layout": None,
        "reason": "",
        "comes": [],
    }
    return {
        "kind": "decision",
        "at_ms": at_ms,
        "incarnation": 1,
        "iteration": 0,
        "reason": "",
        "planned": [{**one, "leaves": [], **gpus}],
    }


def closed(transition: str, at_ms: int, outcome: str = "committed") -> dict[str, Any]:
    return {"kind": "closed", "at_ms": at_ms, "transition": transition, "outcome": outcome}


def records(
    *, giver: str = "rollout", taker: str = "actor", outcome: str = "committed", held_until_s: float | None = None
) -> Records:
    """The release is decided at second 10, and the slot trains at second 13."""
    lines = [
        planned(RELEASE, giver, 10_000, leaves=["n0/2"]),
        closed(RELEASE, 11_000),
        planned(TAKE, taker, 11_010, comes=["n0/2"]),
        closed(TAKE, 12_500, outcome),
    ]
    hold = [] if held_until_s is None else [_hold(2, 11.02), _hold(3, held_until_s), _hold(4, 12.6), _hold(5, 12.8)]
    planned_moves, committed, iterations = from_log(lines)
    return Records(
        planned=planned_moves,
        committed=committed,
        iterations=iterations,
        answered=[(f"{RELEASE}/resize/{giver}/e1/a0", 10.03), (f"{TAKE}/resize/actor/e1/a0", 11.04), *hold],
        released={RELEASE: 11.0},
        switched={TAKE: (12.4, {"build": 1.2, "vote": 0.0})},
        training={"n0/2": [5.0, 13.0]},
    )


@pytest.mark.parametrize("giver", ["rollout", "inference"])
def test_the_parts_of_a_move_add_up_to_the_time_from_its_decision_to_its_first_step(giver: str) -> None:
    (move,) = slot_moves(records(giver=giver))
    assert (move.giver, move.num_slots) == (giver, 1)
    assert move.total_s == pytest.approx(3.0)
    assert move.decide_and_tell_s == pytest.approx(0.03 + 0.04)
    assert (move.drain_s, move.switch_s, move.wait_s) == pytest.approx((0.97, 1.36, 0.6))
    assert move.row()["switch_build_s"] == 1.2
    assert "switch_vote_s" not in move.row()


def _hold(number: int, at_s: float) -> tuple[str, float]:
    return f"j/1/i0/hold-{number}/actor/e1/a0", at_s


def test_the_end_of_a_hold_is_the_schedulers_time() -> None:
    (move,) = slot_moves(records(held_until_s=12.45))
    assert move.decide_and_tell_s == pytest.approx(0.07 + 0.05)
    assert move.total_s == pytest.approx(3.0)


def test_a_hold_that_begins_after_the_switch_is_of_another_move() -> None:
    of = records(held_until_s=11.03)
    (move,) = slot_moves(of)
    assert move.decide_and_tell_s == pytest.approx(0.07)


@pytest.mark.parametrize(
    "other",
    [records(taker="inference"), records(outcome="aborted"), records(giver="actor")],
    ids=["to the inference", "that was aborted", "within the actor"],
)
def test_a_move_of_another_kind_is_left_out(other: Records) -> None:
    assert slot_moves(other) == []
