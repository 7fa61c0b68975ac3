"""The opening of an iteration as `tide` sees it, for several tests."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.policy.tide.memory import TideMemory
from services.scheduler.state.observed import TrainerRate
from services.scheduler.state.remembered import Remembered, as_configured
from services.scheduler.state.values import JobSpec
from tests.unit.scheduler.situations import generation, job, seen
from tidegate.types import Role

SPEC = job(actor=4, rollout=10, inference=2, actor_tp=2, rollout_tp=2, prompts=32, group_size=4, minibatches=4)
RATES = (TrainerRate(SPEC.placement[Role.ACTOR].layout, 500.0),)


def opening(
    spec: JobSpec = SPEC, *, measured: tuple[TrainerRate, ...] = RATES, median_tokens: float = 4000.0
) -> Situation:
    """Nothing is generated yet, and nothing remembered."""
    home = as_configured(spec)
    count = spec.num_prompts * spec.group_size
    picture = generation(spec, home.engines, lengths=(0,) * count, places=(-1,) * count, max_running=16)
    # As far apart as the told law says.
    hints = tuple(median_tokens * 1.065 ** (prompt - spec.num_prompts / 2) for prompt in range(spec.num_prompts))
    picture = replace(picture, hints=hints)
    return seen(spec, home, picture=picture, measured=measured, remembered=Remembered())


def memory_of(choice: Choice) -> TideMemory:
    assert isinstance(choice.memory, TideMemory)
    return choice.memory
