"""`tide`, Tidegate's own policy: forecast the iteration's end under many plans, carry out the next move of the best.

An iteration:
1. It opens with every GPU in the rollout. Where lending the trainer's GPUs would not pay, it opens with every component
   at home. The order of prompts feeds the trainer early and leaves no long tail. Where hints do not tell it, it is made
   anew as responses end (`prompt_order`).
2. While the trainer has no GPUs, its plan is improved whenever it has aged. A plan says when the trainer gets GPUs, and
   how many GPUs train and infer during each minibatch.
3. When the planned start has come, the first minibatch's GPUs move. In a fixed order inference may get its GPUs
   earlier: the trainer waits for the lowest number, and inference does not.
4. When a minibatch's last group has been taken, its end is known. Before that end, by the time that engines need to let
   go, the plan is searched again, and the next minibatch's GPUs move.
5. Where gradients are carried, a minibatch that has not got its last group is looked at again while GPUs are idle: free
   ones, and engines without a sequence. Its GPUs change where that gains as much as any move must.
6. The rollout's end leaves its GPUs to inference; inference's end leaves them to the trainer. An iteration that opened
   at home keeps them there where that would not pay for the way home at its end.

A death is answered at once, with the remaining GPUs. A GPU that comes back is used from the next move on.

Invariants:
- The trainer moves once a minibatch. Deaths and the ends of rollout and inference add moves, and so do idle GPUs where
  gradients are carried. [test_tide_policy: while_a_minibatch_is_open]
  [test_tide_policy: an_open_minibatch_keeps_its_gpus]
- A trainer without GPUs has a start, and begins at the latest when no sequence is unfinished.
  [test_tide_policy: begins_at_the_latest]
- Every choice is legal on the GPUs that are there; a lack of GPUs raises no error.
  [test_tide_policy: without_gpus_for_a_copy]
- While groups are left, no GPU is idle that a component with work could use, unless every component stays at home.
  [test_tide_policy: gpus_of_an_ended_rollout] [test_tide_policy: where_the_way_home_costs_more]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from services.scheduler.policy.situation import Alternative, Choice, Situation, Split
from services.scheduler.policy.tide.cluster import (
    can_move,
    can_train,
    fitting,
    gpus_there,
    num_idle_engines,
)
from services.scheduler.policy.tide.foresight import (
    FAR_S,
    Foresight,
    TideRules,
    num_to_come,
    planned,
    stages_text,
    unrevised,
)
from services.scheduler.policy.tide.memory import TideMemory
from services.scheduler.policy.tide.prompt_order import orders_at_opening, probing_order
from services.scheduler.policy.tide.seating import seated
from services.scheduler.state.layouts import engine_size
from services.scheduler.state.remembered import Assignment, as_configured
from services.scheduler.state.values import JobSpec
from tidegate.short_lists import counted
from tidegate.types import GpuId, Role

SOON_S = 0.5
"""A start that is nearer counts as now: the next decision may come no sooner."""

AGAIN_S, AGAIN_SHARE = 0.5, 0.05
"""Prompts get another order no sooner than this, and this share of the remaining time, after the last one. With
0.01 in place of the share iterations have more orders and end no sooner, in eight settings on six seeds."""

LOOKED_AGAIN_S = 1.0
"""An open minibatch is searched for no sooner after the last search: events come much more often."""


@dataclass(frozen=True, slots=True)
class TidePolicy:
    """`revises`: whether later plans may differ from the first one of the iteration. False is a baseline, which shows
    what looking again is worth."""

    rules: TideRules = field(default_factory=TideRules)
    revises: bool = True

    def check(self, spec: JobSpec) -> None:
        """It can run every job: a minibatch that does not divide is split unevenly."""

    def choose(self, situation: Situation) -> Choice:
        choice, rules = self._answered(situation), self.rules
        memory = choice.memory
        assert isinstance(memory, TideMemory), "every choice of this policy has its memory"
        if not _orders_again(situation, memory):
            return choice
        order = probing_order(situation, short_share=rules.short_share, shorts_a_long=rules.shorts_a_long)
        if not order:
            return choice
        return replace(choice, memory=replace(memory, ordered_at_ms=situation.now_ms), group_order=order)

    def _answered(self, situation: Situation) -> Choice:
        there, recalled = gpus_there(situation), situation.recalled(TideMemory)
        if not num_to_come(situation) and situation.trainer.training.is_at_boundary:
            return self._home(situation, recalled[1] if recalled else TideMemory(), there)
        if recalled is None:
            is_begun = situation.trainer.placed is not None and _coming(situation) > 0
            return (self._taken_up if is_begun else self._opened)(situation, there)
        before, memory = recalled
        assigned = _repaired(situation, before, memory, there)
        if assigned is not before and memory.is_begun and _is_home(situation, before, there):
            # A component of an iteration that opened at home has ended.
            memory, _ = self._planned(situation, assigned, memory, there, is_move=False)
            if self._stays(situation, before, memory, there) is not None:
                assigned = before
        if assigned is not before:
            memory = replace(memory, is_begun=memory.is_begun and assigned.trainer is not None)
        if not memory.is_begun:
            return self._before_training(situation, assigned, memory, there, is_as_planned=assigned is before)
        return self._during_training(situation, assigned, memory, there, is_as_planned=assigned is before)

    def _opened(self, situation: Situation, there: tuple[GpuId, ...]) -> Choice:
        lent = Split(len(there) // engine_size(situation.spec), 0, 0)
        at_home = Assignment(as_configured(situation.spec).engines, None, ())
        assigned, memory = seated(situation, lent, at_home, there), TideMemory()
        if not can_train(situation, len(there)) or not situation.num_unfinished:
            return self._before_training(situation, assigned, memory, there, is_as_planned=False)
        foresight, home = Foresight(self.rules), _at_home(situation, there)
        orders = orders_at_opening(
            situation, short_share=self.rules.short_share, shorts_a_long=self.rules.shorts_a_long
        )
        plans = [
            (each, foresight.plan(situation, assigned, memory, there, is_move=False, order=each)) for each in orders
        ]
        order, found = min(plans, key=lambda each: each[1].end_s)
        is_kept = False
        if home is not None:
            found, is_kept = foresight.kept(situation, home, there, found, order=order)
        memory = replace(memory, plan=planned(situation, found), ordered_at_ms=situation.now_ms)
        if home is not None and is_kept:
            memory = replace(memory, is_begun=True, num_answered=1)
            reason = f"lending the trainer's GPUs would not pay; the end in {found.end_s:.0f} s"
            return replace(_chosen(situation, home, memory, reason, order=order), alternatives=found.weighed)
        reason = f"every GPU generates; {_described(situation, memory)}"
        ask_in_s = max(_moves_in_s(situation, assigned, memory), SOON_S)
        choice = _chosen(situation, assigned, memory, reason, order=order, ask_in_s=ask_in_s)
        return replace(choice, alternatives=found.weighed)

    def _taken_up(self, situation: Situation, there: tuple[GpuId, ...]) -> Choice:
        """The first choice in an iteration in which the trainer has trained already: it starts from the present
        GPUs."""
        present = Assignment(
            engines=tuple(engine.gpus for engine in situation.engines),
            trainer=situation.trainer.placed,
            inference=situation.inference.gpus,
        )
        is_open = not situation.trainer.training.is_at_boundary
        split = Split(0, situation.trainer.num_gpus, len(present.inference))
        split = fitting(situation, split, len(there), keeps_trainer=is_open)
        memory = TideMemory(is_begun=True, num_answered=_coming(situation))
        seats = seated(situation, split, present, there)
        return self._during_training(situation, seats, memory, there, is_as_planned=True)

    def _before_training(
        self,
        situation: Situation,
        assigned: Assignment,
        memory: TideMemory,
        there: tuple[GpuId, ...],
        *,
        is_as_planned: bool,
    ) -> Choice:
        if not can_train(situation, len(there)):
            too_few = f"{counted(len(there), 'GPU')}, too few for a copy of the trainer"
            return _chosen(situation, assigned, memory, too_few)
        is_due = not situation.num_unfinished or _is_due(situation, memory)
        weighed: tuple[Alternative, ...] = ()
        if is_due or not (is_as_planned and self._is_fresh(situation, memory)):
            memory, weighed = self._planned(situation, assigned, memory, there, is_move=is_due)
        starts_in_s = _starts_in_s(situation, memory)
        # A start that is due is searched for more widely, and a later start may turn out to be better.
        if is_due and (starts_in_s <= SOON_S or not situation.num_unfinished):
            choice = self._moved(situation, assigned, memory, there, "the trainer starts")
            return replace(choice, alternatives=weighed)
        if _moves_in_s(situation, assigned, memory) <= min(SOON_S, starts_in_s - SOON_S):
            return replace(self._inferred_ahead(situation, assigned, memory, there), alternatives=weighed)
        ask_in_s = max(_moves_in_s(situation, assigned, memory), SOON_S)
        choice = _chosen(situation, assigned, memory, _described(situation, memory), ask_in_s=ask_in_s)
        return replace(choice, alternatives=weighed)

    def _inferred_ahead(
        self, situation: Situation, before: Assignment, memory: TideMemory, there: tuple[GpuId, ...]
    ) -> Choice:
        """The choice that gives inference its GPUs ahead of the trainer. It keeps them until the trainer starts."""
        assert memory.plan is not None, "only what is planned is carried out"
        split = _without_trainer(situation, memory.plan.stages[0].num_inference_gpus, len(there))
        assigned = seated(situation, split, before, there)
        reason = f"inference starts; {_described(situation, memory)}"
        ask_in_s = max(_starts_in_s(situation, memory), SOON_S)
        return _chosen(situation, assigned, memory, reason, ask_in_s=ask_in_s)

    def _planned(
        self,
        situation: Situation,
        assigned: Assignment,
        memory: TideMemory,
        there: tuple[GpuId, ...],
        *,
        is_move: bool,
    ) -> tuple[TideMemory, tuple[Alternative, ...]]:
        if not self.revises and (plan := unrevised(situation, memory)) is not None:
            return replace(memory, plan=plan), ()
        found = Foresight(self.rules).plan(situation, assigned, memory, there, is_move=is_move)
        return replace(memory, plan=planned(situation, found)), found.weighed

    def _is_fresh(self, situation: Situation, memory: TideMemory) -> bool:
        """Whether a new plan would hardly differ from this one."""
        plan = memory.plan
        if plan is None or plan.ends_at_ms - plan.made_at_ms >= 1000 * FAR_S:
            return False
        return situation.now_ms - plan.made_at_ms <= self.rules.fresh_share * (plan.ends_at_ms - plan.made_at_ms)

    def _during_training(
        self,
        situation: Situation,
        assigned: Assignment,
        memory: TideMemory,
        there: tuple[GpuId, ...],
        *,
        is_as_planned: bool,
    ) -> Choice:
        training = situation.trainer.training
        coming = _coming(situation)
        if coming >= situation.spec.num_minibatches:
            return _chosen(situation, assigned, memory, f"minibatch {coming - 1} is the last")
        if memory.num_answered > coming:
            return self._looked_again(situation, assigned, memory, there, is_as_planned=is_as_planned)
        if not can_move(situation):
            if training.closes_at_ms is None:
                return _chosen(situation, assigned, memory, f"minibatch {coming - 1} is open")
            lead_s = situation.costs.release_s + self.rules.lead_s
            ahead_s = (training.closes_at_ms - situation.now_ms) / 1000 - lead_s
            if ahead_s > 0:
                reason = f"minibatch {coming - 1} ends in {ahead_s + lead_s:.1f} s"
                return _chosen(situation, assigned, memory, reason, ask_in_s=ahead_s)
        memory, weighed = self._planned(situation, assigned, memory, there, is_move=True)
        choice = self._moved(situation, assigned, memory, there, f"minibatch {coming} is next")
        return replace(choice, alternatives=weighed)

    def _looked_again(
        self,
        situation: Situation,
        assigned: Assignment,
        memory: TideMemory,
        there: tuple[GpuId, ...],
        *,
        is_as_planned: bool,
    ) -> Choice:
        """The choice for a minibatch that has its GPUs. Where gradients are carried and GPUs are idle, it gets others
        if that pays."""
        why = f"minibatch {_coming(situation)} has its GPUs"
        is_moving = situation.trainer.placed != assigned.trainer
        is_fixed = is_moving or not (situation.spec.carries_gradients and can_move(situation))
        if is_fixed or not _has_idle_gpus(situation):
            return _chosen(situation, assigned, memory, why)
        if is_as_planned and _age_s(situation, memory) < LOOKED_AGAIN_S:
            return _chosen(situation, assigned, memory, why, ask_in_s=SOON_S)
        has = situation.trainer.num_gpus, len(assigned.inference)
        # The neighbours of the plan come first: a search is dear, and mostly nothing is to be moved.
        for is_move in (False, True):
            memory, weighed = self._planned(situation, assigned, memory, there, is_move=is_move)
            split = _split_planned(situation, memory, len(there))
            is_same = (split.num_trainer_gpus, split.num_inference_gpus) == has
            if is_same or _starts_in_s(situation, memory) > SOON_S:
                return _chosen(situation, assigned, memory, why, ask_in_s=SOON_S)
        choice = self._moved(situation, assigned, memory, there, f"minibatch {_coming(situation)} goes on")
        return replace(choice, alternatives=weighed)

    def _moved(
        self, situation: Situation, before: Assignment, memory: TideMemory, there: tuple[GpuId, ...], why: str
    ) -> Choice:
        """The choice that carries out the plan's first stage."""
        assert memory.plan is not None, "only what is planned is carried out"
        split = _split_planned(situation, memory, len(there))
        assigned, described = seated(situation, split, before, there), _described(situation, memory)
        if assigned != before and (saved_s := self._stays(situation, before, memory, there)) is not None:
            assigned, described = before, _staying(saved_s, self.rules.least_gain_s)
        memory = replace(
            memory,
            is_begun=assigned.trainer is not None,
            num_answered=_coming(situation) + 1 if assigned.trainer else 0,
        )
        return _chosen(situation, assigned, memory, f"{why}; {described}")

    def _stays(
        self, situation: Situation, before: Assignment, memory: TideMemory, there: tuple[GpuId, ...]
    ) -> float | None:
        """The seconds that are saved where every component stays at home. None: one is elsewhere, or the plan gains
        enough to pay for the way home after it."""
        if memory.plan is None or not _is_home(situation, before, there):
            return None
        saved_s = Foresight(self.rules).saved_by_staying_s(situation, before, there, memory.plan)
        return saved_s if saved_s > -self.rules.least_gain_s else None

    def _home(self, situation: Situation, memory: TideMemory, there: tuple[GpuId, ...]) -> Choice:
        home = as_configured(situation.spec)
        if not set(there).issuperset(home.gpus):
            home = seated(situation, _split_of(situation), home, there)
        reason = "all minibatches are done: every component is where it is placed"
        return _chosen(situation, home, replace(memory, plan=None), reason)


