"""An asynchronous training of several iterations: with a fixed split, or balanced after each iteration.

After an iteration the run measures, over the time of this iteration:

    rollout_tokens_per_gpu_s     generated tokens / GPU seconds in which engines generated
    trainer_tokens_s             the told rate of a layout, slower by what replicas waited for the busiest one

(the inference's rate is told) and asks the balance (`services.scheduler.policy.balance`) for the next ones' split.
Each new measurement, also that of an iteration's tokens, counts as much as all before it together.

Invariant: the same lengths, rules and split give the same run. [test_async_training: the_same_run_again]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from services.scheduler.policy.balance import Flow, Sizes, Split, balanced
from services.scheduler.state.layouts import replica_size, with_dp
from simulator.asynchrony.course import Asynchrony, long_workload
from simulator.asynchrony.moves import Mover
from simulator.asynchrony.world import AsyncWorld
from simulator.gpus import Doing, Gpus
from simulator.happenings import What
from simulator.lengths import Lengths
from simulator.outcome import GpuSpan, spans
from simulator.scenario import Scenario, ScenarioError
from simulator.training import Measured
from simulator.world import Placement
from tidegate.types import GpuId, Layout


@dataclass(frozen=True, slots=True)
class AsyncRun:
    """`iteration_s`: from one version of the weights to the next. `staleness`: response tokens by their staleness.
    `splits`: (time, split) of each change, the first at 0."""

    seconds: float
    iteration_s: tuple[float, ...]
    num_tokens: int
    staleness: Mapping[int, int]
    splits: tuple[tuple[float, Split], ...]
    timeline: Mapping[GpuId, tuple[GpuSpan, ...]]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def sizes_of(scenario: Scenario) -> Sizes:
    """The sizes that a split counts in."""
    own = scenario.algorithm
    per_minibatch = own.prompts_per_iteration // own.n_minibatches * own.group_size
    engine, copy = scenario.costs.engine.gpus_per_engine, replica_size(_home(scenario))
    return Sizes(len(scenario.cluster.gpus()), engine, copy, most_copies=per_minibatch)


def split_of(scenario: Scenario) -> Split:
    """The split of the scenario's placement."""
    placement, sizes = scenario.placement(), sizes_of(scenario)
    rollout, actor = len(placement.rollout), len(placement.actor)
    return Split(rollout // sizes.engine, actor // sizes.copy, len(placement.inference))


def simulate_async(
    scenario: Scenario,
    rules: Asynchrony,
    lengths: Sequence[Lengths],
    *,
    split: Split | None = None,
    balances: bool = False,
) -> AsyncRun:
    """A training with as many iterations as there are `lengths`. `split`: at its start; None: that of the scenario.

    ScenarioError: the GPUs do not make the split. Unfinished: work waits for GPUs for ever.
    """
    sizes, start = sizes_of(scenario), split_of(scenario) if split is None else split
    one = scenario.workload_of(lengths[0])
    world = AsyncWorld(
        long_workload(one, lengths), scenario.costs, _placement(scenario, start, sizes), rules, scenario.model
    )
    training = _Training(scenario, world, sizes, start)
    for happening in world.happenings():
        if happening.what is What.GPUS_FREED:
            training.mover.start_engines()
        if balances and happening.what is What.MINIBATCH_STARTED:
            training.balance()
    ends = [0.0, *world.version_at_s]
    return AsyncRun(
        seconds=world.now_s,
        iteration_s=tuple(end - begin for begin, end in pairwise(ends)),
        num_tokens=sum(each.num_tokens for each in lengths),
        staleness=world.course.staleness(),
        splits=tuple(training.splits),
        timeline={gpu: spans(marks, world.now_s) for gpu, marks in world.gpus.doings.items()},
    )


def _home(scenario: Scenario) -> Layout:
    home = scenario.placement().layout
    if home is None:
        raise ScenarioError("cluster.placement.actor has no GPUs: an asynchronous training needs some")
    return home


def _placement(scenario: Scenario, split: Split, sizes: Sizes) -> Placement:
    """The trainer first, then the inference, then the engines."""
    gpus = scenario.cluster.gpus()
    counts = split.copies * sizes.copy, split.inference, split.engines * sizes.engine
    if sum(counts) > len(gpus):
        raise ScenarioError(f"{split} are {sum(counts)} GPUs, and the cluster has {len(gpus)}: take fewer")
    actor, inference, rollout = counts
    layout = with_dp(_home(scenario), split.copies)
    rest = gpus[actor + inference :]
    return Placement(gpus, rest[:rollout], gpus[actor : actor + inference], gpus[:actor], layout)


@dataclass(frozen=True, slots=True)
class _Done:
    """What was done by some time: seconds of all GPUs together, response tokens, iterations."""

    generating_s: float
    generated: int
    version: int


class _Training:
    """What a running training has measured, and its splits."""

    def __init__(self, scenario: Scenario, world: AsyncWorld, sizes: Sizes, start: Split) -> None:
        self._world, self._sizes, self._costs = world, sizes, scenario.costs
        self._home = _home(scenario)
        self._num_updates = scenario.algorithm.n_minibatches
        self._share = world.workload.response_share
        self.mover = Mover(world, sizes, self._home)
        self.splits: list[tuple[float, Split]] = [(0.0, start)]
        self._generating = GpuSeconds(Doing.GENERATING)
        self._before = _Done(0.0, 0, 0)
        self._log_rollout = self._log_tokens = math.nan

    def balance(self) -> None:
        """Once an iteration: changes the split if that gains."""
        world = self._world
        if world.version == self._before.version:
            return
        now = self._done()
        flow, self._before = self._flow(self._before, now), now
        switch = self._costs.switch
        move_s = switch.release_s + switch.acquire_s + switch.resubmit_s + switch.resharding_s(None, is_new=True)
        left = world.course.workload.num_iterations - now.version
        at = self.splits[-1][1]
        split = balanced(at, flow, self._sizes, iterations_left=left, move_s=move_s)
        if split != at:
            self.mover.go_to(split)
            self.splits.append((world.now_s, split))

    def _done(self) -> _Done:
        world = self._world
        world.rollout.advance()
        lengths, _ = world.rollout.columns.snapshot({name: each.steps for name, each in world.rollout.engines.items()})
        return _Done(self._generating.until(world.gpus, world.now_s), int(lengths.sum()), world.version)

    def _flow(self, before: _Done, now: _Done) -> Flow:
        """The trainer ends no iteration without generated tokens, so every stage has worked."""
        rate = (now.generated - before.generated) / (now.generating_s - before.generating_s)
        self._log_rollout = _mixed(self._log_rollout, math.log(rate))
        self._log_tokens = _mixed(self._log_tokens, math.log(self._trained_tokens(now.version - 1)))
        return Flow(
            num_tokens=math.exp(self._log_tokens),
            rollout_tokens_per_gpu_s=math.exp(self._log_rollout),
            inference_tokens_per_gpu_s=self._costs.inference.rate_tokens_per_s * self._share,
            trainer_tokens_s=self._trainer_rate,
            fixed_s=self._num_updates * self._costs.trainer.fixed_s + self._costs.sync.sync_s,
        )

    def _trainer_rate(self, copies: int) -> float:
        """The told rate, slower by what replicas wait for the busiest one."""
        measured = sum(self._world.trainer.trained_in.values(), Measured())
        layout = replace(self._home, dp=copies)
        return self._share / self._costs.trainer.tokens_s(1.0, layout) * measured.even_s / measured.seconds

    def _trained_tokens(self, iteration: int) -> float:
        """The response tokens of an iteration that was trained."""
        workload = self._world.course.workload
        size = workload.prompts_per_iteration
        rows = workload.lengths.turns[iteration * size : (iteration + 1) * size]
        return float(sum(map(sum, chain.from_iterable(rows))))


def _mixed(before: float, now: float) -> float:
    return now if math.isnan(before) else (before + now) / 2


class GpuSeconds:
    """The seconds of all GPUs in one activity, read again and again as time goes on."""

    def __init__(self, doing: Doing) -> None:
        self._doing = doing
        self._done_s = 0.0
        self._num_read: dict[GpuId, int] = {}

    def until(self, gpus: Gpus, now_s: float) -> float:
        open_s = 0.0
        for gpu, marks in gpus.doings.items():
            first = self._num_read.get(gpu, 0)
            for (start_s, doing), (end_s, _) in pairwise(marks[first:]):
                if doing is self._doing:
                    self._done_s += end_s - start_s
            self._num_read[gpu] = len(marks) - 1
            if marks[-1][1] is self._doing:
                open_s += now_s - marks[-1][0]
        return self._done_s + open_s
