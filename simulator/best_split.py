"""The best fixed split of a scenario's GPUs, as a user would tune it: a baseline without moves.

    value = mean seconds of an iteration under `static` over `NUM_TUNING` seeds, to be low

Order:
1. A family of shares, and the configured split, on the first seed.
2. From the best of them a pattern search (Hooke and Jeeves 1961) on all seeds: GPUs pass between two components, in
   steps from an eighth of the GPUs down to one.
3. At each step also the other orders of prompts, and the other kinds of copies that the job allows.
A caller may ask for fewer seeds, larger last steps, or a search around a split that it knows.

The search knows what a user can measure before the iteration: costs, and lengths of the scenario's law, drawn with
seeds of its own. A trace counts by its moments, as for a policy. Faults are left out. The time of the search is in no
iteration.

Invariants:
- The same scenario and seed give the same split. [test_best_split: the_same_scenario_and_seed]
- The lengths of the reported seed are not among those of the search. [test_best_split: never_draws_the_reported]
- A job can start with the split: the scenario that has it is valid. [test_best_split: a_job_can_start_with]
- No split has a layout without room for the model. [test_best_split: has_room_for_the_model]
- It is no worse than the configured split on the seeds of the search. [test_best_split: no_worse_than_the_configured]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from services.scheduler.policy.opening_order import opening_order
from services.scheduler.state.layouts import engine_size, replica_size, with_dp
from services.scheduler.state.remembered import Remembered, as_configured
from services.scheduler.state.values import JobSpec
from simulator.iteration import SimulatedIteration
from simulator.job_spec import job_of, population_law
from simulator.lengths import LengthLaw
from simulator.scenario import Scenario
from simulator.scenario_checks import scenario_faults
from simulator.scenario_physics import physics_faults
from simulator.scenario_sections import PlacementSection
from simulator.world import Unfinished
from tidegate.config.gpu_lists import gpu_list
from tidegate.config.sections.job import LayoutSection
from tidegate.types import Layout, PromptOrder, Role

NUM_TUNING = 3
"""The seeds of the search. With one, the split fits its lengths: on others it was up to 2 % slower."""

LAST_SEED = 2**32 - 1
"""The seeds of the search go down from the largest one, far from those that people name."""

ACTOR_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
INFERENCE_SHARES = (1 / 16, 1 / 8)
"""The family's shares of all GPUs. `tidegate plan` tries most of them."""

FIRST_STEP_SHARE = 1 / 8
HOPELESS = 1.01
"""A split that is slower than the best one by this factor on a seed is not run on the others."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How thorough a search is. `last_step_share`: of all GPUs; 0: the last step is one GPU."""

    num_seeds: int = NUM_TUNING
    last_step_share: float = 0.0


def _any(scenario: Scenario) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Split:
    """The rollout has the GPUs that the others leave."""

    actor: Layout
    num_inference: int
    order: PromptOrder


@dataclass(frozen=True, slots=True)
class BestSplit:
    """`seconds`: the mean of the search's seeds. `num_runs`: simulated iterations of the search."""

    scenario: Scenario
    split: Split
    seconds: float
    num_runs: int
    seeds: tuple[int, ...]

    @property
    def order(self) -> PromptOrder:
        return self.split.order

    def __str__(self) -> str:
        placed = self.scenario.placement()
        sizes = f"actor {len(placed.actor)}, rollout {len(placed.rollout)}, inference {len(placed.inference)} GPUs"
        return (
            f"{sizes}, prompts {self.order.replace('_', ' ')}; the best of {self.num_runs} simulated iterations on "
            f"other lengths, {self.seconds:.1f} s in their mean"
        )


