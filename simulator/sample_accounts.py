"""The accounts of an iteration's samples, as its rollout and its actor report them.

    generated = trained + filtered

Groups without a spread of rewards are filtered: they are generated, and nobody trains them.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.state import events as ev
from services.scheduler.state.values import Fate
from simulator.voice import fate
from simulator.world import World

DIGEST_STEP = 0x9E3779B97F4A7C15
"""Odd, so that a sample's number times it, modulo 2^64, is its own."""
ZERO_STD = "zero_std"
"""The reason that an actor reports for a filtered group."""


def generated(world: World) -> ev.IterationReported:
    return _report(world, _fate(range(len(world.rollout.sequences))), Fate(), ())


def trained(world: World) -> ev.IterationReported:
    left_out = world.workload.filtered
    kept = [group for group in world.trainer.trained if group not in left_out]
    filtered = [group for group in world.trainer.trained if group in left_out]
    filtered_fates = (_fate(_samples(world, filtered), reason=ZERO_STD),) if filtered else ()
    return _report(world, Fate(), _fate(_samples(world, kept)), filtered_fates)


def _report(world: World, generated: Fate, trained: Fate, filtered: tuple[Fate, ...]) -> ev.IterationReported:
    return ev.IterationReported(generated, trained, filtered, (), 0, (("seconds", world.now_s - world.began_s),))


def _samples(world: World, groups: Iterable[int]) -> list[int]:
    size = world.workload.group_size
    return [group * size + member for group in groups for member in range(size)]


def _fate(samples: Iterable[int], *, reason: str = "") -> Fate:
    return fate([(each + 1) * DIGEST_STEP for each in samples], reason=reason)
