"""When the iteration ends under each of many plans, all computed at once: one row a plan, numpy along it.

A plan says when the trainer gets its first GPUs and, for each remaining minibatch, how many GPUs train and infer during
it; engines have the others. So an iteration is a few segments in which no size changes: one a minibatch. Where
gradients are carried, a minibatch has two where the rollout ends in it: from then on the trainer has the engines' GPUs,
if the rest is worth the move. Plans that are alike until the end of a segment have one row in common until there. In
each segment:

1. Decoding. A step of n engines with b running sequences and K KV tokens takes

       step_s = max(floor, base + per_sequence * b / n + per_kv * K / n)

   The axis u (`outlook`) runs slots / present slots as fast as steps while sequences wait. Where none waits and b is
   above the slots, all b sequences share the slots. In truth some wait, and the longest go first: such a plan ends a
   little sooner than that. With fewer slots than the outlook's a running sequence is older at the same u, and has more
   KV tokens (`_kv_of_each`).
2. The queue. Sequences that engines hand back go to its head. Those behind them start later, by as much as keeps the
   tokens that are left; of the running groups, each ends later by the wait of its own sequences.
3. Inference, and then the trainer, take the lots in order. Lot i ends at

       end_i = max(end_(i-1), ready_i) + w_i                          w_i: seconds of work; ready_i: when it can begin
             = W_i + max over j <= i of (ready_j - W_(j-1))           W: the sums of w (Lindley 1952)

   The second form is one cumulated sum and one cumulated maximum. A trainer that does not stream begins a minibatch
   when the last lot is ready. In a fixed order the trainer's work of a lot is what waits for it (`due_tokens`).
   Inference is described in `inference`.
4. Engines that leave. The others compute the KV caches of the moved sequences again, and decode nothing meanwhile.
   Engines that come get no sequence once the queue is empty. Engines that are asked to leave ahead of a minibatch's end
   do nothing until then, and the others make up for it.

Invariants:
- A plan that leaves work without GPUs never ends (inf). [test_forecast: without_gpus_never_ends]
- Engines with more sequences than slots take longer in proportion, and no more: a plan that is one engine smaller than
  another is about as good. [test_forecast: half_of_the_engines_take]
- Engines that leave take no work with them. [test_foresight: few_engines_is_forecast_within]
- Plans do not influence each other: each ends as it does alone. [test_foresight: the_same_alone_and_among_others]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from services.scheduler.policy.tide.cluster import Cluster, Plans
from services.scheduler.policy.tide.inference import Inference
from services.scheduler.policy.tide.outlook import NO_STEPS, Outlook
from services.scheduler.policy.tide.rows import alike, in_order, places_of, values_at
from services.scheduler.policy.tide.segments import At, Segment, Trained, merged, rows_of
from services.scheduler.state.costs import Costs
from services.scheduler.state.observed import Floats, Ints

NEVER_S = 1e7
"""Far beyond any iteration: the end of work that waits for a component without GPUs."""

COVERED = 0.15
"""The share of a group's remaining steps that its waiting members may wait without delaying it: the longest of the few
that wait is shorter than the longest of all. The expected maxima of 5 and of 16 normal values differ by 0.6 sigma; a
spread within a group is often about 0.25. With 0.6 of the told spread, iterations that are told 0.7 of it take 3.6 %
longer on five seeds, and those told right are no shorter."""

COUNTS = 512
"""Points of the table from ended sequences to u."""


@dataclass(frozen=True)
class Forecast:
    left: Outlook
    cluster: Cluster
    costs: Costs

    @property
    def infers_ahead(self) -> bool:
        """Whether inference may get GPUs ahead of the trainer: in a fixed order, while neither has any."""
        cluster = self.cluster
        has_none = not (cluster.is_open or cluster.num_trainer_gpus or cluster.num_inference_gpus)
        return has_none and not self.left.is_by_arrival

    @cached_property
    def first_s(self) -> float:
        """Seconds until the first group has ended, at the speed of all engines. The trainer has no work before."""
        lots = self.left.lots
        if not lots.tokens.size or lots.is_ended.any():
            return 0.0
        first = float((np.maximum(lots.starts, 0.0) + lots.steps).min())
        return self._reached_s(first, self.cluster.num_engines)

    @cached_property
    def span_s(self) -> float:
        """Seconds until the rollout is over, at the speed of all present engines."""
        return self.over_s(self.cluster.num_engines)

    def over_s(self, num_engines: int) -> float:
        """Seconds until the rollout is over, at the speed of `num_engines` engines."""
        return self._reached_s(self.left.load.last, num_engines)

    def _reached_s(self, u: float, num_engines: int) -> float:
        engines = np.array([float(max(1, num_engines))])
        speed = engines * self.cluster.max_running / self.left.load.num_slots
        times = self._times(engines, np.ones(1), speed, np.zeros(1), np.zeros(1))
        return float(values_at(times, np.array([[u / self.left.load.step]]))[0, 0])

    def ends_s(self, plans: Plans) -> Floats:
        """By plan: seconds from now until the update of the last minibatch (inf: never). A plan may have no minibatch
        to come besides the open one."""
        first, of_plan = alike(*self._beginnings(plans))
        at, trainer, nth = self._begun(plans.rows(first))
        for column in range(plans.trainer.shape[1]):
            # Plans that are alike until the end of this minibatch have one row in common.
            sizes = plans.trainer[:, column].tolist(), plans.inference[:, column].tolist()
            first, of_next = alike(of_plan.tolist(), *sizes)
            before, own = of_plan[first], plans.rows(first)
            at, trainer, of_plan = rows_of(at, before), trainer[before], of_next
            segment, trainer = self._segment(own, column, trainer, at, nth + column)
            at = self._through(at, segment)
            if at.is_mid.any():
                mid = np.flatnonzero(at.is_mid)
                cut, has = rows_of(at, mid), trainer[mid]
                rest, trainer[mid] = self._rest(self._segment(own.rows(mid), column, has, cut, nth + column), has, cut)
                at = merged(at, mid, self._through(cut, rest))
        ends: Floats = np.where(at.t >= NEVER_S, np.inf, at.t)[of_plan]
        return ends

    def stays_s(self, num_minibatches: int) -> float:
        """Seconds from now until the update of the last of `num_minibatches` minibatches to come, with every GPU where
        it is."""
        none = np.zeros((1, 0), dtype=np.int64)
        at, _, nth = self._begun(Plans(np.zeros(1), none, none))
        for column in range(num_minibatches):
            at = self._through(at, self._as_it_is(1, nth + column, np.zeros(1)))
        seconds = float(at.t[0])
        return math.inf if seconds >= NEVER_S else seconds

    def _beginnings(self, plans: Plans) -> tuple[list[float], ...]:
        """By plan: all by which plans differ in `_begun`."""
        if self.cluster.is_open:
            return ([0.0] * plans.count,)
        start_s = plans.start_s.tolist()
        if not self.infers_ahead:
            return (start_s,)
        return start_s, plans.infers_s.tolist(), plans.inference[:, 0].tolist()

    def _begun(self, plans: Plans) -> tuple[At, Floats, int]:
        """The moment until which plans do not differ: their start, or the end of the open minibatch. Also the trainer's
        GPUs by then, and the number of minibatches that have passed."""
        count, lots, cluster = plans.count, self.left.lots, self.cluster
        shape = count, lots.tokens.size
        ended_s = np.where(lots.is_handed_on, -2.0, np.where(lots.is_ended, -1.0, NEVER_S))
        inferred_s = np.where(np.arange(lots.tokens.size) < lots.is_handed_on.sum(), 0.0, NEVER_S)
        at = At(
            t=np.zeros(count),
            u=np.zeros(count),
            aged=np.zeros(count),
            engines=np.full(count, float(cluster.num_engines if cluster.num_working is None else cluster.num_working)),
            scale=np.ones(count),
            has_started=np.broadcast_to(lots.starts < 0, shape),
            steps=np.broadcast_to(lots.steps, shape),
            ended_s=np.broadcast_to(ended_s, shape),
            inferred_s=np.broadcast_to(inferred_s, shape),
            ahead_tokens=np.full(count, self.left.num_tokens_ahead or 0.0),
            trained_tokens=np.zeros(count),
            is_mid=np.zeros(count, dtype=np.bool_),
        )
        trainer = np.full(count, float(cluster.num_trainer_gpus))
        if not cluster.is_open:
            is_ahead = plans.infers_s < plans.start_s
            if self.infers_ahead and is_ahead.any():
                first_s = np.minimum(plans.infers_s, plans.start_s)
                at = self._through(at, self._as_it_is(count, None, first_s, is_cut=True))
                ahead, rows = self._through(at, self._ahead(plans, plans.start_s - at.t)), np.flatnonzero(is_ahead)
                return merged(at, rows, rows_of(ahead, rows)), trainer, 0
            return self._through(at, self._as_it_is(count, None, plans.start_s, is_cut=True)), trainer, 0
        if cluster.until_s is not None:
            return self._through(at, self._as_it_is(count, None, np.full(count, cluster.until_s))), trainer, 1
        segment = self._as_it_is(count, 0, np.zeros(count))
        return self._through(at, segment), trainer, 1

    def _as_it_is(self, count: int, minibatch: int | None, after_s: Floats, *, is_cut: bool = False) -> Segment:
        cluster = self.cluster
        rate = cluster.unit_rates[cluster.num_trainer_gpus // cluster.unit_size]
        return Segment(
            engines=np.full(count, float(cluster.num_engines)),
            inference=np.full(count, float(cluster.num_inference_gpus)),
            rate=np.full(count, rate),
            train_after_s=after_s,
            infer_after_s=np.zeros(count),
            minibatch=minibatch,
            fixed_s=0.0 if minibatch is None else self.costs.update_s,
            is_cut=is_cut,
        )

    def _ahead(self, plans: Plans, after_s: Floats) -> Segment:
        """The segment in which inference has GPUs and the trainer has none."""
        cluster, costs = self.cluster, self.costs
        inference = plans.inference[:, 0].astype(np.float64)
        return Segment(
            engines=np.maximum((cluster.num_gpus - inference) // cluster.engine_size, 1.0),
            inference=inference,
            rate=np.zeros(plans.count),
            train_after_s=np.maximum(after_s, 0.0),
            infer_after_s=np.full(plans.count, costs.release_s + costs.inference_start_s),
            minibatch=None,
            fixed_s=0.0,
            is_cut=True,
        )

    def _segment(self, plans: Plans, column: int, before: Floats, at: At, minibatch: int) -> tuple[Segment, Floats]:
        """The segment of a minibatch, and its trainer's GPUs. After the rollout's end those of the engines too, where
        the rollout is over now or the trainer can still move."""
        cluster, costs = self.cluster, self.costs
        trainer, inference = plans.trainer[:, column].astype(np.float64), plans.inference[:, column].astype(np.float64)
        is_over = at.u >= self.left.load.last - 1e-6
        room = cluster.num_gpus - inference - np.where(is_over, 0, cluster.engine_size)
        fitting = np.maximum(room // cluster.unit_size, 0) * cluster.unit_size
        # One that cannot move in a minibatch keeps to its plan: it would have too few GPUs if the rollout ended later.
        gets_all = is_over & (cluster.carries or self.left.load.last <= NO_STEPS)
        trainer = np.where(gets_all, fitting, np.minimum(trainer, fitting))
        spare = cluster.num_gpus - trainer - inference
        engines = np.where(is_over, 0.0, np.maximum(1.0, spare // cluster.engine_size))
        # Before an open minibatch ends, engines are asked ahead; else the release delays the trainer.
        is_unannounced = column == 0 and not cluster.is_open
        released_s = costs.release_s if is_unannounced else 0.0
        idle_share = self._idle_share(before, trainer) if cluster.carries else 1.0
        units = cluster.units(trainer)
        switch_s = cluster.switch_s[cluster.units(before), units]
        starts_s = np.where(inference > cluster.num_inference_gpus, costs.inference_start_s, 0.0)
        segment = Segment(
            engines=engines,
            inference=inference,
            rate=cluster.unit_rates[units],
            train_after_s=switch_s + released_s * idle_share,
            infer_after_s=(starts_s if column == 0 else 0.0 * starts_s) + released_s,
            minibatch=minibatch,
            fixed_s=costs.update_s,
            leave_s=0.0 if is_unannounced else costs.release_s,
            is_cut=cluster.carries,
        )
        return segment, trainer

    def _rest(self, whole: tuple[Segment, Floats], before: Floats, at: At) -> tuple[Segment, Floats]:
        """The segment of a minibatch's rest after the rollout's end, and its trainer's GPUs. Where the move to the
        engines' GPUs takes longer than it saves, the trainer stays and inference gets them."""
        (segment, trainer), cluster = whole, self.cluster
        assert segment.minibatch is not None, "only a minibatch is cut"
        tokens = self.left.tokens_of(segment.minibatch) - at.trained_tokens
        here, there = cluster.units(before), cluster.units(trainer)
        rates = np.maximum(cluster.unit_rates, 1e-3)
        move_s = cluster.switch_s[here, there] + self.costs.release_s * self._idle_share(before, trainer)
        moves = tokens / rates[here] > tokens / rates[there] + move_s
        rest = replace(
            segment,
            inference=np.where(moves, segment.inference, cluster.num_gpus - before),
            rate=np.where(moves, segment.rate, cluster.unit_rates[here]),
            train_after_s=np.where(moves, move_s, 0.0),
            infer_after_s=np.full(before.size, self.costs.release_s),
        )
        return rest, np.where(moves, trainer, before)

    def _idle_share(self, before: Floats, after: Floats) -> Floats:
        """The share of the time of a release that the trainer loses: it goes on where it is, more slowly."""
        rates = self.cluster.unit_rates
        there = np.maximum(rates[self.cluster.units(after)], 1e-3)
        share: Floats = np.where(after > before, 1.0 - rates[self.cluster.units(before)] / there, 0.0)
        return np.maximum(share, 0.0)

    def _through(self, at: At, segment: Segment) -> At:
        load, lots = self.left.load, self.left.lots
        working = np.where(at.u < load.queue_until, segment.engines, np.minimum(segment.engines, at.engines))
        slots = np.maximum(working, 1e-9) * self.cluster.max_running
        speed = slots / load.num_slots
        at, stall_s = self._switched(at, working, slots, segment.leave_s)
        scale = np.where(at.u < load.queue_until, speed, at.scale)
        times = self._times(working, scale, speed, at.u, at.aged)
        queued_steps = np.maximum(load.queue_until - at.u, 0.0) / speed
        start_steps = np.where(at.has_started, 0.0, (lots.starts - at.u[:, None]) / speed[:, None])
        steps = start_steps + at.steps
        in_queue = np.minimum(steps, queued_steps[:, None])
        end_u = at.u[:, None] + speed[:, None] * in_queue + (steps - in_queue)
        times_s = values_at(times, np.concatenate((end_u, at.u[:, None]), axis=1) / load.step)
        shift = at.t + stall_s - times_s[:, -1]
        ended_s = np.where(at.ended_s > at.t[:, None], shift[:, None] + times_s[:, :-1], at.ended_s)
        order = ended_s.argsort(axis=1, kind="stable")
        inference = Inference(self.left, self.cluster, at, segment, order, in_order(ended_s, order))
        inferred_s = inference.handed_on_s()
        trained = self._trained(at, segment, inferred_s, order)
        end, trained_tokens, is_mid = trained.end_s, np.zeros(at.t.size), np.zeros(at.t.size, dtype=np.bool_)
        if segment.is_cut:
            over = np.maximum(shift + times[:, -1], at.t)
            if segment.minibatch is None:
                end = np.minimum(end, over)
            else:
                is_mid = (at.u < load.last - 1e-6) & (over < trained.last_begins_s)
                trained_tokens = np.where(is_mid, at.trained_tokens + trained.seconds_until(over) * segment.rate, 0.0)
                end = np.where(is_mid, over, end)
        u = np.maximum(places_of(times, end - shift) * load.step, at.u)
        queued = np.maximum(np.minimum(u, load.queue_until) - at.u, 0.0)
        past = queued / speed + (u - at.u - queued)
        has_started = at.has_started | (start_steps <= past[:, None])
        steps = np.where(has_started, steps - past[:, None], at.steps)
        return At(
            t=end,
            u=u,
            aged=at.aged + past,
            engines=working,
            scale=scale,
            has_started=has_started,
            steps=steps,
            ended_s=ended_s,
            inferred_s=inferred_s,
            ahead_tokens=inference.tokens_ahead(inferred_s, end),
            trained_tokens=trained_tokens,
            is_mid=is_mid,
        )

    def _switched(self, at: At, engines: Floats, slots: Floats, leave_s: float) -> tuple[At, Floats]:
        """After a switch: the moment, and by plan the seconds in which the remaining `engines` compute the caches of
        moved sequences and decode nothing, or make up for engines that left ahead. Sequences beyond the slots go to the
        head of the queue."""
        load = self.left.load
        if not (engines < at.engines).any() and not (slots != at.scale * load.num_slots).any():
            return at, np.zeros(at.t.size)
        place = self._interval(at.u)
        is_running = at.u < load.last - 1e-6
        running = np.where(is_running, load.running[place] * at.scale, 0.0)
        had = np.maximum(at.engines, 1e-9) * self.cluster.max_running / load.num_slots
        kv_of_each = self._kv_of_each(at.u[:, None], at.aged[:, None], had)[:, 0]
        cached = running * kv_of_each
        share = np.maximum(at.engines - engines, 0.0) / np.maximum(at.engines, 1.0)
        stall_s = cached * share / np.maximum(engines, 1e-9) / self.costs.prefill_tokens_per_s
        waits = at.u < load.queue_until
        if leave_s:
            after = np.where(waits, slots, running)
            lost = self._tokens_per_s(running, kv_of_each, at.engines) * share
            stall_s = stall_s + leave_s * lost / np.maximum(self._tokens_per_s(after, kv_of_each, engines), 1e-9)
        # The fewer run when the queue is empty, the more of the work is done before.
        more = np.where(waits, slots - at.scale * load.num_slots, 0.0)
        if not more.any():
            return at, stall_s
        moved = np.minimum(at.u + more * self._steps_after_queue / load.num_slots, load.queue_until)
        back = np.where(waits, np.maximum(running - slots, 0.0), 0.0)
        steps = at.steps
        if back.any():
            steps = steps + np.where(back[:, None] > 0, self._waits(at, back, slots, place), 0.0)
        return replace(at, u=np.where(waits, moved, at.u), steps=steps), stall_s

    def _waits(self, at: At, back: Floats, slots: Floats, place: Ints) -> Floats:
        """By plan and lot: the steps by which sequences that are back in the queue delay a lot that has started.

        The lots that end first come first. A lot's sequences start again when as many others have ended as come before.
        """
        load = self.left.load
        runs = at.has_started & (at.ended_s > at.t[:, None])
        order = np.where(runs, at.steps, np.inf).argsort(axis=1, kind="stable")
        nth = np.empty_like(order)
        nth[np.arange(len(order))[:, None], order] = np.arange(order.shape[1])
        share = nth / np.maximum(runs.sum(axis=1), 1)[:, None]
        ended = load.num_ended[place][:, None] + share * (back * load.num_slots / slots)[:, None]
        at_count = np.minimum(ended * (COUNTS / max(load.num_ended[-1], 1.0)), COUNTS).astype(np.int64)
        waits = self._u_by_count[at_count] - at.u[:, None]
        return np.where(runs, np.maximum(waits - COVERED * at.steps, 0.0), 0.0)

    @cached_property
    def _u_by_count(self) -> Floats:
        """The u at which the n-th sequence ends, for `COUNTS` + 1 values of n."""
        load = self.left.load
        middles = (np.arange(load.num_ended.size) + 0.5) * load.step
        counts = np.linspace(0.0, load.num_ended[-1], COUNTS + 1)
        by_count: Floats = np.interp(counts, load.num_ended, middles)
        return by_count

    @cached_property
    def _steps_after_queue(self) -> float:
        """The steps of a slot after the queue is empty, in the mean."""
        load = self.left.load
        return float(load.running[self._num_queued :].sum() * load.step / load.num_slots)

    @cached_property
    def _kv_tokens(self) -> Floats:
        """By interval: the KV tokens of a running sequence of the outlook, in the mean."""
        load = self.left.load
        tokens: Floats = load.kv_tokens / np.maximum(load.running, 1.0)
        return tokens

    def _interval(self, u: Floats) -> Ints:
        load = self.left.load
        return np.minimum(np.maximum(u / load.step, 0.0).astype(np.int64), load.running.size - 1)

    def _kv_of_each(self, u: Floats, aged: Floats, speed: Floats) -> Floats:
        """By plan and point u: the KV tokens of a running sequence, in the mean. `aged`: the steps of one that runs all
        the time.

        While sequences wait they are between two bounds, and the mean of these is within a tenth of the simulator's:
        - more than where the outlook's sequences are as old, because fewer of those that run are new;
        - less than if those that run at the same u were as old, or had the tokens of all, because some have ended. None
          has more than at its end.
        """
        load, here = self.left.load, self._interval(u)
        as_old, at_u = np.maximum(aged, u), self._kv_tokens[here]
        least = self._kv_tokens[self._interval(np.minimum(as_old, load.queue_until))]
        most = at_u * np.minimum(as_old / np.maximum(u, 1e-9), np.maximum(1.0 / speed[:, None], 1.0))
        most = np.minimum(most, at_u + load.rest[here])
        tokens: Floats = np.where(u < load.queue_until, (least + most) / 2, at_u)
        return tokens

    def _times(self, engines: Floats, scale: Floats, speed: Floats, u: Floats, aged: Floats) -> Floats:
        """By plan: seconds from u = 0 to each point of the grid, where the segment begins at `u`. `speed` follows from
        the engines."""
        load = self.left.load
        u, aged = np.where(u < load.queue_until, (u, aged), 0.0)
        first, of_plan = alike(engines.tolist(), scale.tolist(), u.tolist(), aged.tolist())
        running = load.running * (scale[first] / np.maximum(engines[first], 1e-9))[:, None]
        middles = load.step * np.linspace(0.5, load.running.size - 0.5, load.running.size)[None, :]
        since = (middles - u[first, None]) / speed[first, None]
        cached = running * self._kv_of_each(middles, aged[first, None] + since, speed[first])
        seconds = self._step_s(running, cached)
        seconds[:, : self._num_queued] /= speed[first, None]
        seconds *= load.step
        times = np.zeros((len(first), load.running.size + 1))
        np.minimum(seconds, NEVER_S, out=seconds).cumsum(axis=1, out=times[:, 1:])
        return times[of_plan]

    def _step_s(self, running: Floats, cached: Floats) -> Floats:
        """Seconds of a step of an engine with so many sequences and KV tokens. Those above its slots or its cache share
        them with the others."""
        cluster, decode = self.cluster, self.costs.decode
        over = np.maximum(np.maximum(running / cluster.max_running, cached / cluster.kv_capacity_tokens), 1.0)
        line = (
            decode.base_s
            + decode.per_sequence_s * np.minimum(running, cluster.max_running)
            + decode.per_kv_token_s * np.minimum(cached, cluster.kv_capacity_tokens)
        )
        seconds: Floats = np.maximum(decode.floor_s, line) * over
        return seconds

    def _tokens_per_s(self, running: Floats, kv_of_each: Floats, engines: Floats) -> Floats:
        """By plan: of so many running sequences on so many engines."""
        of_each = running / np.maximum(engines, 1e-9)
        rate: Floats = running / np.maximum(self._step_s(of_each, of_each * kv_of_each), 1e-12)
        return rate

    @cached_property
    def _num_queued(self) -> int:
        """Intervals of the grid that begin while sequences wait."""
        load = self.left.load
        return int(np.count_nonzero(np.arange(load.running.size) * load.step < load.queue_until))

    def _trained(self, at: At, segment: Segment, inferred_s: Floats, order: Ints) -> Trained:
        begin, none = at.t + segment.train_after_s, np.zeros((at.t.size, 0))
        if segment.minibatch is None:
            return Trained(begin, none, none, begin)
        since, tokens, last_tokens = self._of_minibatch(segment.minibatch, inferred_s, order)
        if not tokens.shape[1]:
            return Trained(begin + segment.fixed_s, none, none, begin)
        if at.is_mid.any():
            before = tokens.cumsum(axis=1) - tokens
            tokens = tokens - np.minimum(np.maximum(at.trained_tokens[:, None] - before, 0.0), tokens)
        rate = np.maximum(segment.rate, 1e-3)
        work = tokens / rate[:, None]
        done = work.cumsum(axis=1)
        # Without streaming the first lot too waits for the last one.
        earlier = done - work if self.left.streams else 0.0
        waits = np.maximum(since, begin[:, None]) - earlier
        end: Floats = done[:, -1] + waits.max(axis=1)
        begins = np.maximum.accumulate(waits, axis=1) + done - work
        last_s = np.minimum(last_tokens / rate, work[:, -1])
        return Trained(np.minimum(end, NEVER_S) + segment.fixed_s, begins, work, last_s)

    def _of_minibatch(self, nth: int, inferred_s: Floats, order: Ints) -> tuple[Floats, Floats, Floats]:
        """By plan: when each lot of the minibatch is handed on, in that order, the tokens that can be trained then, and
        the last lot's own tokens."""
        left, lots = self.left, self.left.lots
        if left.is_by_arrival:
            own = slice(left.until[nth - 1] if nth else 0, left.until[nth])
            tokens = lots.tokens[order[:, own]]
            return inferred_s[:, own], tokens, tokens[:, -1:].sum(axis=1)
        # Every row has the same number of the minibatch's lots, so that they make columns.
        columns = np.nonzero(lots.minibatch[order] == nth)[1].reshape(len(order), -1)
        rows = np.arange(len(order))[:, None]
        nths = order[rows, columns]
        return inferred_s[rows, columns], lots.due_tokens[nths], lots.tokens[nths][:, -1:].sum(axis=1)