def best_split(
    scenario: Scenario,
    seed: int | None = None,
    *,
    effort: Effort = Effort(),
    near: Split | None = None,
    is_legal: Callable[[Scenario], bool] = _any,
) -> BestSplit:
    """The split for an iteration with the lengths of `seed`, which the search does not draw.

    `near`: the search begins at this split, and not at the family. `is_legal`: what a job allows besides the scenario's
    own checks.

    ScenarioError: a component has no GPUs in the placement.
    """
    told = _told(scenario)
    seeds = tuning_seeds(scenario.seed if seed is None else seed, effort.num_seeds)
    search = _Search(told, job_of(told, told.read_lengths(seeds[0])), seeds, effort, near, is_legal)
    found = search.best()
    placed = with_split(scenario, found)
    assert placed is not None, "the search tried it"
    return BestSplit(placed, found, search.value(found), search.num_runs, seeds)


def tuning_seeds(reported: int, count: int = NUM_TUNING) -> tuple[int, ...]:
    """The seeds of a search, without the one whose iteration is reported."""
    return tuple(islice((seed for seed in range(LAST_SEED, 0, -1) if seed != reported), count))


def with_split(scenario: Scenario, split: Split) -> Scenario | None:
    """The scenario with the split: actor, rollout and inference, from the first GPU of the cluster on. None where no
    job can start so."""
    num_gpus, size = len(scenario.cluster.gpus()), scenario.costs.engine.gpus_per_engine
    num_actor = split.actor.num_ranks
    num_rollout = (num_gpus - num_actor - split.num_inference) // size * size
    if num_rollout < size or split.num_inference < 1:
        return None
    ends = num_actor, num_actor + num_rollout, num_gpus
    gpus = [gpu_list(range(*each)) for each in ((0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2]))]
    axes = split.actor
    placement = PlacementSection(actor=gpus[0], rollout=gpus[1], inference=gpus[2])
    changed = scenario.model_copy(
        update={
            "cluster": scenario.cluster.model_copy(update={"placement": placement}),
            "actor_layout": LayoutSection(tp=axes.tp, pp=axes.pp, dp=axes.dp, cp=axes.cp, ep=axes.ep, vpp=axes.vpp),
        }
    )
    return None if scenario_faults(changed) or physics_faults(changed) else changed


def split_seconds(scenario: Scenario, order: PromptOrder, seed: int) -> float:
    """The iteration of this seed, as `static_seconds`."""
    return static_seconds(SimulatedIteration(scenario, seed), order)


def static_seconds(simulated: SimulatedIteration, order: PromptOrder) -> float:
    """The iteration under `static`, without the scheduler, which has nothing to move. Infinite where it does not
    end."""
    world = simulated.world(as_configured(simulated.spec))
    size = simulated.workload.group_size
    groups = opening_order(simulated.situations.situation(world, Remembered()), order)
    if groups:
        world.order_queue(group * size + member for group in groups for member in range(size))
    try:
        for _ in world.happenings():
            pass
    except Unfinished:
        return math.inf
    return world.now_s


def _told(scenario: Scenario) -> Scenario:
    """What is known before the iteration: no faults, and a law in the place of a trace."""
    own = scenario.lengths
    if own.law is LengthLaw.TRACE:
        law = population_law(own, scenario.read_lengths())
        moments = {
            "median_tokens": math.exp(law.log_mean),
            "sigma_prompt": law.sigma_prompt,
            "sigma_group": law.sigma_group,
        }
        own = own.model_copy(update={"law": LengthLaw.LOGNORMAL, **moments})
    return scenario.model_copy(update={"faults": (), "lengths": own})


