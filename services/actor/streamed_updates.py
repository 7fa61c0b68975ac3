"""Trains a minibatch portion by portion: sends the ranks its groups as they come, and the update with the last ones.

Between two portions the ranks hold uncommitted gradients. A resize with all ranks alive carries them into the new
layout, so it comes before the next portion. Any other interruption of the ranks (`AllRanks`) loses them, such as a
death. Then their tokens are counted, and the minibatch begins again with all groups that are there.

In reproducible mode a resize loses them too. So it waits for the portions whose groups are there.

Invariants:
- An update has each group of its minibatch once, whatever interrupts its portions.
  [test_streaming: minibatch_begins_again_after_a_resize] [test_streaming: minibatch_begins_again_after_a_death]
- A portion is trained once, however often the layout changes after it. [test_streaming: minibatch_goes_on_after]
- A resize waits for a portion that is under way. In reproducible mode it also waits for those whose groups are there.
  [test_streaming: reproducible_resize_does_not_wait] [test_streaming: reproducible_resize_waits]
- It does not wait for a rest that takes longer than the whole minibatch in its layout.
  [test_streaming: begins_again_at_once]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from services.actor.all_ranks import AllRanks
from services.actor.iteration_state import BegunMinibatch, IterationState, update_report, update_samples
from services.actor.lr import LrUpdate
from services.actor.portions import PORTION_S, Portion, next_portion
from services.actor.settings import limits_of
from tidegate.job import Job
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire


class StreamedUpdates:
    def __init__(self, ranks: AllRanks, job: Job) -> None:
        self._ranks = ranks
        self._config = job.config
        self._carries = job.config.actor.carries_gradients
        self._limits = limits_of(job.config.actor, job.model)
        self._reshard_s = job.config.assumptions.costs.reshard_s

    def next_portion(self, state: IterationState, *, is_held: bool) -> Portion | None:
        """The portion to train now. Drops those before it, where the ranks have lost their gradients.

        If training is held, no minibatch begins. One that has begun goes on. A change of the ranks that carries
        gradients comes first: the portions after it are cut for its layout."""
        if self._ranks.are_carrying:
            return None
        if self._are_lost(state.begun):
            state.drop_portions()
        if is_held and not state.begun.num_portions:
            return None
        portion = next_portion(
            state.assembly,
            state.trained_lengths,
            self._limits,
            dp=self._ranks.layout.dp,
            streams=self._config.actor.streams_minibatches,
            most_tokens=self._most_tokens(state),
        )
        if portion is None or self._is_sooner_anew(state):
            self._ranks.end_reservation()
            return None
        return portion

    def _most_tokens(self, state: IterationState) -> float:
        """The most tokens of a portion, if a resize may wait for it to end."""
        tokens = state.picture.rates.tokens_in(self._ranks.layout, PORTION_S) if self._carries else None
        return math.inf if tokens is None else tokens

    def _is_sooner_anew(self, state: IterationState) -> bool:
        """Whether the begun minibatch ends sooner if it begins again in the layout of a change that waits."""
        layout = self._ranks.wanted
        if layout is None or not state.begun.num_portions:
            return False
        rest, begun = (_lengths(state, prompts) for prompts in (state.assembly.joining, state.assembly.open))
        rates = state.picture.rates
        here_s = rates.expected_s(self._ranks.layout, rest)
        anew_s = rates.expected_s(layout, [*begun, *rest])
        return here_s is not None and anew_s is not None and anew_s + self._reshard_s < here_s

    def portions(self, begun: BegunMinibatch) -> tuple[wire.Accumulate, ...]:
        """The portions that a resize now carries. None in reproducible mode."""
        return () if not self._carries or self._are_lost(begun) else tuple(begun.portions)

    async def accumulate(self, portion: Portion, state: IterationState, *, update_id: str, lr_before: str) -> None:
        call = wire.Accumulate(update_id=update_id, bundle_sizes=portion.bundle_sizes)
        call.samples.extend(self.samples_of(state.trained_groups(portion.prompts)))
        call.num_before, call.lr_before = state.begun.num_portions, lr_before
        what = f"portion {call.num_before} of update {update_id}"
        if await self._ask(what, wire.WorkerCall(accumulate=call), call.samples, state, is_last=False) is not None:
            state.begun.portions.append(call)
            state.begun.num_tokens += _num_tokens(call.samples)

    async def update(self, portion: Portion, state: IterationState, lr: LrUpdate) -> wire.UpdateReport | None:
        """The update, with the last portion of its minibatch. None where the portions before it are lost."""
        train = wire.Train(update_id=lr.update_id, learning_rate=lr.rate, bundle_sizes=portion.bundle_sizes)
        train.samples.extend(self.samples_of(state.trained_groups(portion.prompts)))
        train.num_portions = state.begun.num_portions
        train.lr_before, train.lr_after = lr.before.mark, lr.committed.mark
        call = wire.WorkerCall(train=train)
        replies = await self._ask(f"update {lr.update_id}", call, train.samples, state, is_last=True)
        if replies is None:
            return None
        state.begun = BegunMinibatch()
        reports = [reply.update for reply in replies]
        lr.check(reports)
        return update_report(reports)

    def samples_of(self, groups: Sequence[samples_pb2.SampleGroup]) -> list[wire.TrainSample]:
        return [sample for group in groups for sample in update_samples(group, self._config.algorithm)]

    async def _ask(
        self,
        what: str,
        call: wire.WorkerCall,
        samples: Sequence[wire.TrainSample],
        state: IterationState,
        *,
        is_last: bool,
    ) -> list[wire.WorkerReply] | None:
        """The ranks' replies. None where an interruption came first: then nothing was asked."""
        begun = state.begun

        async def ask_portion() -> list[wire.WorkerReply] | None:
            if self._are_lost(begun):
                return None
            begun.num_interruptions = self._ranks.num_interruptions
            lengths = [len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples]
            with state.picture.in_portion(
                self._ranks.layout, num_tokens=_num_tokens(samples), lengths=lengths, is_last=is_last
            ):
                return await self._ranks.ask(call)

        return await self._ranks.do(what, ask_portion, reserves=not is_last)

    def _are_lost(self, begun: BegunMinibatch) -> bool:
        return bool(begun.num_portions) and begun.num_interruptions != self._ranks.num_interruptions


def _lengths(state: IterationState, prompts: Iterable[int]) -> list[int]:
    """The tokens of each sample of these prompts that is trained."""
    return [length for prompt in prompts for length in state.trained_lengths.get(prompt, ())]


def _num_tokens(samples: Sequence[wire.TrainSample]) -> int:
    """The response tokens."""
    return sum(len(sample.response_tokens) for sample in samples)
