"""Which plan `tide` goes on with: lengths are foreseen, what is left is laid out, and plans are searched. Pure.

At the opening of an iteration the search begins at a coarse family of plans; from then on it tries the neighbours of
the plan that is remembered, so that it gets better while it waits for its start. When GPUs are about to move the search
takes `rounds` rounds, from the family's plans too.

Invariants: a plan is left for one that moves the trainer now only where that lowers its score by more than
`least_gain_s`, and by more than `least_payback` times what the move itself takes; the trainer's GPUs are lent to the
rollout only where that gains as much: of the score at the opening, of the end before the last minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.lengths_law import final_lengths
from services.scheduler.policy.outlook import outlook
from services.scheduler.policy.situation import Situation
from services.scheduler.policy.tide.cluster import Cluster, Plans, cluster_of
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.policy.tide.plans import Found, best_of, family, search
from services.scheduler.policy.tide.prompt_order import queue_in
from services.scheduler.state.remembered import Assignment, PlannedStage, Remembered, TidePlan
from tidegate.types import GpuId

WORTH_SEARCHING = 1.02
"""Times what is without a wait: a plan with one that scores worse to begin with is not searched from."""

FAR_S = 1e6
"""Told for an end that no plan has."""


@dataclass(frozen=True, slots=True)
class TideRules:
    """`lead_s`: by how much more than a release's own time engines are told ahead of a minibatch's end. `short_share`
    and `shorts_a_long`: the start's order of prompts (`prompt_order`). `max_overfull`: running sequences a slot that a
    plan may leave once no sequence waits. `rounds` of the search when an iteration
    opens and when GPUs are about to move; else it is one, when the plan is older than `fresh_share` of what it forecast
    to be left."""

    least_gain_s: float = 2.0
    least_payback: float = 1.0
    lead_s: float = 0.3
    short_share: float = 0.25
    shorts_a_long: int = 1
    max_overfull: float = 1.25
    fresh_share: float = 0.01
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("least_gain_s", "least_payback", "lead_s", "fresh_share"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"tide: {name}={value} is below 0; set it to 0 to do without")
        if not 0 <= self.short_share <= 1:
            raise ValueError(f"tide: short_share={self.short_share} is a share of the prompts, it is from 0 to 1")
        for name in ("max_overfull", "shorts_a_long", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"tide: {name}={value} is below 1, with which nothing could be chosen")


@dataclass(frozen=True, slots=True)
class Foresight:
    """Plans by forecast."""

    rules: TideRules

    def plan(
        self,
        situation: Situation,
        memory: Remembered,
        there: tuple[GpuId, ...],
        *,
        is_move: bool,
        order: tuple[int, ...] = (),
    ) -> Found:
        """`is_move`: it is carried out at once. `order`: of prompts, if not the queue's own."""
        assert memory.assignment is not None, "an iteration opens with an assignment"
        cluster = cluster_of(situation, memory.assignment, there, trained_on=memory.trained_on)
        forecast = self._forecast(situation, cluster, order)
        num_left = num_to_come(situation)
        known = of_memory(situation, memory, num_left)
        if known is not None and not is_move:
            return search(forecast, known, rounds=1)
        coarse = family(cluster, num_left, forecast.span_s)
        begin = coarse if known is None else Plans.of(known, coarse)
        found = search(forecast, begin, rounds=self.rules.rounds)
        found = self._or_stay(forecast, found) if is_move else found
        can_lend = memory.is_begun and cluster.num_trainer_gpus > 0
        can_wait = situation.num_unfinished and can_lend and num_left == 1
        return self._or_wait(forecast, found) if can_wait else found

    def kept(
        self,
        situation: Situation,
        home: Assignment,
        there: tuple[GpuId, ...],
        lent: Found,
        *,
        order: tuple[int, ...] = (),
    ) -> Found | None:
        """With the iteration opened at home, the trainer on its GPUs for its first minibatch: the plan of the others.
        None where lending the rollout all of them, as `lent` does, has a score that is lower by what it takes to let go
        of them and load."""
        if home.trainer is None:
            return None
        cluster = replace(
            cluster_of(situation, home, there),
            num_trainer_gpus=len(home.trainer.gpus),
            is_open=True,
            until_s=None,
        )
        forecast = self._forecast(situation, cluster, order)
        later = Plans(np.zeros(1), lent.plan.trainer[:, 1:], lent.plan.inference[:, 1:])
        coarse = family(cluster, later.trainer.shape[1], forecast.span_s)
        found = search(forecast, Plans.of(later, coarse), rounds=self.rules.rounds)
        return None if lent.score_s < found.score_s - self._lending_s(forecast, lent.plan) else found

    def _forecast(self, situation: Situation, cluster: Cluster, order: tuple[int, ...]) -> Forecast:
        final = final_lengths(situation.generation, situation.lengths)
        waiting = queue_in(situation, order) if order else None
        num_slots = max(1, cluster.num_engines) * cluster.max_running
        left = outlook(situation, final, num_slots=num_slots, waiting=waiting)
        return Forecast(left, cluster, situation.costs, self.rules.max_overfull)

    def _or_stay(self, forecast: Forecast, found: Found) -> Found:
        """The same plan from the next minibatch on, with nothing moved now, where moving does not pay."""
        cluster = forecast.cluster
        if not cluster.num_trainer_gpus:
            return found
        trainer, inference = found.plan.trainer.copy(), found.plan.inference.copy()
        trainer[0, 0], inference[0, 0] = cluster.num_trainer_gpus, cluster.num_inference_gpus
        stays = best_of(forecast, Plans(found.plan.start_s, trainer, inference))
        now, then = cluster.units(np.array([cluster.num_trainer_gpus, found.plan.trainer[0, 0]]))
        return stays if stays.score_s <= found.score_s + self._least_s(float(cluster.switch_s[now, then])) else found

    def _or_wait(self, forecast: Forecast, found: Found) -> Found:
        """The last minibatch, which is next, after the rollout and on all GPUs, where that pays for giving up the
        trainer's."""
        waits = best_of(forecast, replace(found.plan, waits=True))
        if waits.score_s > found.score_s * WORTH_SEARCHING:
            return found
        waits = search(forecast, waits.plan, rounds=self.rules.rounds)
        if not waits.end_s < found.end_s - self._lending_s(forecast, waits.plan):
            return found
        cluster = forecast.cluster
        num_engines = (cluster.num_gpus - int(waits.plan.inference[0, 0])) // cluster.engine_size
        start_s = np.array([forecast.over_s(num_engines)])
        return replace(waits, plan=replace(waits.plan, start_s=start_s))

    def _lending_s(self, forecast: Forecast, plan: Plans) -> float:
        """What lending the trainer's GPUs has to gain: engines let go of those of the plan's next minibatch, and the
        trainer is loaded on them."""
        cluster = forecast.cluster
        back = int(cluster.units(plan.trainer[0, :1].astype(np.float64))[0])
        return self._least_s(forecast.costs.release_s + float(cluster.switch_s[0, back]))

    def _least_s(self, move_s: float) -> float:
        return max(self.rules.least_gain_s, self.rules.least_payback * move_s)


