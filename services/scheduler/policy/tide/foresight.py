"""Which plan `tide` goes on with: it forecasts lengths, lays out the remaining work, and searches plans. Pure.

- When an iteration opens, the search begins at a coarse family of plans.
- From then on each search tries the neighbours of the remembered plan, so that the plan improves while it waits for its
  start.
- When GPUs are about to move, the search takes `rounds` rounds.

Invariants:
- A plan that moves the trainer now is taken only where it ends sooner by more than `least_gain_s`.
  [test_tide_policy: moves_only_where_that_gains]
- Where every component is at home, leaving it has to pay for the way back. [test_tide_policy: where_the_way_home_costs]
- The told rate of the trainer is doubted while nothing was measured and lengths are not as told, and only then.
  [test_foresight: told_rate_is_doubted]
- An iteration opens with the trainer's GPUs lent to the rollout only where it ends sooner by as much.
  [test_tide_policy: where_lending_the_trainers_gpus]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.situation import Alternative, Situation
from services.scheduler.policy.tide.cluster import Cluster, Plans, can_move, cluster_of
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.policy.tide.memory import PlannedStage, TideMemory, TidePlan
from services.scheduler.policy.tide.outlook import outlook
from services.scheduler.policy.tide.plans import Found, best_of, family, search
from services.scheduler.policy.tide.prompt_order import queue_in
from services.scheduler.state.remembered import Assignment
from tidegate.short_lists import counted
from tidegate.types import GpuId, Role

FAR_S = 1e6
"""The end that a remembered plan has where the forecast has none."""

HOPELESS = 1.15
"""A coarse plan with every component at home that takes so many times as long as lending is not searched further: in 36
settings a search gained at most 10 % there."""

DOUBTED_RATE = 0.92
"""So many times its told rate a trainer counts as fast that was never measured, once lengths are not as told. A
trainer that is slower than told starts too late and shows it late; one that is faster starts a little early. On twenty
tuning seeds the worst case of `told_wrong` takes 1.2 % less, and 1.8 % with 0.85; hints of other prompts alone cost
0.8 % more then, and 2 %."""


@dataclass(frozen=True, slots=True)
class TideRules:
    """The rules of `scheduler.tide`.

    least_gain_s: a move of the trainer has to gain more seconds than this.
    lead_s: engines are asked to leave this long, and the time of a release, ahead of a minibatch's end.
    short_share, shorts_a_long: the start's order of prompts (`opening_order`).
    fresh_share: a plan that is older than this share of its forecast remaining time is searched again, in one round.
    rounds: of the search when an iteration opens and when GPUs are about to move.
    """

    least_gain_s: float = 2.0
    lead_s: float = 0.3
    short_share: float = 0.25
    shorts_a_long: int = 1
    fresh_share: float = 0.01
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("least_gain_s", "lead_s", "fresh_share"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"tide: {name}={value} is below 0; set it to 0 to do without")
        if not 0 <= self.short_share <= 1:
            raise ValueError(f"tide: short_share={self.short_share} is a share of the prompts, it is from 0 to 1")
        for name in ("shorts_a_long", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"tide: {name}={value} is below 1, with which nothing could be chosen")


@dataclass(frozen=True, slots=True)
class Foresight:
    rules: TideRules

    def plan(
        self,
        situation: Situation,
        assigned: Assignment,
        memory: TideMemory,
        there: tuple[GpuId, ...],
        *,
        is_move: bool,
        order: tuple[int, ...] = (),
    ) -> Found:
        """The plan to go on with. `is_move`: it is carried out at once. `order`: of prompts; empty: the queue's own."""
        cluster = believed(situation, cluster_of(situation, assigned, there))
        forecast = self._forecast(situation, cluster, order)
        num_left = num_to_come(situation)
        known = of_memory(situation, memory, num_left)
        if known is not None and not is_move:
            found = search(forecast, known, rounds=1)
            return replace(found, weighed=(alternative("the plan, improved", found, is_chosen=True),))
        coarse = family(cluster, num_left, forecast.span_s, infers_ahead=forecast.infers_ahead)
        begin = coarse if known is None else known
        found = search(forecast, begin, rounds=self.rules.rounds)
        found = replace(found, weighed=(alternative(_told(found), found, is_chosen=True),))
        return self._or_stay(forecast, found) if is_move else found

    def kept(
        self,
        situation: Situation,
        home: Assignment,
        there: tuple[GpuId, ...],
        lent: Found,
        *,
        order: tuple[int, ...] = (),
    ) -> tuple[Found, bool]:
        """The plan of an iteration that opens, and whether it opens at home, with the trainer on its GPUs for its first
        minibatch.

        `lent`: the plan that lends the rollout all GPUs. It is taken where it ends sooner by more than `least_gain_s`.
        """
        if home.trainer is None:
            return lent, False
        cluster = replace(
            believed(situation, cluster_of(situation, home, there)),
            num_trainer_gpus=len(home.trainer.gpus),
            is_open=True,
            until_s=None,
        )
        forecast = self._forecast(situation, cluster, order)
        later = Plans(np.zeros(1), lent.plan.trainer[:, 1:], lent.plan.inference[:, 1:])
        num_left = later.trainer.shape[1]
        coarse = family(cluster, num_left, forecast.span_s)
        found = best_of(forecast, Plans.of(later, coarse))
        if found.end_s < HOPELESS * lent.end_s:
            found = search(forecast, found.plan, rounds=self.rules.rounds)
        stay_s, way_s = forecast.stays_s(num_left), way_home_s(situation, cluster, int(lent.plan.inference[0, -1]))
        what, ends_s = "every component at home", found.end_s
        if stay_s - way_s < found.end_s:
            what, ends_s = f"every component stays at home, and saves the way back of {way_s:.1f} s", stay_s - way_s
            found = replace(found, end_s=stay_s)
        is_kept = not lent.end_s < ends_s - self.rules.least_gain_s
        return _of_two(lent, found, what, is_other=is_kept), is_kept

    def saved_by_staying_s(
        self, situation: Situation, home: Assignment, there: tuple[GpuId, ...], plan: TidePlan
    ) -> float:
        """By how many seconds the iteration ends sooner where every component stays at home until its end, than by the
        plan and the way home after it."""
        cluster, num_left = believed(situation, cluster_of(situation, home, there)), num_to_come(situation)
        way_s = situation.costs.acquire_s
        if num_left:
            way_s = way_home_s(situation, cluster, plan.stages[-1].num_inference_gpus)
        ends_s = (plan.ends_at_ms - situation.now_ms) / 1000
        return ends_s + way_s - self._forecast(situation, cluster, ()).stays_s(num_left)

    def _forecast(self, situation: Situation, cluster: Cluster, order: tuple[int, ...]) -> Forecast:
        waiting = queue_in(situation, order) if order else None
        num_slots = max(1, cluster.num_engines) * cluster.max_running
        left = outlook(situation, situation.expected_lengths, num_slots=num_slots, waiting=waiting)
        return Forecast(left, cluster, situation.costs)

    def _or_stay(self, forecast: Forecast, found: Found) -> Found:
        """The plan, or, where moving now does not pay, the same plan with no move before the next minibatch."""
        cluster = forecast.cluster
        if not cluster.num_trainer_gpus:
            return found
        trainer, inference = found.plan.trainer.copy(), found.plan.inference.copy()
        trainer[0, 0], inference[0, 0] = cluster.num_trainer_gpus, cluster.num_inference_gpus
        stays = best_of(forecast, Plans(found.plan.start_s, trainer, inference))
        least_s = self.rules.least_gain_s
        does_stay = stays.end_s <= found.end_s + least_s
        what = f"the trainer stays on {counted(cluster.num_trainer_gpus, 'GPU')} (a move must gain {least_s:g} s)"
        return _of_two(found, stays, what, is_other=does_stay)