@dataclass
class _Search:
    """`_known`: the seconds of each split on the seeds on which it ran, in the order of the seeds."""

    scenario: Scenario
    spec: JobSpec
    seeds: tuple[int, ...]
    effort: Effort
    near: Split | None
    is_legal: Callable[[Scenario], bool]
    num_runs: int = 0
    _known: dict[Split, list[float]] = field(default_factory=dict)

    def best(self) -> Split:
        num_gpus = len(self.scenario.cluster.gpus())
        first = [self.near] if self.near else self._first()
        found = min(first, key=lambda split: self._seconds(split, 0))
        step = max(1, round(FIRST_STEP_SHARE * num_gpus))
        while step >= max(1, round(self.effort.last_step_share * num_gpus)):
            better = self._better(found, step)
            found, step = (better, step) if better else (found, step // 2)
        return found

    def value(self, split: Split) -> float:
        return sum(self._seconds(split, at) for at in range(len(self.seeds))) / len(self.seeds)

    def _first(self) -> list[Split]:
        """The configured split first: of equal ones the earlier is taken."""
        num_gpus, home = len(self.scenario.cluster.gpus()), self.spec.placement[Role.ACTOR].layout
        order = self._orders()[-1]
        shares = [(actor, inference) for actor in ACTOR_SHARES for inference in INFERENCE_SHARES]
        family = [self._sized(home, actor * num_gpus, inference * num_gpus, order) for actor, inference in shares]
        own = Split(home, len(self.spec.placement[Role.INFERENCE].gpus), order)
        return list(dict.fromkeys([own, *(split for split in family if split)]))

    def _orders(self) -> tuple[PromptOrder, ...]:
        """One order alone where hints do not tell prompts apart."""
        law = self.spec.lengths
        return (PromptOrder.AS_GIVEN,) if law.sigma_hint > law.sigma_prompt else tuple(PromptOrder)

    def _better(self, split: Split, step: int) -> Split | None:
        """The best of the splits around it that are better than it, if there is one."""
        best, best_s = None, self.value(split)
        for other in dict.fromkeys(self._around(split, step)):
            if self._is_hopeful(other, best or split) and (value := self.value(other)) < best_s:
                best, best_s = other, value
        return best

    def _around(self, split: Split, step: int) -> Iterator[Split]:
        num_actor, num_inference = split.actor.num_ranks, split.num_inference
        for actor, inference in ((step, 0), (-step, 0), (0, step), (0, -step), (step, -step), (-step, step)):
            if moved := self._sized(split.actor, num_actor + actor, num_inference + inference, split.order):
                yield moved
        for order in self._orders():
            yield replace(split, order=order)
        for copy in self._kinds():
            if moved := self._sized(copy, num_actor, num_inference, split.order):
                yield moved

    def _kinds(self) -> tuple[Layout, ...]:
        allowed = (self.spec.placement[Role.ACTOR].layout, *self.spec.layouts)
        return tuple(dict.fromkeys(replace(layout, dp=1) for layout in allowed))

    def _sized(self, kind: Layout, num_actor: float, num_inference: float, order: PromptOrder) -> Split | None:
        """As many copies as fit on so many GPUs, at least one; None where they are not legal. Inference gets what makes
        no engine."""
        dp = max(1, int(num_actor) // replica_size(kind))
        actor = with_dp(kind, dp, num_shards=self.spec.num_logical_shards)
        if actor is None or dp > self.spec.num_samples_per_minibatch:
            return None
        size = engine_size(self.spec)
        rest = len(self.scenario.cluster.gpus()) - actor.num_ranks
        num_rollout = (rest - max(1, round(num_inference))) // size * size
        return Split(actor, rest - num_rollout, order) if num_rollout >= size else None

    def _is_hopeful(self, split: Split, best: Split) -> bool:
        """Whether it is about as fast as the best on each seed before the last, one after the other."""
        return all(self._seconds(split, at) <= HOPELESS * self._seconds(best, at) for at in range(len(self.seeds) - 1))

    def _seconds(self, split: Split, at: int) -> float:
        known = self._known.setdefault(split, [])
        while len(known) <= at:
            known.append(self._run(split, self.seeds[len(known)]))
        return known[at]

    def _run(self, split: Split, seed: int) -> float:
        scenario = with_split(self.scenario, split)
        if scenario is None or not self.is_legal(scenario):
            return math.inf
        self.num_runs += 1
        return split_seconds(scenario, split.order, seed)