def num_to_come(situation: Situation) -> int:
    """Minibatches that are not open yet."""
    training = situation.trainer.training
    return situation.spec.num_minibatches - training.num_minibatches_done - (not training.is_at_boundary)


def planned(situation: Situation, found: Found) -> TidePlan:
    """As it is remembered."""
    plan = found.plan
    stages = tuple(
        PlannedStage(int(trainer), int(inference))
        for trainer, inference in zip(plan.trainer[0], plan.inference[0], strict=True)
    )
    return TidePlan(
        starts_at_ms=situation.now_ms + round(1000 * float(plan.start_s[0])),
        stages=stages,
        waits=plan.waits,
        ends_at_ms=situation.now_ms + round(1000 * min(found.end_s, FAR_S)),
        made_at_ms=situation.now_ms,
    )


def of_memory(situation: Situation, memory: Remembered, num_left: int) -> Plans | None:
    """The remembered plan's last stages, without a wait; None where there are not as many."""
    plan = memory.plan
    if plan is None or len(plan.stages) < num_left:
        return None
    stages = plan.stages[len(plan.stages) - num_left :]
    return Plans(
        np.array([max(0.0, (plan.starts_at_ms - situation.now_ms) / 1000)]),
        np.array([[stage.num_trainer_gpus for stage in stages]]),
        np.array([[stage.num_inference_gpus for stage in stages]]),
    )
