"""`static`, collocated: all GPUs generate, then infer, then train."""

from __future__ import annotations

from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.state.remembered import Remembered, as_configured
from tests.unit.scheduler.situations import after, job, seen

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)
HOME = as_configured(SPEC)


def test_an_iteration_has_three_placements_and_home() -> None:
    memory, sizes = Remembered(), []
    for steps in (
        {"num_unfinished": 30},
        {"num_unfinished": 1},
        {"are_inferred": False},
        {"num_done": 0},
        {"num_done": 2},
        {"num_done": 3},
    ):
        choice = PhasesPolicy().choose(seen(SPEC, HOME, remembered=memory, **steps))
        memory, chosen = after(choice), choice.assignment
        assert choice.trains is (chosen.trainer is not None)
        sizes.append((len(chosen.engines), len(chosen.trainer.gpus) if chosen.trainer else 0, len(chosen.inference)))
    assert sizes == [(8, 0, 0), (8, 0, 0), (0, 0, 8), (0, 8, 0), (0, 8, 0), (4, 2, 2)]
