"""An asynchronous training of several iterations: with a fixed split, or balanced after each iteration.

After an iteration the run measures, over the time of this iteration:

    sequences         the mean number of issued sequences that have not ended
    factor            generated tokens / (seconds * the rate of the told decode steps with as many sequences)
    share             response tokens / tokens that were trained, prompts included
    trainer_tokens_s  share * the told rate of a layout, slower by what replicas waited for the busiest one

(the inference's rate is share * the told one) and asks the balance (`services.scheduler.policy.balance`) for the next
ones' split. Each new measurement, also that of an iteration's tokens, counts as much as all before it together.

Where the rollout runs ahead, the first iteration is not measured: the rollout makes the tokens of several meanwhile,
and has so many sequences never again.

Invariants:
- The same lengths, rules and split give the same run. [test_async_training: the_same_run_again]
- The iterations that are issued at once move nothing. [test_async_training: issued_at_once_move_nothing]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from services.scheduler.policy.balance import Flow, Generating, Sizes, Split, balanced
from services.scheduler.state.layouts import replica_size, with_dp
from simulator.asynchrony.course import Asynchrony, long_workload
from simulator.asynchrony.moves import Mover
from simulator.asynchrony.world import AsyncWorld
from simulator.happenings import What
from simulator.job_spec import measured_costs
from simulator.lengths import Lengths
from simulator.noise import Noise
from simulator.outcome import GpuSpan, spans
from simulator.scenario import Scenario, ScenarioError
from simulator.scenario_physics import fewest_copies
from simulator.training import Measured
from simulator.world import Placement
from tidegate.types import GpuId, Layout


@dataclass(frozen=True, slots=True)
class AsyncRun:
    """`iteration_s`: from one version of the weights to the next; `trained`, `generated`: response tokens in that time.
    `staleness`: response tokens by their staleness. `splits`: (time, split) of each change, the first at 0."""

    seconds: float
    iteration_s: tuple[float, ...]
    trained: tuple[int, ...]
    generated: tuple[int, ...]
    num_tokens: int
    staleness: Mapping[int, int]
    splits: tuple[tuple[float, Split], ...]
    timeline: Mapping[GpuId, tuple[GpuSpan, ...]]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def sizes_of(scenario: Scenario) -> Sizes:
    """The sizes that a split counts in."""
    own, laws = scenario.algorithm, scenario.laws()
    return Sizes(
        len(scenario.cluster.gpus()),
        laws.engine.gpus_per_engine,
        replica_size(_home(scenario)),
        most_copies=own.prompts_per_iteration // own.n_minibatches * own.group_size,
        fewest_copies=fewest_copies(scenario),
        scorer=laws.inference.gpus_per_copy,
    )


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
    work, placement = long_workload(scenario.workload_of(lengths[0]), lengths), _placement(scenario, start, sizes)
    noise = Noise(scenario.noise, scenario.seed)
    world = AsyncWorld(work, scenario.laws(), placement, rules, scenario.reshard_model, noise)
    training = _Training(scenario, world, sizes, start)
    for happening in world.happenings():
        training.look()
        if happening.what is What.GPUS_FREED:
            training.mover.start_engines()
        if balances and happening.what is What.MINIBATCH_STARTED:
            training.balance()
    ends = [0.0, *world.version_at_s]
    return AsyncRun(
        seconds=world.now_s,
        iteration_s=tuple(end - begin for begin, end in pairwise(ends)),
        trained=tuple(each.num_tokens for each in lengths),
        generated=tuple(end - begin for begin, end in pairwise([0, *world.generated_at])),
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
    """What was done by some time. `sequence_s`: the seconds of all issued sequences until they ended."""

    at_s: float = 0.0
    generated: int = 0
    sequence_s: float = 0.0
    version: int = 0


class _Training:
    """What a running training has measured, and its splits."""

    def __init__(self, scenario: Scenario, world: AsyncWorld, sizes: Sizes, start: Split) -> None:
        self._world, self._sizes, self._costs = world, sizes, world.costs
        self._home = _home(scenario)
        self._num_updates = scenario.algorithm.n_minibatches
        self._decode = measured_costs(world.costs, self._home).decode
        self.mover = Mover(world, sizes, self._home)
        self.splits: list[tuple[float, Split]] = [(0.0, start)]
        self._before = _Done()
        self._looked_s = self._sequence_s = 0.0
        self._log_tokens = self._log_sequences = self._log_factor = math.nan

    def look(self) -> None:
        """Adds the time since the last look to the sequences' seconds. Call it before their number changes."""
        now_s = self._world.now_s
        self._sequence_s += self._world.num_unfinished * (now_s - self._looked_s)
        self._looked_s = now_s

    def balance(self) -> None:
        """Once an iteration: changes the split if that gains."""
        world = self._world
        if world.version == self._before.version:
            return
        before, now = self._before, self._done()
        self._before = now
        if not before.version and world.course.rules.staleness:
            # avoid a wrong first move: what was generated is the work of several iterations
            return
        flow = self._flow(before, now)
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
        self.look()
        return _Done(world.now_s, world.num_generated(), self._sequence_s, world.version)

    def _flow(self, before: _Done, now: _Done) -> Flow:
        workload, seconds = self._world.course.workload, now.at_s - before.at_s
        tokens, share = self._trained(now.version - 1)
        per_sequence = tokens / (workload.prompts_per_iteration * workload.group_size)
        sequences = max(1.0, (now.sequence_s - before.sequence_s) / seconds)
        self._log_tokens = _mixed(self._log_tokens, math.log(tokens))
        self._log_sequences = _mixed(self._log_sequences, math.log(sequences))
        # A sequence is half generated in the mean; long ones run longest.
        kv_tokens = workload.prompt_tokens + per_sequence / 2
        told = Generating(self._decode, sequences, kv_tokens, self._costs.engine.max_running)
        rate = max(1, now.generated - before.generated) / seconds
        factor = rate / told.tokens_s(self.splits[-1][1].engines)
        self._log_factor = _mixed(self._log_factor, math.log(factor))
        generating = replace(told, sequences=math.exp(self._log_sequences), factor=math.exp(self._log_factor))
        return Flow(
            num_tokens=math.exp(self._log_tokens),
            rollout_tokens_s=generating.tokens_s,
            inference_tokens_per_gpu_s=share * self._costs.inference.rate_tokens_per_s,
            trainer_tokens_s=lambda copies: share * self._trainer_rate(copies),
            fixed_s=self._num_updates * self._costs.trainer.update_s(self._home) + self._costs.sync.sync_s,
        )

    def _trainer_rate(self, copies: int) -> float:
        """The told rate, slower by what replicas wait for the busiest one."""
        measured = sum(self._world.trainer.trained_in.values(), Measured())
        told_s = self._costs.trainer.tokens_s(1.0, replace(self._home, dp=copies))
        return measured.even_s / measured.seconds / told_s

    def _trained(self, iteration: int) -> tuple[float, float]:
        """The response tokens of an iteration that was trained, and their share of its tokens."""
        workload = self._world.course.workload
        size = workload.prompts_per_iteration
        responses = list(chain.from_iterable(workload.lengths.turns[iteration * size : (iteration + 1) * size]))
        tokens = sum(map(sum, responses))
        return float(tokens), tokens / sum(map(workload.num_tokens, responses))


def _mixed(before: float, now: float) -> float:
    return now if math.isnan(before) else (before + now) / 2