def _staying(saved_s: float, least_gain_s: float) -> str:
    if saved_s >= 0:
        return f"every component stays at home, which saves {saved_s:.1f} s with the way back"
    least = f"a move must gain {least_gain_s:g} s"
    return f"every component stays at home, which costs {-saved_s:.1f} s with the way back ({least})"


def _at_home(situation: Situation, there: tuple[GpuId, ...]) -> Assignment | None:
    """Every component at home, and engines on the GPUs that no home has. None where a GPU of a home is not there, or
    the trainer is elsewhere, so that it would have to be loaded."""
    home = as_configured(situation.spec)
    if not set(there).issuperset(home.gpus) or situation.trainer.placed != home.trainer:
        return None
    return seated(situation, _split_of(situation), home, there)


def _is_home(situation: Situation, assigned: Assignment, there: tuple[GpuId, ...]) -> bool:
    """Whether every component is at home, on GPUs that are there. Engines may have further ones."""
    home = _at_home(situation, there)
    if home is None or (assigned.trainer, assigned.inference) != (home.trainer, home.inference):
        return False
    if not set(there).issuperset(assigned.gpus):
        return False
    return set(assigned.engines).issuperset(as_configured(situation.spec).engines)


def _split_of(situation: Situation) -> Split:
    """The split of the homes."""
    sizes = {role: len(situation.spec.placement[role].gpus) for role in Role}
    return Split(sizes[Role.ROLLOUT] // engine_size(situation.spec), sizes[Role.ACTOR], sizes[Role.INFERENCE])


def _repaired(situation: Situation, before: Assignment, memory: TideMemory, there: tuple[GpuId, ...]) -> Assignment:
    """The assignment on the GPUs that are there, without GPUs for a component whose work is done. `before` itself where
    there is nothing to repair."""
    has_lost = not set(there).issuperset(before.gpus)
    has_ended = not situation.num_unfinished and bool(before.engines)
    has_inferred = situation.is_inferred and bool(before.inference)
    if not (has_lost or has_ended or has_inferred):
        return before
    alive = set(there)
    num_trainer = sum(gpu in alive for gpu in before.trainer.gpus) if before.trainer else 0
    num_inference = sum(gpu in alive for gpu in before.inference)
    if memory.is_begun:
        is_open = not situation.trainer.training.is_at_boundary
        split = fitting(situation, Split(0, num_trainer, num_inference), len(there), keeps_trainer=is_open)
    elif situation.num_unfinished:
        split = _without_trainer(situation, num_inference, len(there))
    else:
        split = Split(0, 0, len(there))
    return seated(situation, split, before, there)


def _without_trainer(situation: Situation, num_inference: int, num_gpus: int) -> Split:
    num_engines = max(1, (num_gpus - num_inference) // engine_size(situation.spec))
    return Split(num_engines, 0, min(num_inference, num_gpus - num_engines * engine_size(situation.spec)))


def _orders_again(situation: Situation, memory: TideMemory) -> bool:
    """Whether responses may show another order of prompts than when these got theirs."""
    plan, now_ms, before_ms = memory.plan, situation.now_ms, memory.ordered_at_ms
    if plan is None or before_ms is None:
        return plan is not None
    return now_ms - before_ms >= max(1000 * AGAIN_S, AGAIN_SHARE * (plan.ends_at_ms - before_ms))


def _has_idle_gpus(situation: Situation) -> bool:
    return bool(situation.free or num_idle_engines(situation) or not situation.engines)


def _split_planned(situation: Situation, memory: TideMemory, num_gpus: int) -> Split:
    """The split of the plan's first stage. After the rollout the trainer has all GPUs but those of inference, as the
    forecast reckons."""
    assert memory.plan is not None, "asked once it is planned"
    stage = memory.plan.stages[0]
    num_trainer = stage.num_trainer_gpus if situation.num_unfinished else num_gpus - stage.num_inference_gpus
    return fitting(situation, Split(0, num_trainer, stage.num_inference_gpus), num_gpus)


def _age_s(situation: Situation, memory: TideMemory) -> float:
    """Seconds since the last search."""
    return math.inf if memory.plan is None else (situation.now_ms - memory.plan.made_at_ms) / 1000


def _is_due(situation: Situation, memory: TideMemory) -> bool:
    """Whether the planned start has come. It has not at the moment of planning: an iteration opens with every GPU in
    the rollout."""
    plan = memory.plan
    return plan is not None and plan.made_at_ms < situation.now_ms and _starts_in_s(situation, memory) <= SOON_S


def _starts_in_s(situation: Situation, memory: TideMemory) -> float:
    assert memory.plan is not None, "asked once it is planned"
    return (memory.plan.starts_at_ms - situation.now_ms) / 1000


def _moves_in_s(situation: Situation, assigned: Assignment, memory: TideMemory) -> float:
    """Seconds until the plan's next move: that of inference ahead of the trainer, or the trainer's start."""
    starts_in_s = _starts_in_s(situation, memory)
    assert memory.plan is not None, "asked once it is planned"
    is_ahead = not assigned.inference and not situation.is_inferred and situation.num_unfinished
    if memory.plan.infers_at_ms is None or not is_ahead:
        return starts_in_s
    return min(starts_in_s, (memory.plan.infers_at_ms - situation.now_ms) / 1000)


def _coming(situation: Situation) -> int:
    """The index of the next minibatch to begin."""
    return situation.spec.num_minibatches - num_to_come(situation)


def _chosen(
    situation: Situation,
    assigned: Assignment,
    memory: TideMemory,
    reason: str,
    *,
    order: Iterable[int] = (),
    ask_in_s: float | None = None,
) -> Choice:
    return Choice(
        assignment=assigned,
        trains=memory.is_begun,
        reason=f"tide: {reason}; {assigned}",
        memory=memory,
        group_order=tuple(order),
        ask_at_ms=None if ask_in_s is None else situation.now_ms + round(1000 * ask_in_s),
        ends_at_ms=memory.plan.ends_at_ms if memory.plan else None,
    )


def _described(situation: Situation, memory: TideMemory) -> str:
    plan = memory.plan
    assert plan is not None, "asked once it is planned"
    trainer = stages_text([stage.num_trainer_gpus for stage in plan.stages])
    starts_s, ends_s = ((at - situation.now_ms) / 1000 for at in (plan.starts_at_ms, plan.ends_at_ms))
    return f"the trainer starts in {starts_s:.0f} s on {trainer}; the iteration ends in {ends_s:.0f} s"