def believed(situation: Situation, cluster: Cluster) -> Cluster:
    """The cluster with the trainer's rates as far as they are believed (`DOUBTED_RATE`)."""
    if situation.trainer.training.measured or situation.law_in_force == situation.lengths:
        return cluster
    return replace(cluster, unit_rates=DOUBTED_RATE * cluster.unit_rates)


def alternative(what: str, found: Found, *, is_chosen: bool) -> Alternative:
    return Alternative(what, min(found.end_s, FAR_S), is_chosen)


def way_home_s(situation: Situation, cluster: Cluster, num_inference_gpus: int) -> float:
    """Seconds from the last update, where the trainer has all GPUs but these, until every component is at home: the
    trainer leaves, and engines come."""
    at_last = np.array([cluster.num_gpus - num_inference_gpus, len(situation.spec.placement[Role.ACTOR].gpus)])
    before, after = cluster.units(at_last)
    return float(cluster.switch_s[before, after]) + situation.costs.acquire_s


def _told(found: Found) -> str:
    """A plan that was searched, in short."""
    starts_s, stages = float(found.plan.start_s[0]), [int(gpus) for gpus in found.plan.trainer[0]]
    return f"the trainer starts in {starts_s:.0f} s on {stages_text(stages)}"


def stages_text(num_gpus: Sequence[int]) -> str:
    """The trainer's GPUs in the stages of a plan, which has none once the last minibatch is over."""
    if not num_gpus:
        return "no GPU"
    *before, last = num_gpus
    return ", ".join([*map(str, before), counted(last, "GPU")])


