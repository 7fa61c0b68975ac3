"""A good schedule of an iteration whose lengths are known, with every switch at its real cost: searched, not optimal.

A schedule is what `tide` decides (`given.Schedule`): when the trainer gets its first GPUs, how many train and infer
during each minibatch, in which order prompts begin. The search starts from what `tide` itself did, and from a few
shapes by the size of the cluster; every candidate is run in the simulator. Each step changes a few things of one of the
`KEPT` best, or draws a schedule anew. What is not in the family (engines that move between two optimizer updates,
orders of single sequences) is not found: the true optimum may be shorter, and none is shorter than the bound (`bound`).

Invariants: the same scenario, seed and number of evaluations give the same schedule; it is never below the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from services.scheduler.policy.situation import engine_size, replica_size
from services.scheduler.policy.tide import TidePolicy
from simulator.given import Given, Schedule
from simulator.happenings import What
from simulator.iterating import Simulated
from simulator.outcome import Run
from simulator.run import simulate
from simulator.scenario import Scenario
from tidegate.types import Role

KEPT = 3
SHAPES = ((0.08, (0.18, 0.8), 0.25), (0.13, (0.18, 0.85), 0.25), (0.2, (0.25, 0.85), 0.0))
"""Start as a share of tide's iteration, trainer GPUs of the first and the last minibatch as shares of all, and the
share of the shortest prompts that come between the longest."""
STARTS_S = (-30.0, -10.0, -3.0, -1.0, 1.0, 3.0, 10.0, 30.0)
"""Of an iteration of 600 s."""
SHARES = (-0.1, -0.05, 0.05, 0.1)
NOISES = (0.0, 0.1, 0.2, 0.3)
ANEW = 10
"""One candidate in so many is none of the best ones changed."""


@dataclass(frozen=True, slots=True)
class Order:
    """Prompts by a key under lognormal noise, the longest first, `share` of the shortest one before each."""

    key: int
    share: float
    noise: float
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Found:
    seconds: float
    schedule: Schedule
    order: Order


@dataclass(frozen=True, slots=True)
class _Space:
    """What can be chosen."""

    num_gpus: int
    unit: int
    engine: int
    num_minibatches: int
    scale: float
    keys: tuple[NDArray[np.float64], ...]
    """By prompt: its hint, its longest and its mean response."""


def clairvoyant_schedule(scenario: Scenario, *, seed: int | None = None, evaluations: int = 200) -> Found:
    """ValueError for fewer evaluations than the search begins with; errors as `simulate`."""
    if evaluations <= len(SHAPES):
        raise ValueError(f"evaluations={evaluations}: the search begins with {len(SHAPES) + 1}, allow as many at least")
    own = simulate(scenario, TidePolicy(), seed=seed, directly=True)
    space = _space(scenario, own)
    rng = np.random.default_rng(own.seed)
    best = sorted((_run(scenario, own.seed, *each, space) for each in _begins(space, own)), key=_seconds)
    for _ in range(evaluations - len(best)):
        best = sorted(best, key=_seconds)[:KEPT]
        found = _changed(best[int(rng.integers(len(best)))], space, rng)
        candidate = _run(scenario, own.seed, *found, space)
        if all(candidate.seconds != each.seconds for each in best):
            best.append(candidate)
    return min(best, key=_seconds)


def _seconds(found: Found) -> float:
    return found.seconds


def _space(scenario: Scenario, own: Run) -> _Space:
    simulated = Simulated(scenario, own.seed)
    lengths = np.array([[float(sum(turns)) for turns in row] for row in simulated.workload.lengths.turns])
    hints = np.array(simulated.workload.lengths.hints)
    return _Space(
        num_gpus=len(scenario.cluster.gpus()),
        unit=replica_size(simulated.spec.placement[Role.ACTOR].layout),
        engine=engine_size(simulated.spec),
        num_minibatches=simulated.spec.num_minibatches,
        scale=own.iteration_s / 600.0,
        keys=(hints, lengths.max(axis=1), lengths.mean(axis=1)),
    )


def _begins(space: _Space, own: Run) -> Iterator[tuple[Schedule, Order]]:
    yield as_schedule(own, space.num_minibatches), Order(0, 0.25, 0.0, 0)
    for start, (first, last), share in SHAPES:
        along = np.linspace(0.0, 1.0, space.num_minibatches)
        trainer = tuple(int(each) for each in np.round(space.num_gpus * first ** (1 - along) * last**along))
        inference = (max(1, round(space.num_gpus / 11)),) * space.num_minibatches
        yield Schedule(start * own.iteration_s, trainer, inference, ()), Order(0, share, 0.0, 0)


def as_schedule(run: Run, num_minibatches: int) -> Schedule:
    """What a policy did, its order of prompts left out."""
    with_trainer = [each for each in run.decisions if each.assignment.trainer is not None]
    begins = [each.at_s for each in run.history if each.what is What.MINIBATCH_STARTED]
    trainer, inference = [], []
    for at_s in begins[:num_minibatches]:
        latest = [each for each in with_trainer if each.at_s <= at_s][-1].assignment
        assert latest.trainer is not None, "only such were looked at"
        trainer.append(len(latest.trainer.gpus))
        inference.append(max(1, len(latest.inference)))
    return Schedule(with_trainer[0].at_s, tuple(trainer), tuple(inference), ())


def _run(scenario: Scenario, seed: int, schedule: Schedule, order: Order, space: _Space) -> Found:
    placed = replace(schedule, order=_prompts(order, space))
    run = simulate(scenario, TidePolicy(planner=Given(placed)), seed=seed, directly=True)
    return Found(run.iteration_s, placed, order)


def _prompts(order: Order, space: _Space) -> tuple[int, ...]:
    noise = np.random.default_rng(order.noise_seed).standard_normal(len(space.keys[0]))
    longest = np.argsort(-space.keys[order.key] * np.exp(order.noise * noise), kind="stable")
    num = round(order.share * longest.size)
    short, rest = longest[::-1][:num], longest[: longest.size - num]
    place = np.concatenate((np.arange(num) - 0.5, np.arange(rest.size)))
    return tuple(np.concatenate((short, rest))[np.argsort(place, kind="stable")].tolist())


def _changed(found: Found, space: _Space, rng: np.random.Generator) -> tuple[Schedule, Order]:
    schedule, order = found.schedule, found.order
    if not rng.integers(ANEW):
        return _anew(space, rng), order
    for _ in range(int(rng.integers(1, 5))):
        match int(rng.integers(5)):
            case 0:
                start_s = max(0.0, schedule.start_s + float(rng.choice(STARTS_S)) * space.scale)
                schedule = replace(schedule, start_s=start_s)
            case 1 | 2:
                schedule = replace(schedule, trainer=_stepped(schedule.trainer, space.unit, space, rng))
            case 3:
                schedule = replace(schedule, inference=_stepped(schedule.inference, 1, space, rng))
            case _:
                order = _reordered(order, rng)
    return schedule, order


def _anew(space: _Space, rng: np.random.Generator) -> Schedule:
    """Anywhere: from some best a better one may be too many steps away."""
    start_s = float(rng.uniform(0.0, 0.3)) * 600.0 * space.scale
    most = max(1, (space.num_gpus - 1) // space.unit)
    trainer = space.unit * rng.integers(1, most + 1, space.num_minibatches)
    inference = rng.integers(1, max(1, space.num_gpus // 6) + 2, space.num_minibatches)
    return Schedule(start_s, tuple(trainer.tolist()), tuple(inference.tolist()), ())


def _stepped(sizes: tuple[int, ...], unit: int, space: _Space, rng: np.random.Generator) -> tuple[int, ...]:
    """One minibatch's, by one or more units in either direction."""
    at, step = int(rng.integers(len(sizes))), unit * max(1, round(space.num_gpus / 16 / unit))
    by = int(rng.choice((-step, -unit, unit, step)))
    most = max(unit, (space.num_gpus - 1) // unit * unit)
    return (*sizes[:at], min(most, max(unit, sizes[at] + by)), *sizes[at + 1 :])


def _reordered(order: Order, rng: np.random.Generator) -> Order:
    match int(rng.integers(3)):
        case 0:
            return replace(order, share=min(1.0, max(0.0, order.share + float(rng.choice(SHARES)))))
        case 1:
            return replace(order, key=int(rng.integers(3)))
        case _:
            return replace(order, noise=float(rng.choice(NOISES)), noise_seed=int(rng.integers(1000)))