def _of_two(found: Found, other: Found, what: str, *, is_other: bool) -> Found:
    """The one that is taken, with both in what it was compared with."""
    before = tuple(replace(each, is_chosen=each.is_chosen and not is_other) for each in found.weighed)
    weighed = (*before, alternative(what, other, is_chosen=is_other))
    return replace(other if is_other else found, weighed=weighed)


def num_to_come(situation: Situation) -> int:
    """Minibatches for which the trainer can still move: those that are not done, without an open one that it cannot
    leave."""
    training = situation.trainer.training
    return situation.spec.num_minibatches - training.num_minibatches_done - (not can_move(situation))


def planned(situation: Situation, found: Found) -> TidePlan:
    """The plan in the form that is remembered."""
    plan = found.plan
    stages = tuple(
        PlannedStage(int(trainer), int(inference))
        for trainer, inference in zip(plan.trainer[0], plan.inference[0], strict=True)
    )
    starts_s, infers_s = float(plan.start_s[0]), float(plan.infers_s[0])
    return TidePlan(
        starts_at_ms=situation.now_ms + round(1000 * starts_s),
        stages=stages,
        ends_at_ms=situation.now_ms + round(1000 * min(found.end_s, FAR_S)),
        made_at_ms=situation.now_ms,
        infers_at_ms=situation.now_ms + round(1000 * infers_s) if infers_s < starts_s else None,
    )


def of_memory(situation: Situation, memory: TideMemory, num_left: int) -> Plans | None:
    """The last `num_left` stages of the remembered plan; None where it has fewer."""
    plan = memory.plan
    if plan is None or len(plan.stages) < num_left:
        return None
    stages = plan.stages[len(plan.stages) - num_left :]
    infers_at_ms = plan.starts_at_ms if plan.infers_at_ms is None else plan.infers_at_ms
    return Plans(
        np.array([max(0.0, (plan.starts_at_ms - situation.now_ms) / 1000)]),
        np.array([[stage.num_trainer_gpus for stage in stages]]),
        np.array([[stage.num_inference_gpus for stage in stages]]),
        infer_s=np.array([max(0.0, (infers_at_ms - situation.now_ms) / 1000)]),
    )


def unrevised(situation: Situation, memory: TideMemory) -> TidePlan | None:
    """The remembered plan as it was made, from the next minibatch on. None where it has too few stages: a death made
    minibatches anew."""
    plan, num_left = memory.plan, num_to_come(situation)
    if plan is None or len(plan.stages) < num_left:
        return None
    starts_at_ms = max(plan.starts_at_ms, situation.now_ms)
    return replace(plan, starts_at_ms=starts_at_ms, stages=plan.stages[len(plan.stages) - num_left :])
